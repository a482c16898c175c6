"""The collectives of the processes of one host, in memory that all of them map.

::

    rank 0   tensor -> slot 0 \\                  / slot 0 + slot 1 -> tensor
                               arrive, wait for all
    rank 1   tensor -> slot 1 /                  \\ slot 0 + slot 1 -> tensor

A tensor goes through in pieces that stay in a core's cache. Each rank writes its piece once and reads the others'
where they lie; sums are taken in rank order, so they have the same bits on every rank and in every run. The slots are
doubled, so that one meeting a piece is enough: a rank that writes a slot again has met everyone after they had read it.

gloo sends the same through TCP, also on one host.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from apportion.comm import p2p
from apportion.comm.barrier import DEADLINE_SECONDS, Barrier
from apportion.comm.group import DONE, Group, WaitClock, Work
from apportion.comm.p2p import Receiver, Sender
from apportion.comm.sync import CACHE_LINE

PIECE = 512 << 10
"""The bytes of a rank's slot: with the others' it fits a core's second-level cache."""
_CACHED_VIEWS = 1024


def nbytes(ranks: int) -> int:
    """The bytes of the memory of a group, for its collectives."""
    return ranks * CACHE_LINE + 2 * ranks * PIECE


_HEAD = 16
"""The bytes of a rank's line before what it calls; the barrier has those."""
_MOST_TEXT = 512
_SUM, _GATHER, _REDUCE_SCATTER, _BROADCAST, _GATHER_PARTS = range(5)
_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather_parts")
Call = tuple[Any, ...]
"""A collective by its number, the number of a type, and shapes: equal calls have equal hashes in every process."""
_TYPES = {
    dtype: number
    for number, dtype in enumerate(sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str))
}

Links = Callable[[int, int], memoryview]
"""A function that gives the memory of the messages of one rank to another."""


def links_in(memory: memoryview, ranks: int) -> Links:
    """Divide one memory among all pairs: ``ranks * ranks * link.nbytes``, of which only those that are used are
    touched."""

    def part(source: int, to: int) -> memoryview:
        start = (source * ranks + to) * p2p.nbytes
        return memory[start : start + p2p.nbytes]

    return part


def _starts(many: int, each: int) -> Sequence[int]:
    """The places at which the pieces of a tensor begin. An empty one has a piece too: a rank that has nothing to send
    meets the others as well, so that one that has something is distinguished from it."""
    return range(0, many, each) if many > each else (0,)


def _call(collective: int, dtype: torch.dtype, *shapes: torch.Size) -> Call:
    return (collective, _TYPES[dtype], *shapes)


@final
class SharedMemoryGroup(Group):
    """The collectives over ``memory``, which has ``nbytes(size)`` or more and belongs to this group alone."""

    flat: Group | None = None
    """The group of the same ranks that this one was set up through, where that is closed with it."""

    def __init__(  # noqa: PLR0913 (what a meeting is of)
        self,
        memory: memoryview,
        rank: int,
        size: int,
        *,
        generation: int = 0,
        check: Callable[[], None] | None = None,
        spins: bool = True,
        deadline: float = DEADLINE_SECONDS,
        all_waits: WaitClock | None = None,
        links: Links | None = None,
    ) -> None:
        self.rank, self.size, self._generation, self._links = rank, size, generation, links
        self.all_waits = WaitClock() if all_waits is None else all_waits
        self.meeting = Barrier(
            memory, rank, size,
            generation=generation, check=check, spins=spins, deadline=deadline, all_waits=self.all_waits,
        )  # fmt: skip
        # The lines have a place of their own in every generation, also of a smaller group: no slot was ever there.
        lines = memory.nbytes // nbytes(1) * CACHE_LINE
        self._heads = [
            [ctypes.c_int64.from_buffer(memory, at * CACHE_LINE + _HEAD + 8 * turn) for at in range(size)]
            for turn in range(2)
        ]
        """What each rank calls, by turn: a number for the collective, the type and the shapes."""
        slots = torch.frombuffer(memory, dtype=torch.uint8, count=2 * size * PIECE, offset=lines)
        self._slots = slots.view(2, size, PIECE)
        self._turn = 0
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}

    @property
    def waits(self) -> deque[tuple[float, float]]:  # type: ignore[override]
        return self.meeting.waits

    def all_reduce(self, tensor: Tensor) -> Work:
        flat = tensor.detach().view(-1)
        self._sum(flat, flat, tensor.shape)
        return DONE

    def total(self, tensor: Tensor) -> Tensor:
        total = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._sum(tensor.detach().reshape(-1), total.view(-1), tensor.shape)
        return total

    def mean(self, tensor: Tensor) -> None:
        """Take the mean over the ranks instead of the sum of ``all_reduce``, at the same price. Blocks."""
        flat = tensor.detach().view(-1)
        self._sum(flat, flat, tensor.shape, 1.0 / self.size)

    def _sum(self, flat: Tensor, into: Tensor, shape: torch.Size, weight: float | None = None) -> None:
        call = _call(_SUM, flat.dtype, shape)
        n = PIECE // flat.element_size()
        for start in _starts(flat.numel(), n):
            whole = flat.numel() <= n
            piece, sums = (flat, into) if whole else (flat[start : start + n], into[start : start + n])
            slots = self._put(piece, call, weight)
            if self.size == 1:
                sums.copy_(slots[0])
                continue
            # Floating-point addition is not associative: every rank adds from rank 0 on, its own slot in its turn, so
            # that all of them round alike and end with the same bits.
            torch.add(slots[0], slots[1], out=sums)
            for slot in slots[2:]:
                sums.add_(slot)

    def _put(self, piece: Tensor, call: Call, weight: float | None = None) -> list[Tensor]:
        """Every rank's piece, weighted, in rank order, once all have written theirs."""
        slots = self._of(piece.dtype, piece.numel())
        if weight is None:
            slots[self.rank].view(piece.shape).copy_(piece)
        else:
            torch.mul(piece, weight, out=slots[self.rank])
        self._meet(call)
        return slots

    def _meet(self, call: Call) -> None:
        """Meet the other ranks, and make sure that they call the same. The number of a call lies on the line that its
        rank arrives with, so that looking at it costs no way to memory of its own."""
        heads, number = self._heads[self._turn], hash(call)
        # Before the meeting and never during it: the words of a turn are written again only after the next meeting, at
        # which every rank has compared them.
        heads[self.rank].value = number
        self.meeting()
        for head in heads:
            if head.value != number:
                self._refuse(call)

    def _refuse(self, call: Call) -> NoReturn:
        """Raise ValueError with what every rank calls. All ranks come here, since each has seen another number."""
        dtype = next(str(dtype) for dtype, number in _TYPES.items() if number == call[1])
        shapes = " and ".join(str(tuple(shape)) for shape in call[2:])
        text = f"{_NAMES[call[0]]} of {shapes} {dtype}".encode()[:_MOST_TEXT].ljust(_MOST_TEXT)
        slots = self._of(torch.uint8, _MOST_TEXT)
        slots[self.rank].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.meeting()
        called = [bytes(slot.tolist()).decode("utf-8", "replace").strip() for slot in slots]
        each = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(called))
        raise ValueError(
            f"the ranks of a group do not call the same: {each}; each rank must call the same collectives in the same "
            "order, with tensors of one shape and type"
        )

    def _of(self, dtype: torch.dtype, n: int) -> list[Tensor]:
        """The slots of this turn, as this many numbers of this type."""
        # Two sets of slots in turn: a rank that is ahead writes the other set while late ones still read this one. It
        # can write this set again only after the next meeting, to which those have come.
        self._turn ^= 1
        key = (self._turn, dtype, n)
        if key not in self._views:
            if len(self._views) >= _CACHED_VIEWS:  # rows in numbers that always differ
                self._views.clear()
            self._views[key] = [slot.view(dtype)[:n] for slot in self._slots[self._turn]]
        return self._views[key]

    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        self._gather(rows, own, own.shape)

    def all_gather(self, tensor: Tensor) -> Tensor:
        own = tensor.detach().contiguous()
        gathered = own.new_empty((self.size, *own.shape))
        self._gather(gathered.view(self.size, own.numel()), own.view(-1), own.shape)
        return gathered

    def _gather(self, rows: Tensor, own: Tensor, shape: torch.Size) -> None:
        n, call = PIECE // own.element_size(), _call(_GATHER, own.dtype, shape)
        for start in _starts(own.numel(), n):
            piece = own[start : start + n]
            for row, slot in zip(rows, self._put(piece, call), strict=True):
                row[start : start + n].copy_(slot)

    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        """Sum the rows of every rank's ``rows`` (size, n) that have this rank's number, into (n). Blocks."""
        n, call = PIECE // (rows.element_size() * self.size), _call(_REDUCE_SCATTER, rows.dtype, rows.shape)
        for start in _starts(into.numel(), n):
            sums = into[start : start + n]
            slots = [slot.view(self.size, -1)[self.rank] for slot in self._put(rows[:, start : start + n], call)]
            sums.copy_(slots[0])
            for slot in slots[1:]:
                sums.add_(slot)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        flat = tensor.detach().view(-1)
        n, call = PIECE // flat.element_size(), _call(_BROADCAST, flat.dtype, tensor.shape)
        for start in _starts(flat.numel(), n):
            piece = flat[start : start + n]
            slots = self._of(piece.dtype, piece.numel())
            if self.rank == source:
                slots[source].copy_(piece)
            self._meet(call)
            if self.rank != source:
                piece.copy_(slots[source])

    def gather_parts(self, own: Tensor, parts: Sequence[Tensor]) -> None:
        flat, flats = own.detach().view(-1), [part.view(-1) for part in parts]
        n, call = PIECE // flat.element_size(), _call(_GATHER_PARTS, flat.dtype, *(part.shape for part in parts))
        # As many pieces as the longest part has, on every rank: a rank whose part is shorter still comes to each
        # meeting.
        for start in _starts(max(part.numel() for part in flats), n):
            slots = self._of(flat.dtype, n)
            piece = flat[start : start + n]
            slots[self.rank][: piece.numel()].copy_(piece)
            self._meet(call)
            for part, slot in zip(flats, slots, strict=True):
                piece = part[start : start + n]
                if piece.numel():
                    piece.copy_(slot[: piece.numel()])

    def send(self, tensor: Tensor, to: int) -> Work:
        if to not in self._senders:
            wait = partial(self.meeting.until, self._other(to))
            self._senders[to] = Sender(self._link(self.rank, to), self._generation, self.all_waits, wait)
        return self._senders[to].send(tensor)

    def receive(self, into: Tensor, source: int) -> Work:
        if source not in self._receivers:
            wait = partial(self.meeting.until, self._other(source))
            self._receivers[source] = Receiver(self._link(source, self.rank), self._generation, self.all_waits, wait)
        return self._receivers[source].receive(into)

    def _link(self, source: int, to: int) -> memoryview:
        assert self._links is not None, "this group was made without memory for messages"
        return self._links(source, to)

    def barrier(self) -> None:
        self.meeting()

    def abandon(self) -> None:
        self.meeting.interrupt()

    def close(self) -> None:
        for end in (*self._senders.values(), *self._receivers.values()):
            self.all_waits.moving.pop(id(end), None)
        self._senders.clear()
        self._receivers.clear()
        self._views.clear()
        if self.flat is not None:
            self.flat.close()
