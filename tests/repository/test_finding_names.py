"""What ``--accept`` takes are the names of all findings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import apportion
from apportion.script_check.findings import FINDING_NAMES

PACKAGE = Path(apportion.__file__).parent / "script_check"


def written() -> Iterator[tuple[str, str]]:
    """The constants that name findings, each with its file."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("Finding", "evidence.finding"):
                continue
            named = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
            for value in [*node.args[:1], *named]:
                if isinstance(value, ast.Constant):
                    yield str(value.value), path.name


def test_every_finding_can_be_accepted() -> None:
    assert {(name, file) for name, file in written() if name not in FINDING_NAMES} == set()
    assert list(FINDING_NAMES) == sorted(FINDING_NAMES)
