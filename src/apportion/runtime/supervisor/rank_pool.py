"""The ranks of a run as one pool, wherever they are, and the history from which is decided what to do next."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

from apportion.comm.channel import Message
from apportion.core.policy import Policy
from apportion.runtime.spawn.template import Spare
from apportion.runtime.supervisor.failures import (
    Action,
    Notice,
    WorkerBegan,
    WorkerEvent,
    WorkerExited,
    WorkerFinished,
    WorkerLost,
    WorkersChanged,
    WorkerStalled,
    next_action,
)
from apportion.runtime.supervisor.watchdog import LOOK_SECONDS, Allowance, Watchdog, memory_kills

KILL_SECONDS = 30.0
"""The seconds that a killed worker may take to end: it is not replaced before, since it could write to what it
shares."""
LEAVING_SECONDS = 5.0
"""The seconds in which ranks that are done still report something."""


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

    def add(self, happening: WorkerEvent) -> None:
        """Adds what has just happened."""
        self._happened.append(happening)
        self._last = time.monotonic()

    def add_exit(self, rank: int, code: int, step: int) -> None:
        """Adds the end of a process, which the kernel may have killed for want of memory."""
        self.add(WorkerExited(rank, code, out_of_memory=memory_kills() > self._kills, step=step))

    def add_late(self, late: WorkerStalled, stopped: Sequence[int]) -> bool:
        """Adds that workers are late, once between two changes. ``stopped``: the ranks whose processes are stopped.
        Returns whether it was added of ranks whose processes run: then their stacks show what they wait for."""
        if any(isinstance(h, WorkerStalled) for h in self._since_change()):
            return False
        stopped = stopped if not late.stopped else []
        ranks = tuple(stopped) or late.ranks
        late = dataclasses.replace(late, ranks=ranks, stopped=late.stopped or bool(stopped))
        self.add(late)
        return not late.stopped

    def add_change(self, losses: Sequence[WorkerLost], ranks: int, *, restarted: bool = False) -> None:
        """Adds that these workers were lost, and that the pool has this number of ranks from now on."""
        self.add(WorkersChanged(tuple(losses), ranks, restarted))
        self._kills = memory_kills()

    @property
    def finishing(self) -> bool:
        """True once a worker has reported that it is done, in the world as it is now."""
        return bool(self.finished)

    @property
    def finished(self) -> list[int]:
        """The ranks that have reported that they are done, in the world as it is now."""
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


class OpenChange(Protocol):
    """A change of the membership that is under way."""

    def settled(self, lost: Collection[int]) -> bool:
        """Tells whether the lost have ended, and all others have answered. Raises WorkerFailed where a killed process
        does not end."""


class RankPool(ABC):
    """The ranks of a run, of which lost ones are replaced, or gone on without: on this host, or on several.

    ``pids``, ``wake`` and ``send`` may be called from any thread. Everything else belongs to the one thread that the
    pool was handed to (``RecoveryLoop``), and to the thread that made it before and after that.

    A change of the membership is opened (``open_change`` or ``admit``), is asked until it has settled, and is closed
    once: by ``replace``, ``shrink``, ``grow``, ``dismiss`` or ``restart``. Meanwhile ``hear`` must go on being called,
    since it is what learns that a process has ended.
    """

    spare: Spare | None = None
    """The process that replacements are forked from, where there is one of this pool's own."""
    survives: bool = True
    """Whether the workers that are left go on with the state that they have; else all begin again."""

    def __init__(self, history: PoolHistory, *, replaceable: bool) -> None:
        self.history = history
        """Everything that has happened to the ranks."""
        self._replaceable = replaceable
        self._begun = False
        """True once every rank is in its loop."""
        self._stopping = False
        """True once all ranks were ordered to stop."""

    # From any thread

    @abstractmethod
    def pids(self) -> list[int]:
        """Returns the process ids by rank, as far as they are of this host; none while all are started again."""

    @abstractmethod
    def wake(self) -> None:
        """Makes ``hear`` return now."""

    def send(self, order: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Sends an order to these ranks (None: to all; "stop" also goes to workers that are started later)."""
        # Noted before it is sent: a worker that the pool's thread starts in between is sent the order twice, which does
        # no harm. The other way round it might get none.
        self._stopping = self._stopping or order["kind"] == "stop"
        self._send(order, ranks)

    @abstractmethod
    def _send(self, order: Mapping[str, Any], ranks: Sequence[int] | None) -> None: ...

    # What happens

    @property
    @abstractmethod
    def ranks(self) -> int:
        """The number of ranks that are in the run."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of updates made, as far as the ranks show it."""

    @abstractmethod
    def hear(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yields what ranks report within this time, by rank, and returns after the first reports. What happens to the
        ranks is noted."""

    @abstractmethod
    def notices(self) -> list[Notice]:
        """Returns what the user is to know besides, since the last call."""

    @abstractmethod
    def action(self) -> Action:
        """Decides what to do about all that has happened so far."""

    def _note_begun(self, watch: Watchdog) -> None:
        """Notes, once, that every rank has built its step, where another could take its place."""
        if self._replaceable and not self._begun and watch.begun:
            self._begun = True
            self.history.add(WorkerBegan())

    @property
    def finishing(self) -> bool:
        """True once a rank has passed the end, which is there for the others, too."""
        return self.history.finishing

    def offered(self) -> bool:
        """Tells whether workers are offered that could take part. On one host all that can do."""
        return False

    # A change of the membership

    @abstractmethod
    def open_change(self, lost: Collection[int]) -> OpenChange:
        """Opens a change of the membership: these ranks are lost and killed, and all others have to answer."""

    @abstractmethod
    def admit(self) -> OpenChange:
        """Opens a change of the membership in which no rank is lost, and the workers that are offered are taken in."""

    @abstractmethod
    def grow(self) -> None:
        """Closes the change in which no rank was lost."""

    @abstractmethod
    def replace(self, losses: Sequence[WorkerLost]) -> Sequence[WorkerLost]:
        """Closes the change with new workers in the places of the lost; returns those in whose places there are
        none."""

    @abstractmethod
    def shrink(self, losses: Sequence[WorkerLost]) -> None:
        """Closes the change without the lost."""

    @abstractmethod
    def dismiss(self) -> None:
        """Closes the change for those that are left, which are to save and to leave."""

    @abstractmethod
    def restart(self, losses: Sequence[WorkerLost]) -> Iterator[tuple[int, Message]]:
        """Ends every process, and begins again, from the last checkpoint where there is one. Yields what ranks still
        report."""

    @abstractmethod
    def prepare_spare(self) -> None:
        """Starts the spare that replacements are forked from."""

    # Ending

    def hear_leaving(self, seconds: float = LEAVING_SECONDS) -> Iterator[tuple[int, Message]]:
        """Yields what ranks that are done still report, until they have ended by themselves or the time is up."""
        allowed = Allowance(seconds)
        while self._may_report() and (left := allowed.left) > 0:
            yield from self.hear(min(LOOK_SECONDS, left))

    @abstractmethod
    def _may_report(self) -> bool:
        """Tells whether a process may still report something."""

    @abstractmethod
    def close(self) -> None:
        """Ends every process, and lets go of what they share. May be called more than once."""
