"""The dynamic batcher of a member: the requests that wait for it, and the batches that its process computes.

::

    submit -> queue (bounded) -> batches -> process      two batches at most: one computed, one already there
                                    |  dies
                                    +--> what was in flight is lost; the queue waits for the member's next process

Everything happens in the event loop's thread; nothing here waits. (Named as in Triton Inference Server.)
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from apportion.errors import ApportionError
from apportion.serving.batching import ServiceTimes, batch_size
from apportion.serving.errors import Overloaded
from apportion.serving.pool.frames import Frame, Kind, Lease, Placed, encode
from apportion.serving.pool.worker_handle import WorkerHandle
from apportion.serving.protocol.datatypes import Array
from apportion.serving.runtimes.runtime import Expired


class Lost(ApportionError):
    """The member's process died while it had the request."""


class Refused(ValueError):
    """The model does not take these inputs."""


class Failed(ApportionError):
    """The member could not compute it."""


Outcome = list[Array] | Exception


@dataclass(slots=True, eq=False)
class MemberTask:
    """A request for one member. ``settle`` is called once: with the outputs, or with the reason why there are none."""

    tensors: Sequence[Placed]
    rows: int
    deadline: float
    settle: Callable[[Outcome], None]
    held: Sequence[Lease] = ()
    """The memory in which the tensors lie, if it is shared."""
    over: bool = False
    """Tells that the request has been settled or given up, and its outcome is no longer waited for."""
    alone: bool = False
    """Tells that the request may not be computed together with others."""


@dataclass(slots=True)
class InFlightBatch:
    """A batch that a process computes or is about to."""

    works: list[MemberTask]
    rows: int
    sent: float
    deadline: float


AT_ONCE = 2
"""The number of batches that a process has: while one is computed the next one is there already."""
HUNG = 10.0
"""The factor for hung processes: a process counts as hung when, after its batch's deadline, it has said nothing for
that many times the seconds that the batch should have taken, and for ``LEAST_HUNG`` seconds."""
LEAST_HUNG = 2.0
"""The least seconds after a batch's deadline in which a process has to say nothing before it counts as hung."""


@dataclass(slots=True)
class Counts:
    """The counts of a member's requests since the server was started."""

    batches: int = 0
    rows: int = 0
    late: int = 0
    lost: int = 0


@dataclass(eq=False)
class DynamicBatcher:
    """The queue of one member, named ``name``, and its batches. ``queue_length``: the most requests that wait;
    ``most_rows``: the most rows of requests that are computed together."""

    name: str
    queue_length: int
    most_rows: int
    process: WorkerHandle | None = None
    """The process that computes the batches, while there is one."""
    batched: bool = False
    """Tells whether requests may be computed together: the model's outputs are its inputs' rows."""
    times: ServiceTimes = field(default_factory=ServiceTimes)
    counts: Counts = field(default_factory=Counts)
    queue: deque[MemberTask] = field(default_factory=deque)
    in_flight: dict[int, InFlightBatch] = field(default_factory=dict)
    proven: bool = False
    """Tells whether this process has answered a request, such as the one that the server makes up for it."""
    closed: bool = False
    _number: int = 0
    _heard_at: float = 0.0

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self.queue)

    def process_started(self, process: WorkerHandle, *, batched: bool) -> None:
        """Give the work to this process from now on, which has the model loaded."""
        self.process, self.batched = process, batched
        process.heard = self._receive

    def process_died(self) -> None:
        """Settle what the process had with Lost; what waits is kept for the next process."""
        # Before any caller is settled, since a caller may submit again at once and must not reach the dead process.
        self.process, self.proven = None, False
        # Swapped first: ``_settle`` runs foreign code, which may come back here.
        flights, self.in_flight = self.in_flight, {}
        for flight in flights.values():
            for work in flight.works:
                if not work.over:
                    self.counts.lost += 1
                    self._settle(work, Lost(f"{self.name}'s process died while it had the request"))

    def close(self) -> None:
        """Take no more work, because the server ends, and settle all there is with Lost."""
        self.closed, self.process, self.proven = True, None, False
        works = [*self.queue, *(w for flight in self.in_flight.values() for w in flight.works)]
        self.queue.clear()
        self.in_flight.clear()
        for work in works:
            if not work.over:
                self._settle(work, Lost(f"{self.name} was shut down"))

    def hung(self, now: float) -> bool:
        """Return whether the process has been silent about its batch for so long that it never will answer."""
        flight = next(iter(self.in_flight.values()), None)  # the one that it is at
        if self.process is None or flight is None:
            return False
        # The process works on one batch after the other: the oldest one began when it was sent or when the one before
        # it was answered, whichever was later.
        began = max(flight.sent, self._heard_at)
        patience = max(LEAST_HUNG, HUNG * self.times.pace.expected(flight.rows))
        return now > (began if flight.deadline == float("inf") else max(flight.deadline, began)) + patience

    def drop_expired(self, now: float) -> None:
        """Settle the requests that can no longer be in time, and forget those that were given up."""
        waiting = [work for work in self.queue if not work.over]
        self.queue = deque(work for work in waiting if now < work.deadline)
        for work in waiting:
            if now >= work.deadline and not work.over:
                self._settle(work, Expired())

    def submit(self, work: MemberTask, *, first: bool = False) -> None:
        """Add work to the queue. ``first``: it goes to the front and is always taken. Raises Overloaded where the queue
        is full."""
        if self.closed:
            raise Overloaded(f"{self.name} was shut down", seconds=1.0)
        if self.waiting >= self.queue_length and not first:
            self.drop_expired(asyncio.get_running_loop().time())
        if self.waiting >= self.queue_length and not first:
            raise Overloaded(
                f"{self.name} has {self.waiting} requests waiting, of {self.queue_length} at most",
                seconds=max(0.001, self.waiting * self.times.pace.expected(1)),
            )
        if first:
            self.queue.appendleft(work)
        else:
            self.queue.append(work)
        self._send()

    def _send(self) -> None:
        while self.process is not None and self.queue and len(self.in_flight) < AT_ONCE:
            now = asyncio.get_running_loop().time()
            self.drop_expired(now)
            if not self.queue or len(self.in_flight) >= AT_ONCE:  # a caller that was settled may have submitted
                return
            count = 1
            if self.batched and len(self.queue) > 1:
                count = batch_size(self._batchable(), self._start_time(now), self.times.pace, self.most_rows)
            self._send_batch(self.process, [self.queue.popleft() for _ in range(count)], now)

    def _batchable(self) -> list[tuple[int, float]]:
        """Return (rows, deadline) of the work at the front of the queue that may be computed together with the first,
        and of the first itself."""
        first = self.queue[0]
        shapes = _row_shapes(first)
        same = takewhile(lambda w: w is first or not (w.alone or first.alone or _row_shapes(w) != shapes), self.queue)
        return [(work.rows, work.deadline) for work in same]

    def _start_time(self, now: float) -> float:
        """Return the time at which the process comes to what is sent now."""
        at = self._heard_at
        for flight in self.in_flight.values():
            at = max(at, flight.sent) + self.times.pace.expected(flight.rows)
        return max(now, at)

    def _send_batch(self, process: WorkerHandle, works: list[MemberTask], now: float) -> None:
        self._number += 1
        # The batch may run until the latest of its deadlines; a request whose own one passes before is settled by its
        # timer all the same.
        rows, deadline = sum(w.rows for w in works), max(w.deadline for w in works)
        self.in_flight[self._number] = InFlightBatch(works, rows, now, deadline)
        process.send(encode(Kind.RUN, self._number, deadline, [tensor for work in works for tensor in work.tensors]))

    def _receive(self, frame: Frame) -> None:
        if frame.kind == Kind.CONTROL:
            message = json.loads(frame.text)
            assert message["what"] == "prepared", message
            return
        # Answers come in the order in which batches were sent, but each is found by its number, so that a batch that
        # was settled otherwise cannot be mistaken for it.
        flight = self.in_flight.pop(frame.number)
        now = asyncio.get_running_loop().time()
        # The time between two answers, not since the batch was sent: while the batch before was computed this one
        # waited.
        took, self._heard_at = now - max(flight.sent, self._heard_at), now
        try:
            self._complete(flight, frame, took)
        finally:  # whatever comes of the answers, the process goes on
            self._send()

    def _complete(self, flight: InFlightBatch, frame: Frame, took: float) -> None:
        outputs = [tensor.array for tensor in frame.tensors]
        together = len(flight.works) > 1
        if frame.kind == Kind.DONE and together and any(x.ndim == 0 or len(x) != flight.rows for x in outputs):
            self.batched = False  # its outputs are not the rows' after all
            self._retry_alone(flight.works)
        elif frame.kind in (Kind.REFUSED, Kind.FAILED) and together:
            self._retry_alone(flight.works)  # one of them is to blame
        elif frame.kind == Kind.DONE:
            # Only a computed answer proves the process: EXPIRED says nothing about the model.
            self.proven = True
            self.times.took(flight.rows, took)
            self.counts.batches += 1
            self.counts.rows += flight.rows
            # Copied before any caller is called: the process writes there again as soon as it has another batch.
            outputs = [t.array if t.offset is None else t.array.copy() for t in frame.tensors]
            at = 0
            for work in flight.works:
                own = [x[at : at + work.rows] for x in outputs] if together else outputs
                at += work.rows
                if not work.over:
                    self._settle(work, own)
        else:
            if frame.kind == Kind.EXPIRED and took > self.times.pace.expected(flight.rows):
                self.times.pace.took(flight.rows, took)
            for work in flight.works:
                if not work.over:
                    self._settle(work, _failure(frame.kind, self.name, frame.text.decode()))

    def _retry_alone(self, works: Sequence[MemberTask]) -> None:
        # In reverse, since each goes to the front: they keep their order among each other.
        for work in reversed(works):
            if not work.over:
                work.alone = True
                self.queue.appendleft(work)

    def _settle(self, work: MemberTask, outcome: Outcome) -> None:
        work.over = True
        if isinstance(outcome, Expired):
            self.counts.late += 1
        try:
            work.settle(outcome)
        except Exception as error:  # of one request: the others of its batch get their outcome all the same
            what = {"message": "an answer was not taken", "exception": error}
            asyncio.get_running_loop().call_exception_handler(what)


def _row_shapes(work: MemberTask) -> list[tuple[int, ...]]:
    return [tensor.array.shape[1:] for tensor in work.tensors]


def _failure(kind: Kind, name: str, why: str) -> Exception:
    if kind == Kind.EXPIRED:
        return Expired()
    return Refused(f"{name}: {why}") if kind == Kind.REFUSED else Failed(f"{name}: {why}")
