"""Changes modules as they are imported, before anything else takes their functions from them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportedModules:
    """Finds modules as Python does, and has a function change each of them once it has been executed."""

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        """``changes``: the function that changes a module, by the module's dotted name."""
        self._changes, self._finding = changes, set[str]()

    def install(self) -> None:
        """Be asked first for each module that is imported from here on."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the module's own specification, with a loader that changes it; None for other modules."""
        if name not in self._changes or name in self._finding:
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
            self._changes[name](module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
