"""The script that is checked, how it is called, and the user's function that it may be compared with."""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


@dataclass(frozen=True)
class Script:
    """A training script. ``target``: its file, or with ``module`` the dotted name that ``python -m`` takes;
    ``arguments``: its own; ``then``: where it resumes in a run of its own, the arguments that this run has besides."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    then: tuple[str, ...] | None = None

    @property
    def path(self) -> Path:
        """The file that runs. Raises ValueError where it does not exist."""
        if not self.module:
            path = Path(self.target).resolve()
            if not path.is_file():
                raise ValueError(f"there is no script {self.target}")
            return path
        found = _module_spec(self.target)
        if found is not None and found.submodule_search_locations is not None:
            found = _module_spec(f"{self.target}.__main__")
        if found is None or found.origin is None:
            raise ValueError(
                f"there is no module {self.target} that python -m could run from {Path.cwd()}: give its dotted name, "
                "as package.train, from the folder that has the package"
            )
        return Path(found.origin).resolve()

    @property
    def folder(self) -> Path:
        """The folder whose files count as the user's: that of the script, or the one from which its package is
        imported."""
        path = self.path
        return path.parents[self.target.count(".") + (path.name == "__main__.py")] if self.module else path.parent


def _module_spec(name: str) -> ModuleSpec | None:
    """Returns where a module is, for which no package is imported: one may import torch, and take seconds."""
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    found = None
    parts = name.split(".")
    for at in range(len(parts)):
        if path is None or not parts[at].isidentifier():
            return None
        found = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if found is None:
            return None
        path = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
    return found


EXAMPLE = "reference.py:loss_of"


@dataclass(frozen=True)
class ReferenceFunction:
    """``NAME(model, batch) -> loss`` of a file. ``file``: its absolute path."""

    file: Path
    name: str

    @property
    def address(self) -> str:
        """The function as messages name it, such as ``reference.py:loss_of``."""
        return f"{self.file.name}:{self.name}"


def reference_function(text: str) -> ReferenceFunction:
    """Returns the function that ``FILE.py:NAME`` names. Raises ValueError where there is none; nothing is imported."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"reference {text!r} names no function: write FILE.py:NAME, the file and the function NAME(model, batch) "
            f"in it that returns the loss, as {EXAMPLE}"
        )
    file = Path(os.path.abspath(place))
    if not file.is_file():
        raise ValueError(f"reference {text!r}: there is no file {place} (in {Path.cwd()})")
    try:
        known = list(_bound_names(ast.parse(file.read_bytes(), str(file))))
    except SyntaxError as error:
        raise ValueError(
            f"reference {text!r}: {place} is not valid Python: {error.msg} (line {error.lineno})"
        ) from error
    if name not in known and "*" not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {place}:{close[0]}?" if close else "define the function at the top level of the file"
        raise ValueError(f"reference {text!r}: {place} defines no {name}: {hint}")
    return ReferenceFunction(file, name)


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Yields the names that the statements of a file may bind, "*" where one binds others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
