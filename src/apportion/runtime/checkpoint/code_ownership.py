"""Tells whose code a run directory names: the caller's own, or another user's.

A run directory is data, and may come from anywhere; the workload that it names is code. It is the caller's own where it
lies in the project that the caller works in, outside any run directory, and is as it was when the run was started.
Where no project is around the current folder, that folder counts as one for what no other user
may write to.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from apportion.core.installed import in_packages
from apportion.core.place_names import split_address
from apportion.process import PACKAGE

MARKS = ("pyproject.toml", ".git")
"""The files or folders that mark the folder of a project."""
_SHARED = stat.S_ISVTX | stat.S_IWOTH
"""The mode of a folder in which every user may put files, as /tmp."""
CURE = "look at it, and say trust=True if it may run"

loading: list[str] = []
"""The address whose file is being imported for ``load``: nothing may train meanwhile."""


@contextmanager
def imported_by_load(address: str) -> Iterator[None]:
    """Marks this address as being imported for ``load``, until the context is left."""
    loading.append(address)
    try:
        yield
    finally:
        loading.pop()


def is_file(place: str) -> bool:
    """Tells whether the first half of an address is a file, and not a module's name."""
    return place.endswith(".py") or os.sep in place


def projects() -> list[Path]:
    """Returns the folders that hold what is the caller's own: of the project around the program's script, and of the
    one around the current folder, or that folder itself where there is none and only the caller may write to it. A
    script that is installed, as the command line is, says nothing about its caller."""
    current = Path.cwd()
    starts = [current]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and not is_installed(Path(script)):
        starts.append(Path(script).resolve().parent)
    found = [folder for start in starts if (folder := _project(start)) is not None]
    if _project(current) is None and _others(current.resolve()) is None:
        found.append(current.resolve())
    return list(dict.fromkeys(found))


def _project(start: Path) -> Path | None:
    start = start.resolve()
    return next((folder for folder in (start, *start.parents) if _is_marked(folder)), None)


def _is_marked(folder: Path) -> bool:
    """Returns whether a folder is that of a project. One that all users share, as /tmp, is not one: any of them may put
    a mark there."""
    return any((folder / mark).exists() for mark in MARKS) and folder.stat().st_mode & _SHARED != _SHARED


def _others(path: Path) -> str | None:
    """Returns in words why others than the caller may have written a file or folder; None where no other user may."""
    try:
        # The target of a link counts, since it is what would be run.
        about = path.stat()
    except OSError as error:
        return f"{path} cannot be looked at ({error.strerror})"
    if about.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if about.st_mode & 0o022:
        return f"others may write to {path}: chmod go-w {path}"
    return None


def is_installed(file: Path) -> bool:
    """Tells whether a file belongs to an installed package, to Python, or to this package."""
    file = file.absolute()
    if in_packages(file):
        return True
    # Not resolved: the programs of a virtual environment lie in it, and the Python that they link to does not.
    ours = (Path(sys.prefix).absolute(), Path(os.__file__).parent, PACKAGE)
    return any(path.is_relative_to(folder) for path in (file, file.resolve()) for folder in ours)


def refusal(file: Path, recorded: object, folders: Sequence[Path]) -> str | None:
    """Returns why a file is not the caller's own, as the rest of a sentence; None where it is. ``recorded``: its digest
    in run.json. ``folders``: see ``projects``."""
    file = file.resolve()
    if not file.is_file():
        return None  # there is nothing to run
    around = _run_directory(file)
    if around is not None:
        return f"it lies in the run directory {around}"
    if not is_below(file, folders):
        searched = " or ".join(map(str, folders)) or "and around the current folder there is neither of them"
        why = _why_not_below(file)
        if why is not None:
            return f"the folder is not a project (with {' or '.join(MARKS)}), and {why}"
        return f"it does not lie in a project of yours (a folder with {' or '.join(MARKS)}: {searched})"
    if not isinstance(recorded, str):
        return "run.json has no digest of it to compare with"
    if digest(file) != recorded:
        return "it was changed since the run was started"
    return None


def is_below(path: Path, folders: Sequence[Path]) -> bool:
    """Returns whether a file or a folder lies in one of these, and in no run directory. Where the folder has no mark of
    a project, no other user may write to the path, or to a folder on the way to it."""
    path = path.resolve()
    return _run_directory(path) is None and any(
        path.is_relative_to(folder) and (_is_marked(folder) or _others_on_the_way(path, folder) is None)
        for folder in folders
    )


def _others_on_the_way(path: Path, folder: Path) -> str | None:
    way = [path, *(parent for parent in path.parents if parent.is_relative_to(folder))]
    return next((why for one in way if (why := _others(one)) is not None), None)


def _why_not_below(file: Path) -> str | None:
    """Returns why a file in the current folder, which is not a project, is not taken for the caller's own."""
    current = Path.cwd().resolve()
    if not file.is_relative_to(current) or _project(current) is not None:
        return None
    return _others_on_the_way(file, current)


def _run_directory(path: Path) -> Path | None:
    return next((folder for folder in (path, *path.parents) if (folder / "run.json").is_file()), None)


def digest(file: Path) -> str:
    """Returns the SHA-256 digest of what a file holds."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def source_of(address: object, cwd: str) -> dict[str, str] | None:
    """Returns the file behind an address and its digest, for run.json; None where there is no such file."""
    if not isinstance(address, str):
        return None
    place = split_address(address).place
    file = Path(cwd) / place if is_file(place) else located(place, [*sys.path, cwd])
    return _described(file)


def factory_of(make: Callable[..., Any]) -> dict[str, str] | None:
    """Returns the file of what makes a model and its digest, with the ``name`` (package.module:name) that another
    process imports it by; None where there is no such name."""
    place, name = getattr(make, "__module__", None), getattr(make, "__qualname__", None)
    if not isinstance(place, str) or not isinstance(name, str) or place == "__main__" or "<" in name:
        return None
    module = sys.modules.get(place)
    file = getattr(module, "__file__", None)
    if file is None or attribute(module, name) is not make:
        return None
    found = located(place, sys.path)
    if found is None or found.resolve() != Path(file).resolve():
        return None  # it is known to this process alone by that name
    about = _described(found)
    return None if about is None else {"name": f"{place}:{name}", **about}


def attribute(value: Any, name: str) -> Any:
    """Returns what a dotted name gives; None where it gives nothing."""
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _described(file: Path | None) -> dict[str, str] | None:
    try:
        return None if file is None else {"file": str(file.resolve()), "sha256": digest(file)}
    except OSError:
        return None


def located(module: str, folders: Sequence[str]) -> Path | None:
    """Returns the file of a module, by its dotted name. Nothing is imported for it, not even the package around it."""
    path: Sequence[str] | None = list(folders)
    found = None
    parts = module.split(".")
    for at in range(len(parts)):
        # importlib.util.find_spec would import the packages on the way, which is what has to be decided first.
        found = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if found is None:
            return None
        path = list(found.submodule_search_locations or ())
    return Path(found.origin) if found is not None and found.origin is not None else None


def at_hand(file: Path) -> ModuleType | None:
    """Returns the module that this process has made of a file already, the running script among them; None where there
    is none."""
    file = file.resolve()
    for module in list(sys.modules.values()):
        own = getattr(module, "__file__", None)
        if isinstance(own, str) and Path(own).name == file.name and Path(own).resolve() == file:
            return module
    return None
