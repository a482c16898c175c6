"""Scripts whose ranks wait for each other: each is reported with the ranks, the lines and the collective, soon. Each
script has its mistake only where it is called with ``--mistake``."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from apportion.script_check.driver import check_script
from apportion.script_check.findings import ScriptAnswer
from apportion.script_check.hangs import report
from apportion.script_check.passes import Conditions, run_pass
from apportion.script_check.script import Script

SCRIPTS = Path(__file__).parent / "scripts" / "hangs"
SOON = 30.0
"""Seconds within which a hang of a small script is to be reported on a machine that does nothing else."""


@dataclass(frozen=True)
class Case:
    """``says``: what the finding says; ``{text}`` in it stands for the place of the first line that begins so."""

    script: str
    finding: str
    ranks: tuple[int, ...]
    says: tuple[str, ...]
    arguments: tuple[str, ...] = ()


CASES = [
    Case(
        "skipped_collective", "diverged_collectives", (0, 1),
        ("call 5 of the group of all ranks: on rank 0 it is all_reduce at {dist.all_reduce(positive)} of int64 []",
         "rank 1 made no such call", "{loss = }"),
    ),
    Case(
        "unequal_shapes", "shape_mismatch", (0, 1),
        ("int64 [4]", "int64 [7]", "all_reduce at {dist.all_reduce(counts)}"),
    ),
    Case(
        "raises_on_one_rank", "rank_raised", (0,),
        ("Rank 0 raised ValueError: the batch has values that are not finite at {raise}",
         "backward at {loss.backward}"),
    ),
    Case(
        "uneven_loader", "diverged_collectives", (0, 1),
        ("on rank 1 it is all_reduce at {dist.all_reduce(total)}", "on rank 0 it is the reduction of gradients",
         "The loader of {loader = } gave rank 1 3 batches and rank 0 at least 4"),
    ),
    Case(
        "receive_without_send", "unmatched_receive", (0, 1),
        ("Rank 0 waits in recv at {dist.recv(gradient} of float64 [4, 4] from rank 1", "rank 1 has made no send",
         "rank 1 waits in recv at {dist.recv(hidden"),
    ),
    Case(
        "barrier_in_branch", "diverged_collectives", (0, 1),
        ("on rank 0 it is barrier at {dist.barrier()}", "on rank 1 it is the reduction of gradients"),
    ),
    Case(
        "group_on_one_rank", "diverged_collectives", (0, 1),
        ("on rank 0 it is new_group at {logging_group = } for ranks [0]",
         "on rank 1 it is new_group at {everyone = } for ranks [0, 1]"),
    ),
    Case(
        "swapped_order", "diverged_collectives", (0, 1),
        ("of float64 [1]", "on rank 1 it is all_reduce at {dist.all_reduce(means)} of float64 [3]"),
    ),
    Case("swapped_order", "diverged_collectives", (0, 1), ("Different tensors are combined",), ("--alike",)),
    Case(
        "leaves_early", "rank_ended_early", (0,),
        ("Rank 0 reached the end of the script while rank 1 waits in all_reduce at {dist.all_reduce(gradient)}",),
    ),
    Case(
        "other_source", "diverged_collectives", (0, 1),
        ("broadcast at {dist.broadcast}", "model.0.weight from rank 0", "model.0.weight from rank 1"),
    ),
    Case(
        "unused_parameter", "unused_parameters", (1,),
        ("rank 0 waits in the reduction of gradients in DistributedDataParallel's backward at {loss.backward}",
         "reached no gradient of rare.weight, rare.bias"),
    ),
    Case(
        "loader_waits", "hang", (1,),
        ("rank 1 waits for a batch of its DataLoader at {for rows in loader}",
         "rank 0 it is the reduction of gradients in DistributedDataParallel's backward at {loss.backward}"),
    ),
    Case(
        "evaluation_on_one_rank", "diverged_collectives", (0, 1),
        ("all_gather_into_tensor at {return float}", "model.0.weight", "all_gather_into_tensor at {loss = }"),
    ),
]  # fmt: skip
QUICK = ("evaluation_on_one_rank",)
"""A script of which one rank ends, so that the other need not be waited for."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: the temporary folder of ranks is in it, whose sockets may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as path:
        yield Path(path)


def place(script: Path, text: str) -> str:
    """File and number of the first line that begins with a text."""
    numbers = [n for n, line in enumerate(script.read_text().splitlines(), 1) if line.strip().startswith(text)]
    return f"{script.name}:{numbers[0]}"


def checked(case: Case) -> tuple[ScriptAnswer, float]:
    since = time.monotonic()
    answer = check_script(Script(str(SCRIPTS / f"{case.script}.py"), ("--mistake", *case.arguments)))
    return answer, time.monotonic() - since


def assert_reported(case: Case, answer: ScriptAnswer) -> None:
    script = SCRIPTS / f"{case.script}.py"
    finding = answer.findings[0]
    assert (answer.status, finding.name, finding.ranks) == (1, case.finding, case.ranks), finding
    for each in case.says:
        before, brace, rest = each.partition("{")
        text, _, after = rest.partition("}")
        assert before + (place(script, text) if brace else "") + after in finding.sentence
    assert finding.remedy
    json.dumps(answer.as_json(), default=str)
    if answer.verdict == "the ranks wait for each other":
        assert len(answer.hang["ranks"]) == 2
        assert any(f"{script.name}:" in line for line in answer.ranks)


@pytest.mark.parametrize("case", [case for case in CASES if case.script in QUICK], ids=lambda case: case.script)
def test_a_hang_is_reported(case: Case) -> None:
    answer, _ = checked(case)
    assert_reported(case, answer)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join((case.script, *case.arguments)))
def test_a_hang_is_reported_soon(case: Case) -> None:
    answer, seconds = checked(case)
    assert_reported(case, answer)
    assert seconds < SOON


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted({case.script for case in CASES}))
def test_the_same_script_without_its_mistake_is_not_reported(name: str, folder: Path) -> None:
    passed = run_pass("ranks", Script(str(SCRIPTS / f"{name}.py")), 2, Conditions(folder))
    assert passed.waited.how == "ended"
    assert report.findings(passed.records) == []
    assert report.hang(passed.records, {}) is None


@pytest.mark.slow
def test_three_ranks_of_which_one_leaves_out_a_collective(folder: Path) -> None:
    script = Script(str(SCRIPTS / "barrier_in_branch.py"), ("--mistake",))
    passed = run_pass("ranks", script, 3, Conditions(folder))
    found = report.hang(passed.records, passed.waited.stacks, folder=str(SCRIPTS))
    assert found is not None
    assert "on ranks 1 and 2 it is the reduction of gradients" in found.finding.sentence
