"""A member as the server sees it: its queue, what it computes now, and the process that it has at the moment.

::

    work -> queue (bounded) -> batches -> process        two batches at most: one computed, one already there
                                |  dies
              spare --becomes---+  the member, with its net loaded; the queue stays, what was in flight is lost

Everything happens in the event loop's thread; nothing here waits.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from apportion.serving.batching import Pace, together
from apportion.serving.errors import Overloaded
from apportion.serving.pool.circuit_breaker import Breaker
from apportion.serving.pool.frames import Frame, Kind, Placed, encode
from apportion.serving.pool.task import Failed, InFlightBatch, Lost, MemberTask, Outcome, Refused
from apportion.serving.pool.worker_handle import WorkerHandle
from apportion.serving.runtimes.runtime import Expired, Spec
from apportion.serving.runtimes.source import Source

AT_ONCE = 2
"""The number of batches that a process has: while one is computed the next one is there already."""
HUNG = 10.0
"""The factor for hung processes: a process counts as hung when, after its batch's deadline, it has said nothing for so
many times as long as the batch should have taken, and for ``LEAST_HUNG`` seconds."""
LEAST_HUNG = 2.0
"""The least seconds after a batch's deadline in which a process has to say nothing before it counts as hung."""
LEAST_USUAL = 1e-3
"""The least seconds that a batch is taken to need: shorter times depend on whatever else the machine does."""
STRAIN_WEIGHT = 0.3
"""The weight of the newest batch in ``Member.strain``: one that had to wait for a core says little."""


@dataclass(slots=True)
class Counts:
    """The counts of a member since the server was started."""

    batches: int = 0
    rows: int = 0
    late: int = 0
    lost: int = 0
    restarts: int = 0


@dataclass(eq=False)
class Member:
    """A member of the ensemble. ``wanted``: called when its process has ended; the member pool, which gives out
    processes, answers with ``seated``."""

    source: Source
    queue_length: int
    most_rows: int
    breaker: Breaker
    wanted: Callable[[Member, WorkerHandle], None]
    state: Literal["starting", "up", "down"] = "starting"
    child: WorkerHandle | None = None
    pace: Pace = field(default_factory=Pace)
    usual: Pace = field(default_factory=Pace)
    """The seconds that batches took when the member was timed by itself as the server was started."""
    strain: float = 1.0
    """The factor by which the latest batches took longer than usual."""
    inputs: tuple[Spec, ...] = ()
    outputs: tuple[Spec, ...] = ()
    runtime: str = ""
    batched: bool = False
    counts: Counts = field(default_factory=Counts)
    queue: deque[MemberTask] = field(default_factory=deque)
    flights: dict[int, InFlightBatch] = field(default_factory=dict)
    refusal: str | None = None
    """The reason why the model could not be loaded."""
    proven: bool = False
    """Tells whether this process has answered a request, such as the one that the server makes up for it."""
    closed: bool = False
    missed_at: float = float("-inf")
    """The time at which the member last counted as late."""
    _number: int = 0
    _heard_at: float = 0.0

    @property
    def name(self) -> str:
        """The name of the member."""
        return self.source.name

    @property
    def unhurt(self) -> bool:
        """Return whether the member has a process and is waited for."""
        return self.state == "up" and self.breaker.open_since is None

    @property
    def waiting(self) -> int:
        """The number of requests in the member's queue."""
        return len(self.queue)

    # Its process

    def seated(self, child: WorkerHandle, told: dict[str, Any]) -> None:
        """Take a process that has become this member; ``told``: what it said of the model."""
        self.child, self.state = child, "up"
        child.heard, child.gone = self._heard, self._gone
        self.inputs, self.outputs = (tuple(map(Spec.from_json, told[what])) for what in ("inputs", "outputs"))
        self.runtime, self.batched = told["runtime"], told["batched"]
        for rows, seconds in told.get("seconds", []):
            self.pace.seconds[rows] = self.usual.seconds[rows] = seconds
        self.strain = 1.0
        self._prove()

    def _prove(self) -> None:
        """Send a first request to the process to see that it answers: the sample, or zeros."""
        rows = self.source.rows() or [spec.filled(1) for spec in self.inputs]
        tensors = [Placed(spec.datatype, row) for spec, row in zip(self.inputs, rows, strict=True)]

        def proven(outcome: Outcome) -> None:
            self.proven = isinstance(outcome, list)

        self.submit(MemberTask(tensors, 1, float("inf"), proven, alone=True), first=True)

    def unseat(self) -> None:
        """Close the member for good, because the server ends."""
        self.closed = True
        child, self.child, self.state, self.proven = self.child, None, "down", False
        if child is not None:
            child.close()
        self._settle_all(Lost(f"{self.name} was shut down"))

    def check(self, now: float) -> None:
        """Kill a process that no longer says anything, and drop work that has expired. Called now and then."""
        if self.child is None:
            self._drop_expired(now)
            return
        flight = next(iter(self.flights.values()), None)  # the one that it is at
        if flight is not None:
            began = max(flight.sent, self._heard_at)
            patience = max(LEAST_HUNG, HUNG * self.pace.expected(flight.rows))
            if now > (began if flight.deadline == float("inf") else max(flight.deadline, began)) + patience:
                self.child.kill()
                return
        self._drop_expired(now)

    def _gone(self) -> None:
        child, self.child, self.state, self.proven = self.child, None, "down", False
        assert child is not None
        self.counts.restarts += 1
        flights, self.flights = self.flights, {}
        self.wanted(self, child)
        for flight in flights.values():
            for work in flight.works:
                if not work.over:
                    self.counts.lost += 1
                    self._settle(work, Lost(f"{self.name}'s process died while it had the request"))

    # Work

    def submit(self, work: MemberTask, *, first: bool = False) -> None:
        """Add work to the queue. ``first``: it goes to the front and is always taken. Raises Overloaded where the queue
        is full."""
        if self.closed:
            raise Overloaded(f"{self.name} was shut down", seconds=1.0)
        if self.waiting >= self.queue_length and not first:
            self._drop_expired(asyncio.get_running_loop().time())
        if self.waiting >= self.queue_length and not first:
            raise Overloaded(
                f"{self.name} has {self.waiting} requests waiting, of {self.queue_length} at most",
                seconds=max(0.001, self.waiting * self.pace.expected(1)),
            )
        if first:
            self.queue.appendleft(work)
        else:
            self.queue.append(work)
        self._send()

    def _send(self) -> None:
        while self.child is not None and self.queue and len(self.flights) < AT_ONCE:
            now = asyncio.get_running_loop().time()
            self._drop_expired(now)
            if not self.queue or len(self.flights) >= AT_ONCE:  # whoever was told may have asked again
                return
            many = 1
            if self.batched and len(self.queue) > 1:
                many = together(self._alike(), self._begins(now), self.pace, self.most_rows)
            self._fly(self.child, [self.queue.popleft() for _ in range(many)], now)

    def _alike(self) -> list[tuple[int, float]]:
        """Return (rows, deadline) of the work at the front of the queue that may be computed together with the first,
        and of the first itself."""
        first = self.queue[0]
        shapes = _row_shapes(first)
        same = takewhile(lambda w: w is first or not (w.alone or first.alone or _row_shapes(w) != shapes), self.queue)
        return [(work.rows, work.deadline) for work in same]

    def _begins(self, now: float) -> float:
        """Return the time at which the process comes to what is sent now."""
        at = self._heard_at
        for flight in self.flights.values():
            at = max(at, flight.sent) + self.pace.expected(flight.rows)
        return max(now, at)

    def _fly(self, child: WorkerHandle, works: list[MemberTask], now: float) -> None:
        self._number += 1
        rows, deadline = sum(w.rows for w in works), max(w.deadline for w in works)
        self.flights[self._number] = InFlightBatch(works, rows, now, deadline)
        child.send(encode(Kind.RUN, self._number, deadline, [tensor for work in works for tensor in work.tensors]))

    def _heard(self, frame: Frame) -> None:
        if frame.kind == Kind.TOLD:
            told = json.loads(frame.text)
            assert told["what"] == "prepared", told
            return
        flight = self.flights.pop(frame.number)
        now = asyncio.get_running_loop().time()
        took, self._heard_at = now - max(flight.sent, self._heard_at), now
        try:
            self._landed(flight, frame, took)
        finally:  # whatever comes of the answers, the process goes on
            self._send()

    def _landed(self, flight: InFlightBatch, frame: Frame, took: float) -> None:
        outputs = [tensor.array for tensor in frame.tensors]
        together = len(flight.works) > 1
        if frame.kind == Kind.DONE and together and any(x.ndim == 0 or len(x) != flight.rows for x in outputs):
            self.batched = False  # its outputs are not the rows' after all
            self._again_alone(flight.works)
        elif frame.kind in (Kind.REFUSED, Kind.FAILED) and together:
            self._again_alone(flight.works)  # one of them is to blame
        elif frame.kind == Kind.DONE:
            self.proven = True
            self.pace.took(flight.rows, took)
            strain = took / max(self.usual.expected(flight.rows), LEAST_USUAL)
            self.strain += STRAIN_WEIGHT * (strain - self.strain)
            self.counts.batches += 1
            self.counts.rows += flight.rows
            # Before anybody is told: where they lie is written again as soon as the process has another batch.
            outputs = [t.array if t.offset is None else t.array.copy() for t in frame.tensors]
            at = 0
            for work in flight.works:
                own = [x[at : at + work.rows] for x in outputs] if together else outputs
                at += work.rows
                if not work.over:
                    self._settle(work, own)
        else:
            if frame.kind == Kind.EXPIRED and took > self.pace.expected(flight.rows):
                self.pace.took(flight.rows, took)
            for work in flight.works:
                if not work.over:
                    self._settle(work, _failure(frame.kind, self.name, frame.text.decode()))

    def _again_alone(self, works: Sequence[MemberTask]) -> None:
        for work in reversed(works):
            if not work.over:
                work.alone = True
                self.queue.appendleft(work)

    def _drop_expired(self, now: float) -> None:
        waiting = [work for work in self.queue if not work.over]
        self.queue = deque(work for work in waiting if now < work.deadline)
        for work in waiting:
            if now >= work.deadline and not work.over:
                self._settle(work, Expired())

    def _settle(self, work: MemberTask, outcome: Outcome) -> None:
        work.over = True
        if isinstance(outcome, Expired):
            self.counts.late += 1
        try:
            work.settle(outcome)
        except Exception as error:  # one request's: the others of its batch are to be told as well
            what = {"message": "an answer was not taken", "exception": error}
            asyncio.get_running_loop().call_exception_handler(what)

    def _settle_all(self, why: Exception) -> None:
        works = [*self.queue, *(w for flight in self.flights.values() for w in flight.works)]
        self.queue.clear()
        self.flights.clear()
        for work in works:
            if not work.over:
                self._settle(work, why)


def _row_shapes(work: MemberTask) -> list[tuple[int, ...]]:
    return [tensor.array.shape[1:] for tensor in work.tensors]


def _failure(kind: Kind, name: str, why: str) -> Exception:
    if kind == Kind.EXPIRED:
        return Expired()
    return Refused(f"{name}: {why}") if kind == Kind.REFUSED else Failed(f"{name}: {why}")
