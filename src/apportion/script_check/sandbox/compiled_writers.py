"""Has the functions that write files past Python ask the guard first: they open a file in compiled code."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from apportion.script_check.imported_modules import ImportedModules
from apportion.script_check.sandbox.guard import Guard

_WRITERS = {"torch.serialization": "save", "safetensors": "serialize_file"}
"""The function of each module whose second argument is the file to write."""


def install(guard: Guard) -> None:
    """Wrap those functions as their modules are imported."""
    ImportedModules({module: _wrapping(guard, function) for module, function in _WRITERS.items()}).install()


def _wrapping(guard: Guard, function: str) -> Callable[[ModuleType], None]:
    def wrap(module: ModuleType) -> None:
        write = getattr(module, function)

        @wraps(write)
        def asking(*args: Any, **kwargs: Any) -> Any:
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if isinstance(file, str | os.PathLike):
                guard.allow_write(file)
            return write(*args, **kwargs)

        setattr(module, function, asking)

    return wrap
