"""Which cases of a test ``scripts/test`` runs, and that continuous integration runs the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        ([pytest.mark.processes], 7, [0, 6]),
        ([pytest.mark.processes], 2, [0, 1]),
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


def test_continuous_integration_runs_what_scripts_test_leaves_out() -> None:
    called = re.findall(r"^scripts/test.*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert called == ["scripts/test", "scripts/test thorough || tested=$?"]
    script = (ROOT / "scripts" / "test").read_text()
    assert "'') which='not thorough' ;;" in script
    assert "thorough) which='thorough' ;;" in script
