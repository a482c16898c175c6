"""What has happened to the workers of a pool, of which is decided what to do next."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import final

from apportion.core.policy import Policy
from apportion.runtime.supervisor.decisions import Action, next_action
from apportion.runtime.supervisor.failures import (
    WorkerEvent,
    WorkerExited,
    WorkerFinished,
    WorkerLost,
    WorkersChanged,
    WorkerStalled,
)
from apportion.runtime.supervisor.watchdog import memory_kills


@final
class PoolHistory:
    """Everything that has happened to the workers, in order. ``ranks``: how many there were at first; ``survives``:
    whether a lost one can be replaced, or gone on without; ``restarts``: whether all begin again where none can."""

    def __init__(self, ranks: int, policy: Policy, *, survives: bool, restarts: bool = False) -> None:
        self._ranks, self._policy, self._survives, self._restarts = ranks, policy, survives, restarts
        self.clear()
        self._kills = memory_kills()

    def clear(self) -> None:
        """Forgets everything, before another job."""
        self._happened: list[WorkerEvent] = []
        self._last = time.monotonic()

    def note(self, happening: WorkerEvent) -> None:
        """Adds what has just happened."""
        self._happened.append(happening)
        self._last = time.monotonic()

    def note_exit(self, rank: int, code: int, step: int) -> None:
        """Adds the end of a process, which the kernel may have killed for want of memory."""
        self.note(WorkerExited(rank, code, out_of_memory=memory_kills() > self._kills, step=step))

    def note_late(self, late: WorkerStalled, stopped: Sequence[int]) -> bool:
        """Adds that workers are late, once between two changes. ``stopped``: the ranks whose processes are stopped.
        Returns whether it was added of ranks that run, so that nobody knows what they wait for."""
        if any(isinstance(h, WorkerStalled) for h in self._since_change()):
            return False
        stopped = stopped if not late.stopped else []
        ranks = tuple(stopped) or late.ranks
        late = dataclasses.replace(late, ranks=ranks, stopped=late.stopped or bool(stopped))
        self.note(late)
        return not late.stopped

    def note_change(self, losses: Sequence[WorkerLost], ranks: int, *, restarted: bool = False) -> None:
        """Adds that the pool has so many ranks from now on."""
        self.note(WorkersChanged(tuple(losses), ranks, restarted))
        self._kills = memory_kills()

    @property
    def finishing(self) -> bool:
        """True once a worker has told that it is done, in the world as it is now."""
        return bool(self.finished)

    @property
    def finished(self) -> list[int]:
        """The ranks that have told that they are done, in the world as it is now."""
        return [h.rank for h in self._since_change() if isinstance(h, WorkerFinished)]

    def _since_change(self) -> list[WorkerEvent]:
        since = max((at for at, h in enumerate(self._happened, 1) if isinstance(h, WorkersChanged)), default=0)
        return self._happened[since:]

    @property
    def quiet(self) -> float:
        """The seconds since something happened."""
        return time.monotonic() - self._last

    def action(self) -> Action:
        """Decides what to do about all that has happened so far."""
        return next_action(
            self._happened, self._ranks, self.quiet,
            policy=self._policy, survives=self._survives, restarts=self._restarts,
        )  # fmt: skip
