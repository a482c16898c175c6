"""The interface of the collectives of some ranks and of their messages to each other, whatever carries them."""

from __future__ import annotations

import functools
import inspect
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])

RECORDED: list[str] | None = [] if os.environ.get("APPORTION_RECORD_COLLECTIVES") else None
"""The names of the collective functions that this process has called, in order. None: they are not recorded, since the
environment did not ask for it when this module was imported."""


def collective(function: _Function) -> _Function:
    """Marks a function that all ranks of a group call, in the same order as its other collective functions: a rank that
    leaves one out has the others wait for ever. The function is the same as without the mark, unless calls are
    recorded."""
    record = RECORDED
    if record is not None:
        called = function

        @functools.wraps(called)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            record.append(called.__qualname__)
            return called(*args, **kwargs)

        function = recorded  # type: ignore[assignment]
    function.is_collective = True  # type: ignore[attr-defined]
    return function


def inherit_collectives(kind: type) -> None:
    """Marks the functions of a class that stand for collective ones of its bases."""
    for name, function in list(vars(kind).items()):
        inherited = (getattr(base, name, None) for base in kind.__mro__[1:])
        if inspect.isfunction(function) and any(getattr(found, "is_collective", False) for found in inherited):
            setattr(kind, name, collective(function))


class Work(ABC):
    """A collective or a message under way."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the result is there. PeerLost where a rank is gone or the deadline has passed."""


class WaitClock:
    """A clock of what one process waits for in any of its groups: the groups of a world and of its parts share it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.abandoned = False
        """True once the world was abandoned: nothing is waited for in it any more."""
        self.word: Any = None
        self.moving: dict[int, Callable[[], bool]] = {}
        """The functions that move on what goes on in pieces while this process waits for something else; each says
        whether it goes on. Their keys are the identities of the objects that they belong to."""

    def begin(self) -> None:
        """Mark the process as asleep from here on, for an observer outside."""
        if self.word is not None:
            self.word[0] = 1

    def end(self) -> None:
        if self.word is not None:
            self.word[0] = 0

    def move_on(self, but: Container[int] = ()) -> bool:
        """Do what can be done at once of the messages under way, and return whether there are any left. ``but``: the
        keys of those that the caller moves on itself."""
        left = False
        for key, move in list(self.moving.items()):
            if key in but:
                continue
            if move():
                left = True
            else:
                self.moving.pop(key, None)
        return left


class Group(ABC):
    """Ranks 0..size-1 that call the same collectives in the same order. The order of every reduction is fixed: the
    same inputs give the same bits, on every rank."""

    rank: int
    size: int
    waits: deque[tuple[float, float]]
    """The (began, ended) of every wait in a collective since the list was last cleared, in time.perf_counter() seconds:
    comparable between the ranks of one host. The oldest are dropped."""
    all_waits: WaitClock
    beside: bool = False
    """Does a collective that has begun go on while this rank computes?"""

    @property
    def waited(self) -> float:
        """The seconds that this process was blocked in all, in any group of its world."""
        return self.all_waits.seconds

    @property
    def waiting(self) -> Any:
        """The word of memory that is 1 while this process waits for others, for an observer outside."""
        return self.all_waits.word

    @waiting.setter
    def waiting(self, word: Any) -> None:
        self.all_waits.word = word

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum in place over the ranks; the tensor (contiguous) is theirs until ``wait`` returns."""

    @abstractmethod
    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        """Gather every rank's ``own`` (n) into ``rows`` (size, n), in rank order; it may be a row of them. Blocks."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        """Copy the source's tensor, in place, to every rank. Blocks."""

    @abstractmethod
    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        """Sum over the ranks the rows of every rank's ``rows`` (size, n) that have this rank's number, into (n).
        Blocks."""

    @abstractmethod
    def send(self, tensor: Tensor, to: int) -> Work:
        """Send a message to another rank; the tensor (contiguous) is the group's until ``wait`` returns.

        Messages of a pair arrive in the order in which they were sent. Some MiB are under way without a rank that
        receives them; what is more goes on in ``wait``, and whenever this rank meets or waits for others in any group.
        """

    @abstractmethod
    def receive(self, into: Tensor, source: int) -> Work:
        """Receive the next message of that rank, which has this size: ``into`` (contiguous) is filled when ``wait``
        returns."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until every rank is here."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def keep(self, group: Group) -> None:  # noqa: B027 (most groups have nothing to do for it)
        """Note a group that was made through this one: it is abandoned with it."""

    def abandon(self) -> None:  # noqa: B027 (what only ends with its processes)
        """Have those that wait in this group, in its parts, or in what was made through them stop waiting, with
        PeerLost, also in those that are made from here on. May be called from any thread; only ``close`` comes after
        it. Where processes share memory or connections of our own; other groups go on waiting until their deadline."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather every rank's tensor of this one shape into (size, *shape), in rank order. Blocks."""
        own = tensor.detach().contiguous()
        gathered = own.new_empty((self.size, *own.shape))
        self.gather_into(gathered.view(self.size, own.numel()), own.view(-1))
        return gathered

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """Gather every rank's tensor, in rank order, where dimension 0 may differ (and may be 0). Blocks."""
        counts = self.row_counts(tensor)
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        if not padded.numel():  # nothing to send, and no way to view it as bytes and back
            return [padded[:count] for count in counts]
        # As bytes: no backend knows every type (bool, bfloat16, complex).
        gathered = self.all_gather(padded.view(torch.uint8)).view(tensor.dtype)
        return [part[:count] for part, count in zip(gathered.unbind(0), counts, strict=True)]

    def row_counts(self, tensor: Tensor) -> list[int]:
        """Return the size of dimension 0 of every rank's tensor, in rank order. ValueError, which states every rank's
        shape, where they differ in another dimension or in their type. Blocks."""
        if not tensor.dim():
            raise ValueError("a tensor without dimensions has no rows that the ranks could gather: give it a dimension")
        kind = f"{tuple(tensor.shape[1:])} {tensor.dtype}".encode()
        header = torch.tensor([tensor.shape[0], zlib.crc32(kind)], dtype=torch.int64, device=tensor.device)
        found = self.all_gather(header).tolist()
        if len({mark for _, mark in found}) > 1:
            own = torch.frombuffer(
                bytearray(f"{tuple(tensor.shape)} {tensor.dtype}".encode().ljust(128)[:128]), dtype=torch.uint8
            )
            shapes = [bytes(row).decode().strip() for row in self.all_gather(own.to(tensor.device)).tolist()]
            raise ValueError(unlike_rows(shapes))
        return [rows for rows, _ in found]

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks as a new tensor. Blocks."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.all_reduce(total).wait()
        return total

    def gather_parts(self, own: Tensor, parts: Sequence[Tensor]) -> None:
        """Gather every rank's ``own`` into its number of ``parts``, of which each may have a size of its own (or none);
        all are contiguous. Blocks."""
        most = max(part.numel() for part in parts)
        if not most:
            return
        padded = own.new_zeros(most)
        padded[: own.numel()] = own.detach().view(-1)
        gathered = self.all_gather(padded.view(torch.uint8)).view(own.dtype)
        for part, row in zip(parts, gathered, strict=True):
            part.view(-1).copy_(row[: part.numel()])

    @collective
    def lane(self) -> Group:
        """Return another group of the same ranks, whose collectives and this one's may begin in any order. Called by
        all of them; for the groups that are ``beside``."""
        raise ValueError(f"{type(self).__name__} does nothing while a rank computes: it needs no second lane")

    def _other(self, rank: int) -> int:
        if rank == self.rank or not 0 <= rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} sends to and receives from other ranks, not rank {rank}")
        return rank


def unlike_rows(shapes: Sequence[str]) -> str:
    """The message for ranks whose rows cannot be gathered; ``shapes``: those of the ranks, in their order."""
    each = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
    return (
        f"the ranks' rows have different shapes or types: {each}; rows are gathered where all dimensions but the first "
        "agree: where collate pads to the longest of its rows, have it pad to one length"
    )


class _Done(Work):
    def wait(self) -> None:
        pass


@final
class Alone(Group):
    """A group of one: every collective is the identity."""

    def __init__(self) -> None:
        self.rank, self.size, self.waits, self.all_waits = 0, 1, deque(), WaitClock()

    def all_reduce(self, tensor: Tensor) -> Work:
        return DONE

    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        rows[0].copy_(own)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        pass

    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        into.copy_(rows[0])

    def gather_parts(self, own: Tensor, parts: Sequence[Tensor]) -> None:
        parts[0].copy_(own)

    def send(self, tensor: Tensor, to: int) -> Work:
        raise ValueError("a group of one has no other rank to send to")

    def receive(self, into: Tensor, source: int) -> Work:
        raise ValueError("a group of one has no other rank to receive from")

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


DONE = _Done()
"""A collective that has ended."""


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, of whatever strides: torch counts one as contiguous whose dimensions of one
    place have any stride, and does not view it as bytes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# Functions that send plain JSON and whole states from one rank to all.


def broadcast_message(message: Any, group: Group, *, source: int = 0, device: torch.device | None = None) -> Any:
    """Send the source's message (plain JSON) to every rank."""
    data = json.dumps(message).encode() if group.rank == source else b""
    # The length comes first, in a message of its own: a receiver has to give a buffer of the right size.
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    group.broadcast(length, source=source)
    buffer = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if group.rank == source:
        buffer.copy_(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))
    group.broadcast(buffer, source=source)
    return json.loads(buffer.cpu().numpy().tobytes())


def gather_messages(message: Any, group: Group, *, device: torch.device | None = None) -> list[Any]:
    """Gather every rank's message (plain JSON), in rank order."""
    data = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8).copy()
    rows = group.all_gather_rows(torch.from_numpy(data).to(device or "cpu"))
    return [json.loads(row.cpu().numpy().tobytes()) for row in rows]


def broadcast_tensors(
    tensors: dict[str, Tensor] | None, group: Group, *, source: int = 0, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Send the source's tensors by name to every rank (on the CPU)."""
    described = None
    if tensors is not None:
        described = [[k, str(t.dtype).removeprefix("torch."), list(t.shape)] for k, t in tensors.items()]
    received = {}
    for name, dtype, shape in broadcast_message(described, group, source=source, device=device):
        if tensors is not None:
            tensor = tensors[name].to(device=device or "cpu").resolve_conj().resolve_neg().contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        # All ranks know the shapes by now, so that they skip an empty tensor alike.
        if tensor.numel():
            group.broadcast(bytes_of(tensor), source=source)
        received[name] = tensor.cpu()
    return received
