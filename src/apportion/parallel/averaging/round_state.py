"""The state of rounds that close at their deadline: which replicas take part, which batches each is assigned, and when
a round is over. It holds no tensor and reads no clock: every decision follows from what it was given.

::

    idle      has connected, or has sent its part: is assigned batches when the next round opens
    working   has batches of the round that is open
    late      that round was closed without it; no replica waits for it, and it is assigned nothing until it
              sends a message

A round opens as soon as one is over, for all that are idle. A moment before its deadline each working replica is asked
for what it has by then. It is over when every working replica has sent its part, or at its deadline; where none has by
then, and no new replica waits, with the first part. The batches that were not made, and those of replicas that were
late or are gone, are assigned again, in the next round: so each batch is in an average once, and every epoch sees each
example once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import final

GATHER_SECONDS = 20.0
"""The seconds for which the first round waits for all ranks; it opens as soon as they are there."""
GRACE_SECONDS, GRACE_PART = 0.2, 0.2
"""The seconds before the deadline at which replicas are asked for what they have, but no more than this part of it."""
MARGIN = 0.8
"""The part of the deadline that a slow replica's batches are to take."""


class ReplicaState(Enum):
    """What is waited for from a replica."""

    IDLE = "idle"
    WORKING = "working"
    LATE = "late"


@dataclass
class PresentReplica:
    """A replica that is connected. ``incarnation``: the number of its connection, which no other has had."""

    incarnation: int
    state: ReplicaState = ReplicaState.IDLE
    batches: tuple[int, ...] = ()
    """The batches that it was assigned last."""
    most_batches: int | None = None
    """The most batches that it makes by the deadline; None: unknown."""


@dataclass(frozen=True)
class Assignment:
    """The batches that a replica is sent when a round opens."""

    incarnation: int
    batches: tuple[int, ...]


@dataclass(frozen=True)
class OpenedRound:
    """A round as it opens."""

    number: int
    done: int
    """The number of batches in the average that it begins with."""
    present: int
    """The number of replicas that were idle."""
    unpushed: tuple[int, ...]
    """The batches before the last one ever assigned that are in no average."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    """The assignments by rank; a rank that is assigned no batches has none."""


@final
class RoundState:
    """The state of the rounds. Times are seconds of one clock that never goes back."""

    def __init__(self, *, every: int, total: int, deadline: float, size: int) -> None:
        self._every, self._total, self._deadline, self._size = every, total, deadline, size
        self.slots: dict[int, PresentReplica] = {}
        """The replicas that are there, by rank."""
        self._incarnations = 0
        self._free: list[int] = []
        """A heap of the batches that are to be assigned again."""
        self._next = 0
        self.done = 0
        """The number of batches in the last average."""
        self.number = 0
        """The number of the round that is open, or opens next."""
        self._opened: float | None = None
        self._ask_at: float | None = None
        """The time at which those who work are asked for what they have; None where they have been."""
        self._gathers_until: float | None = None
        self._arrived: list[int] = []
        """The ranks whose parts of the open round have come, in this order."""

    def start(self, done: int, unpushed: Iterable[int], now: float) -> None:
        """Begin with an average that holds ``done`` batches; ``unpushed``: those that it lacks before its last one."""
        self._free = sorted(unpushed)
        self.done, self._next = done, done + len(self._free)
        self._gathers_until = now + GATHER_SECONDS

    @property
    def is_open(self) -> bool:
        """True while a round is open."""
        return self._opened is not None

    @property
    def is_finished(self) -> bool:
        """True when every batch is in the average."""
        return self.done >= self._total

    # Who is there

    def add_replica(self, rank: int) -> int:
        """Add a replica, in the place of one with its rank that was there; returns its incarnation."""
        self.remove_replica(rank)
        self._incarnations += 1
        self.slots[rank] = PresentReplica(self._incarnations)
        return self._incarnations

    def remove_replica(self, rank: int) -> None:
        """Record that a replica is gone: the batches that it was assigned, and whose part it has not sent, are assigned
        again. A part that it has sent stays in the round."""
        slot = self.slots.pop(rank, None)
        if slot is not None and slot.state is ReplicaState.WORKING:
            self._give_back(slot)

    def _give_back(self, slot: PresentReplica, made: int = 0) -> None:
        for batch in slot.batches[made:]:
            heapq.heappush(self._free, batch)

    # Rounds

    def open_round(self, now: float) -> OpenedRound | None:
        """Open the next round, where it is time for one; returns None where it is not."""
        idle = sorted(rank for rank, slot in self.slots.items() if slot.state is ReplicaState.IDLE)
        if self.is_open or self.is_finished or not idle or self._gathers_until is None:
            return None
        if len(idle) < self._size and now < self._gathers_until:
            return None
        self._gathers_until = 0.0
        opened = OpenedRound(self.number, self.done, len(idle), tuple(sorted(self._free)))
        for rank, batches in self._assign_batches(idle).items():
            slot = self.slots[rank]
            slot.state, slot.batches = ReplicaState.WORKING, tuple(batches)
            opened.assignments[rank] = Assignment(slot.incarnation, slot.batches)
        self._opened, self._arrived = now, []
        self._ask_at = now + self._deadline - min(GRACE_SECONDS, GRACE_PART * self._deadline)
        return opened

    def ranks_to_ask(self, now: float) -> list[int]:
        """Return the ranks that are to be asked, now and once, for what they have of the open round."""
        if self._opened is None or self._ask_at is None or now < self._ask_at:
            return []
        self._ask_at = None
        return [rank for rank, slot in self.slots.items() if slot.state is ReplicaState.WORKING]

    def _assign_batches(self, idle: list[int]) -> dict[int, list[int]]:
        """Assign the next batches to the ranks in turn, those first that are assigned again."""
        assigned: dict[int, list[int]] = {}
        most = {rank: min(self._every, self.slots[rank].most_batches or self._every) for rank in idle}
        for turn in range(self._every):
            for rank in idle:
                if turn >= most[rank]:
                    continue
                if self._free:
                    assigned.setdefault(rank, []).append(heapq.heappop(self._free))
                elif self._next < self._total:
                    assigned.setdefault(rank, []).append(self._next)
                    self._next += 1
        return assigned

    def record_part(self, rank: int, number: int, made: int, now: float) -> bool:
        """Note that a replica has ended its part of a round, of which it has made ``made`` batches; returns whether
        that counts. It is idle from here on."""
        slot = self.slots[rank]
        counts = slot.state is ReplicaState.WORKING and number == self.number and 0 < made <= len(slot.batches)
        if counts:
            self._arrived.append(rank)
            self._measure(slot, made, now)
            self._give_back(slot, made)
        elif slot.state is ReplicaState.WORKING:
            self._give_back(slot)
        elif made:  # late: as most_batches as it made by the deadline, or would have made
            slot.most_batches = max(1, int(MARGIN * min(made, len(slot.batches) - 1 or 1)))
        slot.state = ReplicaState.IDLE
        return counts

    def _measure(self, slot: PresentReplica, made: int, now: float) -> None:
        assert self._opened is not None
        seconds = max(1e-6, now - self._opened)
        slot.most_batches = max(1, min(self._every, int(MARGIN * self._deadline * made / seconds)))

    def is_over(self, now: float) -> bool:
        """Return whether the open round is over."""
        if self._opened is None:
            return False
        works = any(slot.state is ReplicaState.WORKING for slot in self.slots.values())
        return not works or (self._is_waited_for and now >= self._opened + self._deadline)

    @property
    def _is_waited_for(self) -> bool:
        """True where somebody waits for the open round to be over: one who has come, or who is new."""
        return bool(self._arrived) or any(slot.state is ReplicaState.IDLE for slot in self.slots.values())

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until a deadline asks for a decision; None where no deadline is set."""
        if self._opened is not None:
            ends = self._opened + self._deadline if self._is_waited_for else None
            times = [time for time in (self._ask_at, ends) if time is not None]
            return max(0.0, min(times) - now) if times else None
        if self._gathers_until and self.slots:
            return max(0.0, self._gathers_until - now)
        return None

    def close_round(self, now: float) -> tuple[list[int], list[int], float]:
        """Close the round: returns the ranks whose parts are in its average, in rank order, those that are late, and
        the seconds that it was open."""
        assert self._opened is not None
        late = sorted(rank for rank, slot in self.slots.items() if slot.state is ReplicaState.WORKING)
        for rank in late:
            self.slots[rank].state = ReplicaState.LATE
            self._give_back(self.slots[rank])
        arrived, seconds = sorted(self._arrived), now - self._opened
        self._opened, self._arrived = None, []
        self.number += 1
        return arrived, late, seconds

    def add_batches(self, batches: int) -> None:
        """Note that ``batches`` more batches are in the average."""
        self.done += batches
