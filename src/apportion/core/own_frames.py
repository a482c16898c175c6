"""The traceback of an error as a user reads it: the explanation first, and without the frames of this package.

``APPORTION_TRACEBACK=full`` keeps every frame. An AssertionError is a defect of this package, and keeps its frames.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType

from apportion.process import PACKAGE

VARIABLE = "APPORTION_TRACEBACK"
"""The variable of the environment that asks for every frame, by the value ``full``."""


def wants_all(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether every frame was asked for."""
    return environment.get(VARIABLE) == "full"


def without_own_frames(error: BaseException) -> None:
    """Takes the frames of this package out of the traceback of an error and of those that it came from, in place. An
    error that it only passed on its way, all of whose frames are of this package, is not shown with it."""
    if wants_all() or isinstance(error, AssertionError):
        return
    for one in _chain(error):
        one.__traceback__ = _others(one.__traceback__)
        context = one.__context__
        if context is not None and one.__cause__ is None and _others(context.__traceback__) is None:
            one.__suppress_context__ = True


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = set[int]()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [other for other in (one.__cause__, one.__context__) if other is not None]


def _others(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the frames of this package."""
    kept = list[TracebackType]()
    while trace is not None:
        if not _is_own(trace.tb_frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    made = None
    for one in reversed(kept):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made


def _is_own(file: str) -> bool:
    return file.startswith(f"{PACKAGE}{os.sep}")


def outside() -> int:
    """Returns the ``stacklevel`` by which a warning of the caller's is attributed to the first line outside of this
    package."""
    level, frame = 1, inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None and _is_own(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def formatted(error: BaseException) -> str:
    """Returns the traceback of an error as text, without the frames of this package unless they were asked for, or
    there are no others."""
    if not wants_all() and not isinstance(error, AssertionError):
        shown = traceback.TracebackException.from_exception(error)
        if _drop(shown, set()) or isinstance(error, SyntaxError):  # which has its place in its text
            return "".join(shown.format())
    return "".join(traceback.format_exception(error))


def _drop(shown: traceback.TracebackException, seen: set[int]) -> bool:
    """Takes the frames of this package out; returns whether any other is left."""
    if id(shown) in seen:
        return False
    seen.add(id(shown))
    others = [frame for frame in shown.stack if not _is_own(frame.filename)]
    shown.stack = traceback.StackSummary.from_list(others)
    left = bool(others)
    for other in (shown.__cause__, shown.__context__):
        left = (other is not None and _drop(other, seen)) or left
    return left
