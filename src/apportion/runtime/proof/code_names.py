"""The globals that a function's bytecode names, its inner functions' included, and the modules that it imports."""

from __future__ import annotations

import dis
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from apportion.runtime.proof.installed_packages import release

_EXTENDED = dis.opmap["EXTENDED_ARG"]
_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_NAMED = frozenset(
    dis.opmap[name] for name in ("LOAD_NAME", "STORE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS") if name in dis.opmap
)
_IMPORT = dis.opmap["IMPORT_NAME"]
_IMPORTERS = frozenset(("import_module", "__import__"))
"""Code that says one of these imports the modules that its texts name."""
_ANY_NAME = frozenset(("getattr", "vars", "globals", "eval", "exec", "__dict__", "__getattribute__", "attrgetter"))
"""Code that says one of these may reach an attribute that its bytecode does not name."""


@dataclass(frozen=True)
class NamedGlobal:
    """A value under the name that the bytecode has for it."""

    name: str
    value: Any
    mentioned: frozenset[str]
    """The set of all names in the bytecode: the attributes of a module among them are what the function can reach."""

    def attributes(self) -> Iterator[NamedGlobal]:
        """Yields the attributes of the user's own module that the function mentions; all, where it may reach any."""
        found = vars(self.value)
        every = not _ANY_NAME.isdisjoint(self.mentioned)
        for name in sorted(found if every else self.mentioned & found.keys()):
            if not (name.startswith("__") and name.endswith("__")) and found[name] is not self.value:
                yield NamedGlobal(f"{self.name}.{name}", found[name], self.mentioned)

    def settings(self, counts: Callable[[str, Any], bool]) -> Iterator[NamedGlobal]:
        """Yields the attributes of an installed module that the function mentions and that count."""
        found = vars(self.value)
        for name in sorted(self.mentioned & found.keys()):
            if not (name.startswith("__") and name.endswith("__")) and counts(name, found[name]):
                yield NamedGlobal(f"{self.name}.{name}", found[name], self.mentioned)


def named_globals(code: types.CodeType, within: Mapping[str, Any]) -> Iterator[NamedGlobal]:
    """Yields what the code names of these globals, by name. A name that is not among them is a builtin, or not there
    yet."""
    names, imports, mentioned = _names(code)
    for name in names:
        if name in within:
            yield NamedGlobal(name, within[name], mentioned)
    for name in imports:
        module = _imported(name, str(within.get("__package__") or ""))
        if module is not None:
            yield NamedGlobal(f"import {name}", module, mentioned)


@lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[list[str], list[str], frozenset[str]]:
    """Returns the globals, the imported modules, and every name at all."""
    names: set[str] = set()
    imports: set[str] = set()
    mentioned = set(code.co_names)
    raw, extended = code.co_code, 0
    for at in range(0, len(raw), 2):
        operation, argument = raw[at], raw[at + 1] | extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation == _GLOBAL:
            names.add(code.co_names[argument >> 1])
        elif operation in _NAMED:
            names.add(code.co_names[argument])
        elif operation == _IMPORT:
            imports.update((code.co_names[argument], code.co_names[argument].partition(".")[0]))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            names.update(inner[0])
            imports.update(inner[1])
            mentioned.update(inner[2])
        elif isinstance(constant, tuple):  # ``from module import name`` holds its names as a constant
            mentioned.update(name for name in constant if isinstance(name, str))
        elif isinstance(constant, str) and not _IMPORTERS.isdisjoint(code.co_names) and _is_module(constant):
            imports.add(constant)
    return sorted(names), sorted(imports), frozenset(mentioned)


def _is_module(text: str) -> bool:
    return all(part.isidentifier() for part in text.removeprefix(".").split("."))


def _imported(name: str, package: str) -> types.ModuleType | None:
    """Returns the module that a function imports when it is called, loaded now where it is the user's own."""
    parents = package.split(".") if package else []
    candidates = [name, *(f"{'.'.join(parents[:n])}.{name}".rstrip(".") for n in range(len(parents), 0, -1))]
    for candidate in candidates:
        if candidate in sys.modules:
            return sys.modules[candidate]
    for candidate in candidates:
        if candidate and release(candidate.partition(".")[0]) is None:
            try:
                return importlib.import_module(candidate)
            except Exception:  # the function meets the same error, or never gets there
                continue
    return None
