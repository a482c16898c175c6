"""The packages that a forked process has imported, so that one process can import them for all that do the same work.

A model of transformers is a second of imports or two, and a proof has six processes that build it. The user's own
files are not among these packages: each process runs them by itself, and a file that depends on its rank is found.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from apportion.core.installed import in_packages


@dataclass(frozen=True)
class Imports:
    """Installed modules, and what a process that has imported them has changed in its environment."""

    modules: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """The values of the variables that were set, None for one that was removed."""


_environment: dict[str, str] | None = None
_inherited: frozenset[str] = frozenset()


def note_beginning() -> None:
    """Notes what a forked process begins with."""
    global _environment, _inherited
    _environment, _inherited = dict(os.environ), frozenset(sys.modules)


def imported() -> Imports:
    """Returns what this process has imported since ``note_beginning``, in the order in which the imports began.

    In a process that was not forked that is nothing: the program of a rank that others have started may have imported
    what its workload does not, and what only one process may import, as MPI.
    """
    if _environment is None:
        return Imports()
    modules = [
        name
        for name, module in [*sys.modules.items()]  # a copy: an import in another thread adds to it
        if name not in _inherited and not name.startswith("__") and in_packages(getattr(module, "__file__", None) or "")
    ]
    return Imports(tuple(modules), _changed_since(_environment))


def import_modules(modules: Iterable[str]) -> bool:
    """Imports what this process does not have yet; returns whether there was any. A module that cannot be imported is
    left to the code that needs it, which raises why."""
    missing = [name for name in modules if name not in sys.modules]
    for name in missing:
        with suppress(Exception):
            importlib.import_module(name)
    return bool(missing)


def repeat(imports: Imports) -> bool:
    """Imports the modules in this process; returns whether that has changed the environment as it did in the other: if
    not, the user's own code has changed it, and the modules may depend on that."""
    before = dict(os.environ)
    import_modules(imports.modules)
    # A package that reads a variable at its import may have read another value here.
    return _changed_since(before) == imports.environment


def _changed_since(before: Mapping[str, str]) -> dict[str, str | None]:
    names = before.keys() | os.environ.keys()
    return {name: os.environ.get(name) for name in names if os.environ.get(name) != before.get(name)}
