"""Which cases of a test ``scripts/test`` runs, and that continuous integration runs the others."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import conftest
import pytest

ROOT = Path(__file__).parents[2]


class Case:
    """What is asked of a collected case of a test, and the marks that it is given."""

    def __init__(self, test: str, marks: Sequence[pytest.MarkDecorator]) -> None:
        self.parent, self.originalname, self.name = None, test, f"{test}[case]"
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.MarkDecorator | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark


def kept(many: int, *marks: pytest.MarkDecorator) -> list[int]:
    """The numbers of the cases that ``scripts/test`` runs, of a test with these marks."""
    cases: Any = [Case("test_it", marks) for _ in range(many)]
    others: Any = [Case("test_other", ()) for _ in range(5)]
    conftest.mark_further_cases([*cases, *others])
    assert not any("thorough" in case.marks for case in others), "they start no process"
    return [at for at, case in enumerate(cases) if "thorough" not in case.marks]


@pytest.mark.parametrize(
    ("marks", "many", "expected"),
    [
        ([], 7, [0, 1, 2, 3, 4, 5, 6]),
        ([pytest.mark.processes], 7, [crc32(b"test_it") % 7]),
        ([pytest.mark.processes], 2, [crc32(b"test_it") % 2]),
        ([pytest.mark.processes], 1, [0]),
        ([pytest.mark.cases(3)], 7, [0, 3, 6]),
        ([pytest.mark.cases(3), pytest.mark.processes], 7, [0, 3, 6]),
        ([pytest.mark.cases(1)], 7, [0]),
        ([pytest.mark.cases(9)], 7, [0, 1, 2, 3, 4, 5, 6]),
        ([pytest.mark.processes, pytest.mark.serial], 7, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_cases_are_kept_that_are_spread_over_all(
    marks: list[pytest.MarkDecorator], many: int, expected: list[int]
) -> None:
    assert kept(many, *marks) == expected


def test_continuous_integration_runs_a_share_of_what_scripts_test_leaves_out_and_the_night_all() -> None:
    called = re.findall(r"^scripts/test.*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert called[0] == "scripts/test"
    assert [line.partition(" --shard")[0] for line in called[1:]] == ["scripts/test thorough"]
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    shards = re.findall(r"run: scripts/test (\w+) --shard \$\{\{ matrix.shard \}\}/8", nightly)
    assert shards == ["nightly", "thorough"]
    assert "shard: [1, 2, 3, 4, 5, 6, 7, 8]" in nightly


@pytest.mark.processes
def test_each_commit_runs_another_share_of_the_thorough_tests() -> None:
    (line,) = re.findall(r"--shard (.*)/16 ", (ROOT / ".ci" / "run").read_text())
    counted = line.replace("$(git rev-list --count HEAD 2>/dev/null || echo 0)", "$1")
    assert counted != line
    shards = [
        subprocess.run(["sh", "-c", f"echo {counted}", "sh", str(commits)], capture_output=True, text=True, check=True)
        for commits in range(32)
    ]
    assert [int(done.stdout) for done in shards] == [*range(1, 17)] * 2
