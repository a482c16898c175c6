"""The address of a workload: ``path/to/file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import cloudpickle

from apportion.core.place_names import EXAMPLE
from apportion.core.workload import Workload


def load_workload(address: str) -> Workload:
    """Load the workload at an address. ValueError where the address, the file or the name is wrong; what the file
    itself raises when it is imported comes through as it is."""
    place, colon, name = address.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"{address!r} names no workload: write FILE:NAME, for example {EXAMPLE}")
    module = _file(place) if place.endswith(".py") or os.sep in place else _module(place)
    found = getattr(module, name, None)
    if isinstance(found, Workload):
        return found
    workloads = sorted(k for k, v in vars(module).items() if isinstance(v, Workload))
    known = f"it has {', '.join(workloads)}" if workloads else "it has no apportion.Workload"
    what = "is not there" if found is None else f"is a {type(found).__name__}, not an apportion.Workload"
    raise ValueError(f"{address!r}: {name} {what}; {known}")


def _file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {place} (in {Path.cwd()})")
    # Named by its path, so that two files of one name do not meet, and pickled classes find their module again.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # its neighbours can be imported, as when it is run as a script
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)  # no other process can import it by this name
    return module


def _module(place: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise ValueError(
                f"there is no module {place}: write path/to/file.py:name or package.module:name"
            ) from error
        raise
