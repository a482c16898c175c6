"""Errors that are the user's mistakes, by where they were raised."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from apportion.core.installed import in_packages
from apportion.process import PACKAGE

_STANDARD = Path(os.__file__).parent
_NOWHERE = traceback.FrameSummary("", None, "")


def is_mistake(error: BaseException) -> bool:
    """Tells whether an error is a refusal of this package: a ValueError that was raised by it."""
    return isinstance(error, ValueError) and package_of((frames_of(error) or [_NOWHERE])[-1]) == "apportion"


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the places that an error has come through, the innermost last."""
    return list(traceback.extract_tb(error.__traceback__))


def package_of(frame: traceback.FrameSummary) -> str | None:
    """Returns "apportion" or "library" for installed code, None for the user's own."""
    file = Path(frame.filename)
    if file.is_relative_to(PACKAGE):
        return "apportion"
    installed = in_packages(file) or file.is_relative_to(_STANDARD) or frame.filename.startswith("<frozen")
    return "library" if installed else None
