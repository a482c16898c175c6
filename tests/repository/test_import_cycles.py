"""The files of the package import each other in one direction, wherever in a file the import stands and whatever it is
for."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import apportion

PACKAGE = Path(apportion.__file__).parent
BACKWARDS = {
    (
        "core.workload",
        "core.strategy",
    ): "a user's update= is written for a Step, which trains a workload",
}
"""The imports, each for a type alone, that close a circle, and why they stay."""


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in PACKAGE.rglob("*.py")}


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of the package that a file imports anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in inside if name in FILES)
            if not all(name in FILES for name in inside):
                yield node.module


def cycles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The groups of modules each of which imports every other of its group, by way of others or itself."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        reached[start], waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - reached[start]
            reached[start] |= new
            waiting += new
    return {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imported(ast.parse(file.read_text()))) - {name} for name, file in FILES.items()}


@pytest.mark.thorough
def test_no_file_imports_itself_by_way_of_others() -> None:
    excused = {(f"apportion.{name}", f"apportion.{other}") for name, other in BACKWARDS}
    kept = {name: {other for other in others if (name, other) not in excused} for name, others in graph().items()}
    assert cycles(kept) == set()


@pytest.mark.parametrize(("name", "other"), BACKWARDS)
def test_what_is_excused_closes_a_circle(name: str, other: str) -> None:
    assert any({f"apportion.{name}", f"apportion.{other}"} <= circle for circle in cycles(graph())), "it may go"


@pytest.mark.parametrize(
    "way",
    [
        "from apportion.a import b",
        "import apportion.a",
        "if TYPE_CHECKING:\n    from apportion.a import b",
        "def f():\n    from apportion.a import b",
        "from apportion import a",
    ],
)
def test_every_way_to_import_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "apportion.a", Path("a.py"))
    assert list(imported(ast.parse(way))) == ["apportion.a"]
    assert cycles({"apportion.a": {"apportion.b"}, "apportion.b": {"apportion.a"}, "c": {"apportion.a"}}) == {
        frozenset({"apportion.a", "apportion.b"})
    }
