"""``apportion check FILE --then '--resume last.pt'`` runs a script twice, and compares it across the resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import apportion

SCRIPT = Path(__file__).parent / "scripts" / "resumes" / "digits_in_two_runs.py"
SECONDS = 110.0


def check(*own: str, then: str = "--resume last.pt", folder: Path, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Runs the command in a folder, and returns its answer."""
    done = subprocess.run(
        [sys.executable, "-m", "apportion", "check", str(SCRIPT), "--json", "--then", then, *flags, "--", *own],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == found["status"]
    return found


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_that_resumes_with_all_of_its_state_is_the_same_network(tmp_path: Path) -> None:
    found = check(folder=tmp_path)
    assert found["verdict"] == "the same network", found["findings"]
    assert found["compared"]["steps"] == 5 + 5, "5 steps, and those from the checkpoint of step 3 to step 8"
    assert any("run again, with --resume last.pt" in sentence for sentence in found["about"])
    assert not list(tmp_path.iterdir()), "what both runs wrote is discarded"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "name", "words"),
    [
        ("position", "resumed_rows", "read again"),
        ("optimizer", "resumed_state", "AdamW has lost its state (step, exp_avg, exp_avg_sq)"),
        ("weights", "not_resumed", "begins with weights that none of the 5 steps"),
        ("ranks", "different_beginnings", "Rank 1 goes on after step 5 with other weights than rank 0"),
    ],
)
def test_what_is_lost_at_a_resume_is_found(lost: str, name: str, words: str, tmp_path: Path) -> None:
    found = check("--lose", lost, folder=tmp_path)
    assert found["status"] == 1
    assert name in [finding["name"] for finding in found["findings"]]
    assert words in next(finding["sentence"] for finding in found["findings"] if finding["name"] == name)


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_that_accumulates_and_resumes_is_the_same_network(tmp_path: Path) -> None:
    own = ("--micro-batches", "2", "--save-every", "1", "--last-step", "3", "--epochs", "3")
    found = check(*own, folder=tmp_path)
    assert found["verdict"] == "the same network", found["findings"]
    assert found["compared"]["steps"] == 6
    assert any("micro-batches" in sentence for sentence in found["about"])


@pytest.mark.processes
@pytest.mark.thorough
def test_a_mistake_of_the_second_run_alone_is_not_found_without_it(tmp_path: Path) -> None:
    answer = apportion.check_script(SCRIPT, ["--lose", "optimizer", "--checkpoint", str(tmp_path / "last.pt")])
    assert answer.verdict == "the same network"


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("own", "then", "words"),
    [
        (("--save-every", "9"), "--resume last.pt", "saved nothing: give the script arguments, after --, with which"),
        ((), "--resume other.pt", "last.pt: give the script arguments"),
        ((), "--resume last.pt --epochs 0", "made no optimizer step"),
        ((), "--again", "run again with --again, failed on rank 0"),
    ],
)
def test_a_second_run_that_cannot_resume_is_explained(
    own: tuple[str, ...], then: str, words: str, tmp_path: Path
) -> None:
    found = check(*own, then=then, folder=tmp_path)
    assert (found["status"], found["verdict"]) == (3, "could not run")
    assert words in found["reason"]


def test_arguments_of_a_second_run_have_to_be_words() -> None:
    with pytest.raises(ValueError, match=r"then='--resume last.pt' must be a list of words"):
        apportion.check_script(SCRIPT, then="--resume last.pt")
    with pytest.raises(ValueError, match="leave out either"):
        apportion.check_script(SCRIPT, then=["--resume", "last.pt"], reference=f"{SCRIPT}:loss")
    done = subprocess.run(
        [sys.executable, "-m", "apportion", "check", str(SCRIPT), "--then", "--resume 'last.pt"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 2
    assert "close its quotes" in done.stderr
