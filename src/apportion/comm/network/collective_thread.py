"""A thread that makes collectives one after the other, while the thread that asked for them computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import final

from apportion.comm.group import Group, WaitClock, Work
from apportion.comm.network.rank_connection import NAP_SECONDS

Job = Callable[[WaitClock], None]
"""A collective, which counts its waits by the thread's own clock."""


@final
class CollectiveThread:
    """The thread of one group. It is asked by one other thread alone."""

    def __init__(self) -> None:
        self.clock = WaitClock()
        """The clock of what the thread waits for, which no other thread does."""
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="collectives", daemon=True)
        self._thread.start()

    def run(self, job: Job, group: Group) -> Work:
        """Begins a job once those before it have ended. A thread that waits for it waits by the group's clock."""
        self._last = Future()
        # First in, first out: all ranks ask in one order, so that the collectives of their threads meet each other.
        self._jobs.put((job, self._last))
        return _ThreadWork(self._last, group)

    def is_idle(self) -> bool:
        """Returns whether every job has ended."""
        return self._last is None or self._last.done()

    def wait_idle(self, group: Group) -> None:
        """Waits until every job has ended, by the group's clock; the errors are raised in those that wait for the
        jobs."""
        if self._last is not None and not self._last.done():
            _wait_for(self._last, group)

    def close(self) -> None:
        """Ends the thread, once its jobs have ended."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:
            job, future = given
            try:
                job(self.clock)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)


@final
class _ThreadWork(Work):
    """A collective that the thread makes."""

    def __init__(self, future: Future[None], group: Group) -> None:
        self._future, self._group = future, group

    def wait(self) -> None:
        if not self._future.done():
            self._group.waits.append(_wait_for(self._future, self._group))
        self._future.result()


def _wait_for(future: Future[None], group: Group) -> tuple[float, float]:
    """Waits for the end of a job, while messages go on: the rank that this rank waits for may wait for one of those.
    Returns when the wait began and ended."""
    clock, began = group.all_waits, time.perf_counter()
    clock.begin()
    try:
        # In naps only while there are messages to move: otherwise the thread sleeps until the job is done.
        while clock.move_on() and not wait([future], NAP_SECONDS).done:
            pass
        wait([future])
    finally:
        clock.end()
        ended = time.perf_counter()
        clock.seconds += ended - began
    return began, ended
