"""The package is laid out so that a person finds their way: each folder says its duty, one class of a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import apportion

PACKAGE = Path(apportion.__file__).parent
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})
FUNCTION_LINES, ATTRIBUTES = 60, 20
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions that have more lines than that, their docstrings not counted, each with its reason."""
LARGE_CLASSES = {
    "api/proof_workers.py ProofRequest": "one field for each thing that a proof is asked, and no behaviour",
    "core/workload.py Workload": "one field for each thing that changes which network is trained",
    "cost_model/profile.py Profile": "one field for each fact of a network, as a person writes them into a file",
    "runtime/worker/job.py Job": "one field for each thing that a worker is told, and no behaviour",
    "serving/config.py Serving": "one field for each flag of apportion serve",
}
"""Classes whose instances have more attributes than that, each with its reason."""
TWICE: dict[str, str] = {}
"""Class names that stand in two modules, each with its reason."""


def name(folder: Path) -> str:
    return folder.relative_to(PACKAGE).as_posix()


def test_each_folder_says_its_duty() -> None:
    texts = {folder: ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "" for folder in FOLDERS}
    silent = [name(folder) for folder, text in texts.items() if not text.split("\n")[0].endswith((".", ":", ","))]
    assert not silent, f"their __init__.py has no sentence that says what they are for: {silent}"


def test_a_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {n: found for n, found in places.items() if len(found) > 1 and n not in TWICE} == {}


def nodes(kind: type | tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Everything of this kind in the package, with its file and its name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield f"{path.relative_to(PACKAGE).as_posix()} {node.name}", node  # type: ignore[attr-defined]


def lines_of(function: ast.FunctionDef) -> int:
    """The lines of a function without those of its docstring."""
    first = function.body[0]
    said = first.end_lineno - first.lineno + 1 if ast.get_docstring(function, clean=False) is not None else 0  # type: ignore[operator]
    return function.end_lineno - function.lineno + 1 - said  # type: ignore[operator]


def attributes(kind: ast.ClassDef) -> set[str]:
    """The attributes of a class's instances: what its methods set, and the fields of a dataclass."""
    found = {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    if any("dataclass" in ast.unparse(decorator) for decorator in kind.decorator_list):
        found |= {ast.unparse(n.target) for n in kind.body if isinstance(n, ast.AnnAssign)}
    return found


def test_no_function_is_long() -> None:
    long = {where for where, node in nodes((ast.FunctionDef, ast.AsyncFunctionDef)) if lines_of(node) > FUNCTION_LINES}
    assert long == set(LONG_FUNCTIONS)


@pytest.mark.thorough
def test_no_class_has_many_attributes() -> None:
    large = {where: many for where, node in nodes(ast.ClassDef) if (many := len(attributes(node))) > ATTRIBUTES}
    assert large.keys() == LARGE_CLASSES.keys(), large
