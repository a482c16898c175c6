"""Functions are pickled as cloudpickle does it, without a look at every module that has been imported.

A function of a test travels whole, with the modules that it names. For each of them cloudpickle goes through all the
modules there are, several thousand, to find those below it: a tenth of what a proof took.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType, ModuleType
from typing import Any

import cloudpickle.cloudpickle
import pytest

slowly = cloudpickle.cloudpickle._find_imported_submodules
"""What cloudpickle does itself."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Has cloudpickle find the modules below another one by their names."""
    patch.setattr(cloudpickle.cloudpickle, "_find_imported_submodules", imported_below)


def imported_below(code: CodeType, named: Iterable[Any]) -> list[ModuleType]:
    """The imported modules that lie below one that the code names, where it names each part of the way: of
    ``torch.nn.functional.relu`` below ``torch`` these are ``torch.nn`` and ``torch.nn.functional``."""
    found = []
    for value in named:
        if not isinstance(value, ModuleType) or not getattr(value, "__package__", None):
            continue
        above = [value.__name__]
        while above:
            module = above.pop()
            below = [name for part in set(code.co_names) if (name := f"{module}.{part}") in sys.modules]
            found += [sys.modules[name] for name in below]
            above += below
    return found
