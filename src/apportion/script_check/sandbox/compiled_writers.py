"""Has the functions that write files past Python ask the guard first: they open a file in compiled code.

They are wrapped as their module is imported, before others take them from it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from apportion.script_check.sandbox.guard import Guard

_WRITERS = {"torch.serialization": "save", "safetensors": "serialize_file"}
"""The function of each module whose second argument is the file to write."""


class WriterFinder:
    """Finds those modules as Python does, and wraps their function."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self._finding = guard, set[str]()

    def install(self) -> None:
        """Be asked first for each module that is imported from here on."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the module's own specification, with a loader that wraps the function; None for other modules."""
        if name not in _WRITERS or name in self._finding:
            return None
        self._finding.add(name)  # it is asked again by the next line
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            setattr(module, _WRITERS[name], self._asking(getattr(module, _WRITERS[name])))

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec

    def _asking(self, write: Any) -> Any:
        @wraps(write)
        def asking(*args: Any, **kwargs: Any) -> Any:
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if isinstance(file, str | os.PathLike):
                self._guard.allow_write(file)
            return write(*args, **kwargs)

        return asking
