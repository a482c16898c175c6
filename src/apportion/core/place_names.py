"""What an address is made of, and whether what it names is there, as far as that shows without importing anything: a
misspelled file or name is reported at once, and not after torch has been imported."""

from __future__ import annotations

import ast
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLE = "examples/digits.py:workload"
_OPEN = {"globals", "setattr", "exec", "eval", "vars", "__import__", "locals"}
"""Calls by which a file may define names that cannot be read in it."""


class AddressParts(NamedTuple):
    """An address in its parts: ``path/to/file.py:name`` or ``package.module:name``, where the name may be called with
    arguments, ``mine.py:make(lr=0.2)``."""

    place: str
    """The path of a file, or the name of a module; empty where the text is not an address."""
    name: str
    """The name in it; empty where the text is not an address."""
    call: str = ""
    """The arguments as they are written, in their parentheses; empty where there are none."""

    @property
    def is_file(self) -> bool:
        """True where the place is a file."""
        return self.place.endswith(".py") or os.sep in self.place

    def at(self, place: str) -> str:
        """The same name, called with the same arguments, at another place."""
        return f"{place}:{self.name}{self.call}"


def split_address(text: str) -> AddressParts:
    """The parts of an address. A colon in its arguments is part of these, and a parenthesis
    in the path is part of the path."""
    for found in re.finditer(r":([^\W\d]\w*)(?=\()", text) if text.endswith(")") else ():
        try:
            is_call = isinstance(ast.parse(text[found.start() + 1 :], mode="eval").body, ast.Call)
        except (SyntaxError, ValueError):
            continue
        if is_call:
            return AddressParts(text[: found.start()], found[1], text[found.end() :])
    place, _, name = text.rpartition(":")
    return AddressParts(place, name)


def arguments_of(address: str) -> dict[str, Any]:
    """The arguments that an address calls its name with: literals, each by its name. Raises ValueError for others."""
    call = split_address(address).call
    if not call:
        return {}
    parsed = ast.parse(f"f{call}", mode="eval").body
    assert isinstance(parsed, ast.Call), "split_address has parsed it as a call"
    if parsed.args or any(keyword.arg is None for keyword in parsed.keywords):
        raise ValueError(f"{address!r}: arguments are given by name, as make(lr=0.2, width=64)")
    given: dict[str, Any] = {}
    for keyword in parsed.keywords:
        assert keyword.arg is not None
        try:
            given[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            written = ast.unparse(keyword.value)
            raise ValueError(
                f"{address!r}: {keyword.arg}={written} must be a number, a text in quotes ({written!r}), True, False, "
                "None, or a list, tuple or dict of these"
            ) from None
    return given


def check_place(address: str) -> None:
    """Raise ValueError where the address does not parse, where there is no such file or module, or where the file
    defines no such name, or a function of that name that does not have such arguments."""
    parts = split_address(address)
    place, name = parts.place, parts.name
    if not place or not name:
        whole = address.strip(":") or "mine.py"
        hint = f"{whole}:NAME" if whole.endswith(".py") else EXAMPLE
        raise ValueError(
            f"{address!r} names no workload: write FILE:NAME, the file and the variable in it that is the workload, "
            f"for example {hint}"
        )
    if not name.isidentifier() and "(" in name:
        raise ValueError(
            f"{address!r} does not parse: write FILE:NAME(ARGUMENT=VALUE, ...), and a text in quotes, for example "
            "mine.py:make(lr=0.2, activation='relu')"
        )
    arguments_of(address)
    file = Path(place) if parts.is_file else _module_file(address, place)
    if file is None:
        return
    if not file.is_file():
        raise ValueError(f"{address!r}: there is no file {place} (in {Path.cwd()}){close_file(file)}")
    _check_name(address, file, name)


def close_file(file: Path, otherwise: str = "give the path of the file that has the workload") -> str:
    """Returns the file of a similar name beside one that is missing, in words; ``otherwise`` where there is none."""
    try:
        known = [entry.name for entry in os.scandir(file.parent) if entry.name.endswith(".py")]
    except OSError:
        return f": there is no folder {file.parent}" if str(file.parent) != "." else ""
    close = _close(file.name, known)
    return f": did you mean {file.parent / close}?" if close else f"; {otherwise}"


def _close(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most like another one, whatever their case; None where none is."""
    by_small = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_small, 1)
    return by_small[close[0]] if close else None


def _module_file(address: str, place: str) -> Path | None:
    """Returns the file of a module; None where only importing it shows that. Raises ValueError where there is none."""
    if place in sys.modules:
        return None
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    found = None
    for at, part in enumerate(parts := place.split(".")):
        if not part.isidentifier():
            raise ValueError(
                f"{address!r}: {place} is neither a file that ends with .py nor the name of a module: write "
                "path/to/file.py:name or package.module:name"
            )
        found = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if found is None:
            if _has_other_finders():
                return None  # which may know it
            beside = Path(f"{place.replace('.', os.sep)}.py")
            hint = "write path/to/file.py:name or package.module:name"
            if beside.is_file():
                hint = f"did you mean {split_address(address).at(str(beside))}?"
            raise ValueError(f"{address!r}: there is no module {'.'.join(parts[: at + 1])}: {hint}")
        path = list(found.submodule_search_locations or ())
    return (
        Path(found.origin) if found is not None and found.origin is not None and found.origin.endswith(".py") else None
    )


def _has_other_finders() -> bool:
    """Returns whether modules are also found by finders that are not Python's own."""
    own = ("_frozen_importlib", "_distutils_hack", "six", "_virtualenv")
    return any(
        not str(getattr(finder, "__module__", None) or type(finder).__module__).startswith(own)
        for finder in sys.meta_path
    )


def _check_name(address: str, file: Path, name: str) -> None:
    """Raise ValueError where a file defines no such name. One that does not parse is left to the import, which says
    where; so is one whose names cannot all be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    names = dict.fromkeys(_defined(tree))
    if name in names or "*" in names or "__getattr__" in names or _is_open(tree):
        return
    close = _close(name, names)
    workloads = [known for known in _workloads(tree) if known != name]
    if close:
        hint = f"did you mean {close}?"
    elif workloads:
        hint = f"it has {', '.join(workloads)}"
    else:
        hint = f"it has no apportion.Workload; write {name} = apportion.Workload(...) in it"
    raise ValueError(f"{address!r}: {name} is not there: {hint}")


def _is_open(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id in _OPEN)
        or (isinstance(node, ast.Attribute) and node.attr == "modules")
        for node in ast.walk(tree)
    )


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a file binds at its top level, and ``*`` where it imports all of another. Names that a
    function declares global are among them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            for inner in ast.walk(node):
                if isinstance(inner, ast.Global):
                    yield from inner.names
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for given in node.names:
                yield (given.asname or given.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield node.name
        if not isinstance(node, ast.Lambda):
            yield from _defined(node)


def _workloads(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a file gives to a call of Workload."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value.func
            if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == "Workload":
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
