"""The workload at an address: ``path/to/file.py:name`` or ``package.module:name``, where the name is a Workload, or a
function that returns one, which may be called with arguments: ``mine.py:make(lr=0.2, width=64)``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from apportion.core.named_arguments import remedy
from apportion.core.place_names import EXAMPLE, arguments_of, split_address
from apportion.core.workload import Workload
from apportion.core.workload_rules import is_plain


def load_workload(address: str) -> Workload:
    """Load the workload at an address. ValueError where the address, the file or the name is wrong; what the file
    itself raises when it is imported comes through as it is."""
    parts = split_address(address)
    if not parts.place or not parts.name:
        raise ValueError(f"{address!r} names no workload: write FILE:NAME, for example {EXAMPLE}")
    return workload_in(_file(parts.place) if parts.is_file else _module(parts.place), address)


def object_at(address: str) -> Any:
    """What an address names; of a function, what it returns for the arguments of the address. Errors are those of
    ``load_workload``."""
    parts, arguments = split_address(address), arguments_of(address)
    if not parts.place or not parts.name:
        raise ValueError(f"{address!r} is not an address: write FILE:NAME, for example {EXAMPLE}")
    module = _file(parts.place) if parts.is_file else _module(parts.place)
    if not hasattr(module, parts.name):
        raise ValueError(f"{address!r}: {parts.name} is not there")
    found = getattr(module, parts.name)
    return found(**arguments) if inspect.isfunction(found) or inspect.isclass(found) else found


def workload_in(module: ModuleType, address: str) -> Workload:
    """The workload that an address names in its module: the one of that name, or what the function of that name
    returns for the arguments of the address, or for its defaults. Raises ValueError where it is neither, and for
    arguments that the function does not have, or lacks."""
    name, arguments = split_address(address).name, arguments_of(address)
    found = getattr(module, name, None)
    if isinstance(found, Workload):
        if split_address(address).call:
            raise ValueError(
                f"{address!r}: {name} is a Workload and takes no arguments: give the name alone, or that of a function "
                "that returns a Workload"
            )
        return found
    if inspect.isfunction(found):
        return _made(found, arguments, address, _known(module))
    known = _known(module)
    what = "is not there" if found is None else f"is a {type(found).__name__}, not an apportion.Workload"
    raise ValueError(f"{address!r}: {name} {what}; {known}")


def _known(module: ModuleType) -> str:
    workloads = sorted(k for k, v in vars(module).items() if isinstance(v, Workload))
    return f"it has {', '.join(workloads)}" if workloads else "it has no apportion.Workload"


def _made(make: Any, arguments: dict[str, Any], address: str, known_workloads: str) -> Workload:
    """The workload that a function makes of these arguments, which are recorded in it with those left out."""
    signature, name = inspect.signature(make), make.__name__
    known = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for given in arguments:
        if given not in known and not takes_any:
            raise ValueError(
                f"{address!r}: {name} has no {given!r}: {remedy(given, known, name)}; it is {name}{signature}"
            )
    try:
        bound = signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{address!r}: {name} cannot be called so ({error}); it is {name}{signature}") from None
    made = make(*bound.args, **bound.kwargs)
    if not isinstance(made, Workload):
        raise ValueError(
            f"{address!r}: {name} returned a {type(made).__name__}, and it must return an apportion.Workload; "
            f"{known_workloads}"
        )
    bound.apply_defaults()
    recorded = {key: value for key, value in bound.arguments.items() if is_plain(value)}
    return replace(made, arguments={**made.arguments, **recorded})


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
