"""The packages that a forked process has imported, so that one process can import them for all that do the same work.

A model of transformers is a second of imports or two, and a proof has six processes that build it. The user's own
files are not among these packages: each process runs them by itself, and a file that depends on its rank is found.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")
"""The folders of packages that were installed; what lies elsewhere is the user's own."""


@dataclass(frozen=True)
class Imports:
    """Installed modules, and the variables of the environment that a process which has imported them had set."""

    modules: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


_environment: dict[str, str] | None = None
_inherited: frozenset[str] = frozenset()


def note_beginning() -> None:
    """Notes what a forked process begins with."""
    global _environment, _inherited
    _environment, _inherited = dict(os.environ), frozenset(sys.modules)


def imported() -> Imports:
    """Returns what this process has imported since ``note_beginning``, in the order in which the imports began: nothing
    where it was not forked, since a program of the user's may have imported what its workload does not, and what may
    be imported once alone, as MPI."""
    if _environment is None:
        return Imports(())
    # An import in another thread adds modules meanwhile.
    modules = [
        name
        for name, module in [*sys.modules.items()]
        if name not in _inherited and not name.startswith("__") and _is_installed(getattr(module, "__file__", None))
    ]
    return Imports(tuple(modules), _set_since(_environment))


def import_again(imports: Imports) -> bool:
    """Imports the modules in this process; returns whether that has set the same variables: if not, the user's own code
    has, and the modules may depend on them."""
    before = dict(os.environ)
    for name in imports.modules:
        with suppress(Exception):  # the code that needs it imports it again, and raises what it raises
            importlib.import_module(name)
    return _set_since(before) == imports.environment


def _is_installed(file: object) -> bool:
    return isinstance(file, str) and any(folder in Path(file).parts for folder in INSTALLED)


def _set_since(before: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if before.get(name) != value}
