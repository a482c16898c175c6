"""``apportion check`` has no finding in 200 scripts without a mistake, of which at most 6 are undecided. Each of the
200 trains the network that one process trains on the same rows, which is shown without the check."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import healthy_reference
import pytest
from healthy_cases import STACKS, Case, allowed, cases, drawn, pairs
from healthy_parts import BATCHES
from healthy_scripts import EPOCHS, script

CASES = cases(200)
QUICK = (24, 15)
"""Two that are quick: DDP, and DDP in a class on 3 ranks that read a stream."""
SECONDS = 110.0
MOST_UNDECIDED = 6
VERDICTS: dict[int, str] = {}
"""The verdicts that this process has seen, by the number of the case."""


def numbered(*, quick: bool) -> list[Any]:
    numbers = QUICK if quick else range(len(CASES))
    return [pytest.param(number, id=f"{number}-{CASES[number]}") for number in numbers]


def check(case: Case, folder: Path) -> dict[str, Any]:
    """The answer of the command, and its status as "returncode"."""
    (folder / "train.py").write_text(script(case))
    command = [sys.executable, "-m", "apportion", "check", "train.py", "--workers", str(case.ranks), "--json"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    try:
        return {**json.loads(done.stdout), "returncode": done.returncode}
    except ValueError:
        pytest.fail(f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


@pytest.mark.thorough
@pytest.mark.parametrize("number", numbered(quick=True))
def test_a_quick_healthy_script_is_the_same_network(number: int, tmp_path: Path) -> None:
    answer = check(CASES[number], tmp_path)
    assert answer["returncode"] == 0, (answer["verdict"], answer["findings"], answer["reason"])


@pytest.mark.slow
@pytest.mark.parametrize("number", numbered(quick=False))
def test_a_healthy_script_has_no_finding(number: int, tmp_path: Path) -> None:
    answer = check(CASES[number], tmp_path)
    VERDICTS[number] = answer["verdict"]
    wrong = [finding for finding in answer["findings"] if finding["severity"] != "note"]
    assert not wrong, wrong
    assert answer["returncode"] == 0 or answer["verdict"] == "undecided", (answer["verdict"], answer["reason"])


@pytest.mark.slow
def test_at_most_six_healthy_scripts_are_undecided() -> None:
    if len(VERDICTS) < len(CASES):
        pytest.skip(f"this process has the verdicts of {len(VERDICTS)} of {len(CASES)} scripts")
    undecided = [str(CASES[number]) for number, verdict in VERDICTS.items() if verdict == "undecided"]
    assert len(undecided) <= MOST_UNDECIDED, undecided


@pytest.mark.slow
@pytest.mark.parametrize("number", numbered(quick=False))
def test_a_healthy_script_trains_the_network_of_one_process(number: int, tmp_path: Path) -> None:
    case = CASES[number]
    text, most = script(case), 1000
    if case.stack == "accelerate":
        text = text.replace("shuffle=True", "shuffle=False")  # its order depends on the number of processes
    if case.stack in ("accelerate", "trainer") and case.data in ("tail", "drop last"):
        most = 3  # before the end of the epoch, where rows are repeated or left out for the number of processes
    weights = healthy_reference.weights_by_step
    ranks = weights(text, tmp_path / "ranks", case.ranks, case.ranks)
    one = weights(healthy_reference.text_of_reference(text, case.ranks), tmp_path / "one", 1, case.ranks)[0]
    assert len(one) >= 4 * EPOCHS - 2
    assert (one[-1] - one[0]).abs().max() > 1e-4
    assert healthy_reference.furthest(ranks, one, parts=case.stack == "pipeline", most=most) < 1e-7


def test_each_pair_of_values_that_can_stand_together_does() -> None:
    """Compared with the pairs that random cases have in some number."""
    assert all(allowed(case) for case in CASES)
    assert {case.stack for case in CASES} == set(STACKS)
    rng = random.Random(1)
    possible = Counter(pair for stack in STACKS for _ in range(250) for pair in pairs(drawn(stack, 0, rng)))
    covered = {pair for case in CASES for pair in pairs(case)}
    missing = {pair for pair, count in possible.items() if count > 5} - covered
    assert not missing


def test_the_scripts_differ_and_are_ordinary() -> None:
    texts = [script(case) for case in CASES]
    assert len(set(texts)) == len(texts)
    for case, text in zip(CASES, texts, strict=True):
        compile(text, str(case), "exec")
        assert "apportion" not in text
        assert ("DistributedSampler" in text) <= ("set_epoch" in text)
        assert (case.data in BATCHES) == ("torch.randint(len(y)" in text)
