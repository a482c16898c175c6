"""``help()`` of a public class: its docstring, and below it each field with its type, its default and its docstring.

Python keeps no docstrings of fields, so they are read from the source, when somebody asks for the text and not before.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any, final


@final
class DocOfFields(str):
    """The ``__doc__`` of a dataclass. Python asks a descriptor for the text. Where a metaclass has a docstring of its
    own, as ABCMeta does, pydoc and inspect are given the descriptor itself: it is a text, and what they call of it,
    ``expandtabs``, returns the whole."""

    __slots__ = ("_cls", "_whole")

    _cls: type
    _whole: str

    def __get__(self, instance: object, owner: type) -> str:
        return self.whole()

    def expandtabs(self, tabsize: Any = 8) -> str:
        return self.whole().expandtabs(tabsize)

    def whole(self) -> str:
        """The docstring and the fields."""
        if not hasattr(self, "_whole"):
            self._whole = inspect.cleandoc(str.__str__(self)) + _fields(self._cls)
        return self._whole


def describe_fields(cls: Any) -> None:
    """Add the fields of a dataclass to what ``help()`` says of it; nothing for anything else."""
    if (
        isinstance(cls, type)
        and dataclasses.is_dataclass(cls)
        and not isinstance(vars(cls).get("__doc__"), DocOfFields)
    ):
        text = DocOfFields(cls.__doc__ or "")
        text._cls = cls
        cls.__doc__ = text


def _fields(cls: Any) -> str:
    found: dict[str, tuple[str, str, str]] = {}
    for owner in reversed(cls.__mro__):
        if dataclasses.is_dataclass(owner):
            found |= _documented(owner)
    names = [f.name for f in dataclasses.fields(cls) if f.name in found and not f.name.startswith("_")]
    if not names:
        return ""
    lines = ["\n\nFields:\n"]
    for name in names:
        kind, default, text = found[name]
        lines.append(f"    {name}: {kind}{default and f' = {default}'}")
        lines.append(textwrap.indent(inspect.cleandoc(text), " " * 8))
    return "\n".join(lines)


def _documented(cls: Any) -> dict[str, tuple[str, str, str]]:
    """Each field of a class's own: its type, its default and its docstring, as they are written."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # a class that was made without a file
        return {}
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, tuple[str, str, str]] = {}
    for line, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
            default = "" if line.value is None else ast.unparse(line.value)
            found[line.target.id] = (ast.unparse(line.annotation), default, said if isinstance(said, str) else "")
    return found
