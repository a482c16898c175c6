"""The user's own code, as it goes to the hosts of a run: the Python files below a folder."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from apportion.core.place_names import split_address
from apportion.process import PACKAGE

MOST_BYTES = 64 << 20
"""The most bytes of code that goes along."""
MOST_FOLDERS = 20_000
"""The most folders that are looked into: more of them are not one project."""
_OTHERS = ("__pycache__", "site-packages", "dist-packages", "node_modules")
"""The folders that hold what is installed, or made."""


def project_root(address: str | None, main: ModuleType) -> Path:
    """Returns the folder whose modules the workload may import: that of its file; for a workload without an address
    that of the script that runs; for a module, a notebook and ``python -m`` the current folder.

    ``address``: the workload's, where it was given by one. ``main``: the module ``__main__``.
    """
    if address is not None:
        parts = split_address(address)
        return Path(parts.place).resolve().parent if parts.is_file else Path.cwd()
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None:
        return Path.cwd()
    return Path(file).resolve().parent


def shipped_address(address: str) -> str:
    """Returns what the address of a workload is below ``project_root``."""
    parts = split_address(address)
    return parts.at(Path(parts.place).name) if parts.is_file else address


def shipped_path(root: Path) -> list[str]:
    """Returns the folders below the root, relative to it, that this process finds modules in; the root is the first."""
    found = ["."]
    for entry in sys.path:
        folder = Path(entry or ".").resolve()
        if folder.is_relative_to(root) and not any(part in _OTHERS for part in folder.relative_to(root).parts):
            found.append(folder.relative_to(root).as_posix())
    return list(dict.fromkeys(found))


def make_bundle(root: Path) -> bytes:
    """Returns the Python files below a folder, without environments, hidden folders and what is installed there. Raises
    ValueError where they are too many."""
    made, total = io.BytesIO(), 0
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bundle:
        for file in _files(root):
            try:
                data = file.read_bytes()
            except OSError:  # a link that leads nowhere, or another user's: importing it says so
                continue
            total += len(data)
            if total > MOST_BYTES:
                raise ValueError(
                    f"the Python files below {root} hold more than {MOST_BYTES >> 20} MB, which is the most that goes "
                    f"to the hosts ({file} is one of them): put the workload and its modules into a folder of their own"
                )
            bundle.writestr(file.relative_to(root).as_posix(), data)
    return made.getvalue()


def unpack(bundle: bytes, folder: Path) -> None:
    """Writes the files of a bundle below a new folder that its owner alone can enter. Raises OSError where that cannot
    be done."""
    folder.mkdir(mode=0o700)
    with zipfile.ZipFile(io.BytesIO(bundle)) as files:
        files.extractall(folder)


def _files(root: Path) -> Iterator[Path]:
    for number, (place, folders, names) in enumerate(os.walk(root)):
        if number > MOST_FOLDERS:
            raise ValueError(
                f"there are more than {MOST_FOLDERS:,} folders below {root}, whose Python files go to the hosts: put "
                "the workload and its modules into a folder of their own"
            )
        folders[:] = sorted(name for name in folders if _is_own(Path(place, name)))
        yield from (Path(place, name) for name in sorted(names) if name.endswith(".py"))


def _is_own(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in _OTHERS or (folder / "pyvenv.cfg").exists():
        return False
    return folder.resolve() != PACKAGE
