"""Whether a file belongs to an installed package, by the folder that it lies in."""

from __future__ import annotations

from pathlib import PurePath

_FOLDERS = ("site-packages", "dist-packages")


def in_packages(file: str | PurePath) -> bool:
    """Tells whether a file lies in a folder of installed packages. What lies elsewhere is Python's, or the user's own,
    packages that were installed to be edited among it."""
    return any(folder in PurePath(file).parts for folder in _FOLDERS)
