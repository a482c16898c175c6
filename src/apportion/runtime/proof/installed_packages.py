"""Tells which modules belong to an installed package, and to which release of it; all others are the user's own."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import site
import sys
import sysconfig
from functools import cache
from importlib import metadata
from typing import Any

from apportion.process import PACKAGE

_SELF = "apportion"


@cache
def release(module: str, *, portable: bool = False) -> str | None:
    """Returns the release of the installed package, or of Python, that a module belongs to; None for a module of the
    user's.

    It holds the size and the time of the module's file too: a package may be installed again under the same version.
    ``portable`` leaves these out, so that it is the same on two hosts that have the same version.
    """
    top = module.partition(".")[0]
    if top == _SELF:
        return own_contents() if portable else _own_release()
    if top == "__main__":
        return None
    file = _file(module, top)
    if file is None:
        if top in sys.builtin_module_names or top in sys.stdlib_module_names:
            return platform.python_version()
        # A module made in memory, or in C within another file, belongs where its package belongs.
        return release(top, portable=portable) if module != top else None
    if not below_installed(os.path.realpath(file)):
        return None
    if top in sys.stdlib_module_names:
        return platform.python_version()
    return _version(top) if portable else f"{_version(top)} {_stamp(file)}"


def importable(value: Any, module: str, name: str) -> bool:
    """Tells whether this name in this module means this very value."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


@cache
def _own_release() -> str:
    """Returns the release of this package, whose files may be edited where they are used."""
    files = sorted(str(path) for path in PACKAGE.rglob("*.py"))
    return " ".join([_version(_SELF), *map(_stamp, files)])


@cache
def own_contents() -> str:
    """Returns the version of this package, and a digest of what its files hold."""
    made = hashlib.blake2b(digest_size=4)
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_bytes()
        made.update(b"%s %d " % (path.relative_to(PACKAGE).as_posix().encode(), len(text)))
        made.update(text)
    return f"{_version(_SELF)} ({made.hexdigest()})"


def _file(module: str, top: str) -> str | None:
    """Returns the file of a module that is loaded, or of the package of one that is not, since finding its own would
    load the package."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    return found.origin if found is not None and found.has_location else None


@cache
def _roots() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.realpath(path) + os.sep for path in paths})


def below_installed(file: str) -> bool:
    return file.startswith(_roots())


@cache
def _version(top: str) -> str:
    found = getattr(sys.modules.get(top), "__version__", None)
    if found is not None:
        return str(found)
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        return "unknown"


def _stamp(file: str) -> str:
    try:
        found = os.stat(file)
    except OSError:  # within an archive
        return ""
    return f"{found.st_size}.{found.st_mtime_ns}"
