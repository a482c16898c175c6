"""A function of the user's that computes the loss of all rows of a step in one process, as a reference."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
        known = list(_names(ast.parse(file.read_bytes(), str(file))))
    except SyntaxError as error:
        raise ValueError(
            f"reference {text!r}: {place} is not valid Python: {error.msg} (line {error.lineno})"
        ) from error
    if name not in known and "*" not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {place}:{close[0]}?" if close else "define the function at the top level of the file"
        raise ValueError(f"reference {text!r}: {place} defines no {name}: {hint}")
    return ReferenceFunction(file, name)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yields the names that the statements of a file may bind, "*" where one binds others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
