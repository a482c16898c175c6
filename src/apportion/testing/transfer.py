"""Carries a user's functions, models and rows to the ranks: closures, lambdas and what a test's own module defines.

Functions of an importable module travel by its name, which the ranks import. Those of the module that a test stands in
travel by value: importing it again would run what it does at its top in each rank, and pytest may have imported it
from where no name leads to it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import cloudpickle

from apportion.core.installed import in_packages
from apportion.script_check.recording.precision import widened


def packed(value: Any, origins: Iterable[Any], caller: str) -> bytes:
    """Returns a value as bytes. ``origins``: the functions and objects in it, whose modules are looked at; ``caller``:
    the name of the module that the test stands in. Raises ValueError where it cannot be pickled."""
    modules = {_module_of(origin) for origin in origins} | {caller}
    chosen = [module for name in sorted(modules) if (module := _by_value(name, caller)) is not None]
    try:
        with _pickled_by_value(chosen):
            return bytes(cloudpickle.dumps(value))
    except Exception as first:
        if chosen:
            with suppress(Exception):
                return bytes(cloudpickle.dumps(value))
        raise ValueError(
            f"the ranks cannot be sent step, model, wrap, optimizer or rows, as something in them cannot be pickled "
            f"({type(first).__name__}: {first}): make it inside of the function that uses it, or give model as a "
            "function that returns it"
        ) from first


def unpacked(data: bytes, float64: bool = True) -> Any:
    """Returns the value, with its tensors in float64."""
    return _Unpickler(io.BytesIO(data)).load() if float64 else pickle.loads(data)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == "torch._utils" and name.startswith("_rebuild_"):  # the functions that make tensors
            return lambda *arguments: widened(found(*arguments))
        return found


def _module_of(origin: Any) -> str:
    while hasattr(origin, "func"):  # functools.partial
        origin = origin.func
    return str(getattr(origin, "__module__", None) or type(origin).__module__)


def _by_value(name: str, caller: str) -> ModuleType | None:
    """Returns the module where its functions are to travel by value; None where by its name. That of a program itself
    needs no help: ``__main__`` always travels by value."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or file is None or name == "__main__" or in_packages(file):
        return None
    return module if name == caller or not _importable(name, file) else None


def _importable(name: str, file: str) -> bool:
    """Whether another process with the same path finds a module's file by its name. The finders are asked themselves,
    as ``importlib.util.find_spec`` answers from what is imported already."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    for finder in sys.meta_path:
        if type(finder).__module__.startswith("_pytest"):
            continue
        with suppress(Exception):
            if (spec := finder.find_spec(name, path)) is not None:
                return spec.origin == file
    return False


@contextmanager
def _pickled_by_value(modules: list[ModuleType]) -> Iterator[None]:
    registered = cloudpickle.list_registry_pickle_by_value()
    own = [module for module in modules if module.__name__ not in registered]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
