"""Writes checkpoints beside the training, in a thread; what waits to be written is replaced by what is newer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from apportion.core.strategy import State
from apportion.errors import CheckpointError, Superseded
from apportion.runtime.checkpoint.run_directory import RunDirectory, Saved

BEAT_SECONDS = 0.2
"""The seconds between two signs of life while others wait for a checkpoint to be written."""


@dataclass(frozen=True)
class _Waiting:
    state: State
    epoch: float
    best: bool


class Saver:
    """Writes states into a run directory (None: nowhere)."""

    def __init__(self, directory: RunDirectory | None, keep: int, strategy: str) -> None:
        self._directory, self._keep, self._strategy = directory, keep, strategy
        self._waiting: dict[bool, _Waiting] = {}
        self._news: list[Saved | CheckpointError] = []
        self._condition = threading.Condition()
        self._busy = self._closing = False
        self._thread: threading.Thread | None = None
        self._failed: CheckpointError | None = None
        self._snapshot = 0.0
        self.seconds = 0.0
        """The seconds that the last checkpoint took, snapshot and writing: of all the time, at most a share goes
        there."""

    def submit(self, state: State, epoch: float, *, best: bool, seconds: float) -> None:
        """Has this state written. ``seconds``: the time that the snapshot took. Raises Superseded where another one
        writes the run directory by now."""
        if self._directory is None:
            return
        if isinstance(self._failed, Superseded):  # another one goes on with the run
            raise self._failed
        with self._condition:
            self._waiting[best] = _Waiting(state, epoch, best)
            self._snapshot = seconds
            self._closing = False
            # The thread sets itself to None under the same lock: a state is either seen by the running thread, or
            # starts another one.
            if self._thread is None:
                self._start(state.step)
            self._condition.notify_all()

    def _start(self, step: int) -> None:
        thread = threading.Thread(target=self._work, name="saver", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit of memory or of threads: what does not run must not be waited for
            self._waiting.clear()
            raise CheckpointError(f"step {step} could not be saved: {error} to write it; raise its limits") from error
        self._thread = thread  # which waits for the lock that is held here

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    self._thread = None
                    self._condition.notify_all()
                    return
                # The older first: ``latest`` goes to what is written last.
                oldest = min(self._waiting, key=lambda best: self._waiting[best].state.step)
                item = self._waiting.pop(oldest)
                self._busy = True
            # The lock is not held while a state is written: submit() must not wait for the disk.
            self._write(item)
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def _write(self, item: _Waiting) -> None:
        assert self._directory is not None
        began = time.perf_counter()
        try:
            saved: Saved | CheckpointError = self._directory.save(
                item.state, epoch=item.epoch, strategy=self._strategy, keep=self._keep, best=item.best
            )
            self._failed = None
        except CheckpointError as error:
            saved = self._failed = error
        except Exception as error:  # a thread's death would leave everyone waiting for it
            saved = self._failed = CheckpointError(f"step {item.state.step} could not be saved: {error}")
            saved.__cause__ = error
        self.seconds = self._snapshot + time.perf_counter() - began
        with self._condition:
            self._news.append(saved)

    def news(self) -> list[Saved | CheckpointError]:
        """Returns what was written, or failed to be, since the last call."""
        if not self._news:
            return []
        with self._condition:
            news, self._news = self._news, []
        return news

    def flush(self) -> None:
        """Block until everything submitted is written."""
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting and not self._busy)

    def finish(self, beat: Callable[[], None] = lambda: None) -> None:
        """Block until everything submitted is written, and end the thread. ``beat`` is called a few times a second."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            # A watchdog takes a rank without beats to be stuck, and a large checkpoint takes longer than it waits.
            while not self._condition.wait_for(lambda: self._thread is None, BEAT_SECONDS):
                beat()

    def check(self) -> None:
        """Raises what the last write failed with."""
        if self._failed is not None:
            raise self._failed
