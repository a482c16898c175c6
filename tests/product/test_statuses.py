"""The exit status of the command line: 0 done, 1 the answer is no, 2 wrong usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_work import FILE, checkpoints_of, events_of, losses_of

import apportion

Command = Callable[..., Any]
TWO = ("--workers", "2")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with ``work.py``."""
    (tmp_path / "work.py").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize(
    "strategy",
    [
        "data_parallel",
        pytest.param("tensor_parallel(min_width=8)", marks=pytest.mark.thorough),
        pytest.param("local_sgd(every=2)", marks=pytest.mark.thorough),
    ],
)
def test_train_ends_with_0(strategy: str, project: Path, apportion_command: Command) -> None:
    done = apportion_command("train", "work.py:tested", strategy, *TWO, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert checkpoints_of(project / "run") == [6]
    assert events_of(project / "run")[-1]["data"]["reason"] == "finished"
    assert (project / "run" / "report.html").is_file()


@pytest.mark.thorough
def test_flags_replace_the_steps_and_the_seed_of_the_workload(project: Path, apportion_command: Command) -> None:
    words = ("train", "work.py:workload", "single_device", "--steps", "4", "--seed")
    assert apportion_command(*words, "5", "--run-dir", "one").returncode == 0
    where = f"{project}/work.py:workload"
    for name, seed in (("two", 5), ("three", 6)):
        apportion.train(where, "single_device", run_dir=project / name, steps=4, seed=seed)
    one, two, three = (losses_of(project / name) for name in ("one", "two", "three"))
    assert len(one) == 4
    assert one == two != three


@pytest.mark.parametrize(
    "strategy", ["data_parallel", pytest.param("pipeline_parallel(microbatches=2)", marks=pytest.mark.thorough)]
)
def test_check_ends_with_0_where_the_answer_is_yes(strategy: str, project: Path, apportion_command: Command) -> None:
    done = apportion_command("check", "work.py:workload", "--strategy", strategy, *TWO, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["holds"], found["workers"]) == (0, True, 2)
    assert {comparison["verdict"] for comparison in found["rounds"]} == {"equal"}


@pytest.mark.parametrize("verb", ["check", pytest.param("train", marks=pytest.mark.thorough)])
def test_a_network_that_reads_its_rank_ends_with_1(verb: str, project: Path, apportion_command: Command) -> None:
    done = apportion_command(verb, "work.py:by_rank", "--strategy", "data_parallel", *TWO)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert not list(project.glob("runs/*/checkpoints/step-*"))


def test_a_loss_that_is_not_finite_ends_with_1(project: Path, apportion_command: Command) -> None:
    words = ("train", "work.py:diverging", "data_parallel", *TWO, "--no-check", "--run-dir", "run")
    done = apportion_command(*words)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not checkpoints_of(project / "run")


def test_a_proof_that_is_required_and_cannot_be_made_ends_with_1(project: Path, apportion_command: Command) -> None:
    words = ("train", "work.py:workload", "hogwild", *TWO, "--require-proof", "--run-dir", "run")
    done = apportion_command(*words)
    assert done.returncode == 1, done.stderr
    assert not checkpoints_of(project / "run")


WRONG = {
    "an unknown verb": ("trian", "work.py:workload"),
    "an unknown flag": ("train", "work.py:workload", "--epoch", "3"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_usage_ends_with_2(mistake: str, project: Path, apportion_command: Command) -> None:
    done = apportion_command(*WRONG[mistake])
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert not list(project.glob("runs/*/checkpoints/step-*"))
