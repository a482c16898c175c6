"""Writes down what a rank of a script does, one event at a time, so that the record of a killed process is not lost."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from apportion.process import PACKAGE

UNWRITABLE = os.EX_IOERR
"""The status with which a rank ends that cannot write its record, as on a full disk."""
# Taken now, as the program of a rank replaces os._exit by a function that ends the record first, and this one is for
# records that cannot be written.
_leave = os._exit
_TORCH = str(Path(importlib.util.find_spec("torch").submodule_search_locations[0]))  # type: ignore[union-attr,index]


class Finished(BaseException):
    """Enough steps have been recorded: leaves the script, past its ``except Exception``."""


class Recorder:
    """The record of this process. ``plan``: what is to be done in this pass (see ``plan.py``)."""

    def __init__(self, plan: Mapping[str, Any], rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.step = 0
        """The number of optimizer steps completed."""
        self.feed: Any = plan.get("feed")
        """What the pass is fed with (see ``feed.py``); None where it reads what the script reads."""
        self.files = list[Any]()
        """Files that stay open for as long as the process runs."""
        self.draws = 0
        """The number of times that random numbers were drawn by a function that is watched (see ``draws.py``)."""
        self.drawing = ""
        """What a loader is doing: "order" while a sampler draws indices, "rows" while rows are read, else empty."""
        self.large_rows = 0
        """The bytes of large batches that were recorded by their contents."""
        self.parts: list[int] = []
        """The rows that each rank has read of the last batch, in a fed pass."""
        self._folder = str(plan["folder"])
        self._pid = os.getpid()
        self._lock = threading.Lock()
        try:
            self._file = Path(plan["record"], f"rank{rank}.pkl").open("wb")  # noqa: SIM115 (open until the process ends)
        except OSError:
            _leave(UNWRITABLE)

    @property
    def active(self) -> bool:
        """Whether this process is the rank itself, and not a loader process forked from it."""
        return os.getpid() == self._pid

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event; nothing in a process forked from the rank. Ends the process where it cannot be written."""
        if not self.active:
            return
        # Outside of the lock, which is held for one write alone. It keeps the events of several threads, such as those
        # of autograd, from being written into each other; the flush leaves each event to the system, which keeps it
        # when the process is killed.
        data = pickle.dumps({"kind": kind, "step": self.step, **fields}, protocol=5)
        try:
            with self._lock:
                self._file.write(data)
                self._file.flush()
        except OSError:  # not raised: the script, which has done nothing wrong, could catch it
            _leave(UNWRITABLE)

    def finish(self, **outcome: Any) -> None:
        """Write the event ``end``, and an empty file beside the record which says that it is complete."""
        self.emit("end", time=time.monotonic(), **outcome)
        try:
            Path(self.plan["record"], f"rank{self.rank}.end").touch()
        except OSError:
            _leave(UNWRITABLE)

    def is_user_file(self, file: str) -> bool:
        """Whether a source file is the user's: in the script's folder, and not of an installed package."""
        return file.startswith(self._folder) and "site-packages" not in file and not file.startswith(str(PACKAGE))

    def frame(self) -> FrameType | None:
        """Returns the innermost frame of the user's code in this thread."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self.is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def user_frames(self) -> Iterator[FrameType]:
        """Yields the frames of the user's code in this thread, the innermost first."""
        frame = self.frame()
        while frame is not None:
            if self.is_user_file(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    def chain(self) -> str:
        """Returns the files and lines of all frames of the user's code, the innermost first: two calls of one helper
        from different lines have different chains."""
        return " ".join(map(self._place, self.user_frames()))

    def is_direct(self) -> bool:
        """Returns whether the user's code itself calls a function of torch, and not a library that it calls."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((str(PACKAGE), _TORCH)):
            frame = frame.f_back
        return frame is not None and self.is_user_file(frame.f_code.co_filename)

    def site(self) -> str:
        """Returns file and line, as ``train.py:31``, of the innermost frame of the user's code; empty outside of it."""
        frame = self.frame()
        return "" if frame is None else self._place(frame)

    def site_outside(self, objects: Collection[int]) -> str:
        """Returns file and line of the innermost frame of the user's code that is not a method of some objects, given
        by their identities; empty where every frame is."""
        frames = (frame for frame in self.user_frames() if id(frame.f_locals.get("self")) not in objects)
        return next(map(self._place, frames), "")

    def _place(self, frame: FrameType) -> str:
        return f"{os.path.relpath(frame.f_code.co_filename, self._folder)}:{frame.f_lineno}"
