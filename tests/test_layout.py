"""The package is laid out so that a person finds their way: few modules a folder, one class of a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import apportion

PACKAGE = Path(apportion.__file__).parent
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})
REGISTRIES = ("strategies", "runtime/launch", "exporting/targets", "cost_model/strategies")
"""Folders that hold one file for each of their peers, however many there are."""
MODULES, ENTRIES, LINES = 15, 17, 450
LONGER = {
    "parallel/shared_weights/update.py": 590,
    "parallel/replica/replica.py": 495,
}
"""Files that hold more than one idea and are to be parted: until then they do not grow."""
TWICE: dict[str, str] = {}
"""Class names that stand in two modules, each with its reason."""


def name(folder: Path) -> str:
    return folder.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("folder", [f for f in FOLDERS if name(f) not in REGISTRIES], ids=name)
def test_a_folder_has_few_modules(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MODULES


def test_the_root_of_the_package_has_few_entries() -> None:
    entries = [p for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    assert len(entries) <= ENTRIES


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_folder_says_its_duty(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert said is not None
    assert said.split("\n")[0].endswith((".", ":", ","))


def test_a_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {n: found for n, found in places.items() if len(found) > 1 and n not in TWICE} == {}


def test_no_file_is_long() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    assert {path: many for path, many in lines.items() if many > LONGER.get(path, LINES)} == {}
    assert {path for path, most in LONGER.items() if lines.get(path, 0) <= LINES} == set(), "these are short by now"
