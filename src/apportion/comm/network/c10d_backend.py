"""A process group of torch.distributed whose collectives are those of one of our groups.

What is built on torch.distributed (FSDP2, DTensor, the distributed checkpoint) runs over it unchanged: through the
memory of a host, or over connections that have proved themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from apportion.comm.group import Group

NAME = "apportion"
"""The name of the backend, as ``dist.get_backend()`` tells it."""
_Op: Any = dist.ReduceOp
_REDUCTIONS: Sequence[tuple[Any, Callable[[Tensor], Tensor]]] = (
    (_Op.MAX, lambda rows: rows.amax(0)),
    (_Op.MIN, lambda rows: rows.amin(0)),
    (_Op.PRODUCT, lambda rows: rows.prod(0)),
)
_given: Group | None = None


def is_ours() -> bool:
    """Tells whether the process group of this process is one that ``init_process_group`` here has made."""
    return dist.get_backend() == NAME


def given() -> Group | None:
    """Returns the group whose collectives those of this process's process group are; None where there is none."""
    return _given


def init_process_group(group: Group) -> None:
    """Makes the process group of this process, whose collectives are this group's, or gives the one that was made
    before this group."""
    global _given
    _given = group
    if dist.is_initialized():
        made: Any = dist.group.WORLD
        made.group = group
        return
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=group.rank, world_size=group.size)  # type: ignore[attr-defined]


def _make(store: Any, rank: int, size: int, timeout: Any) -> GroupBackend:
    if _given is None or (_given.rank, _given.size) != (rank, size):
        raise ValueError(
            f"a process group of {size} ranks is not made over apportion's groups, which torch.distributed has of all "
            "ranks alone: use world.split() for parts of them"
        )
    return GroupBackend(_given)


_ProcessGroup: Any = dist.ProcessGroup
"""The base class as ``Any``: its type declarations are of functions with several signatures each."""


@final
class GroupBackend(_ProcessGroup):  # type: ignore[misc]
    """Our group, as torch.distributed calls it. Every collective has ended when its call returns."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._name = ""

    @property
    def group_name(self) -> str:
        """The name by which torch.distributed knows the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:  # torch keeps it with backends of C++ alone
        self._name = name

    def size(self) -> int:
        return self.group.size

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        op = _Op.SUM if opts is None else opts.reduceOp
        for tensor in tensors:
            reduce = next((reduction for kind, reduction in _REDUCTIONS if op == kind), None)
            if reduce is not None:
                tensor.detach().copy_(reduce(self.group.all_gather(tensor.detach())))
            else:
                tensor.detach().copy_(self._mean(self.group.total(tensor), op))
        return _EndedWork(tensors)

    allreduce_coalesced = allreduce

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for rows, own in zip(outputs, inputs, strict=True):
            for row, got in zip(rows, self.group.all_gather(own.detach()), strict=True):
                row.detach().copy_(got)
        return _EndedWork(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        rows = self.group.all_gather(own.detach())
        output.detach().view(rows.shape).copy_(rows)
        return _EndedWork(output)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _EndedWork(outputs)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        for output, rows in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, torch.stack([row.detach() for row in rows]), opts)
        return _EndedWork(outputs)

    def reduce_scatter_single(self, output: Tensor, rows: Tensor, opts: Any = None) -> Any:
        op = _Op.SUM if opts is None else opts.reduceOp
        into = torch.empty(output.numel(), dtype=output.dtype)
        self.group.reduce_scatter(rows.detach().reshape(self.group.size, -1), into)
        output.detach().copy_(self._mean(into, op).view(output.shape))
        return _EndedWork(output)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, rows in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, rows, opts)
        return _EndedWork(outputs)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            self.group.broadcast(sent, source=0 if opts is None else opts.rootRank)
            tensor.detach().copy_(sent)
        return _EndedWork(tensors)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Any:
        for number, output in enumerate(outputs):
            rows = inputs[number] if self.group.rank == opts.rootRank else []
            self._pass(rows, [output] if not rows else [], opts.rootRank)
            if rows:
                output.detach().copy_(rows[self.group.rank])
        return _EndedWork(outputs)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Any:
        for number, own in enumerate(inputs):
            rows = self.group.all_gather(own.detach())
            if self.group.rank == opts.rootRank:
                for row, got in zip(outputs[number], rows, strict=True):
                    row.detach().copy_(got)
        return _EndedWork(outputs)

    def _pass(self, rows: Sequence[Tensor], outputs: Sequence[Tensor], source: int) -> None:
        """Sends its row to each other rank, or receives this rank's from the source."""
        works = [self.group.send(row.detach().contiguous(), to) for to, row in enumerate(rows) if to != self.group.rank]
        for output in outputs:
            got = torch.empty_like(output, memory_format=torch.contiguous_format)
            self.group.receive(got, source).wait()
            output.detach().copy_(got)
        for work in works:
            work.wait()

    def barrier(self, opts: Any = None) -> Any:
        self.group.barrier()
        return _EndedWork([])

    def _mean(self, total: Tensor, op: Any) -> Tensor:
        """Returns the sum, or the mean where that is asked for."""
        if op == _Op.AVG:
            return total.div_(self.group.size)
        if op == _Op.SUM:
            return total
        raise ValueError(f"{op} of torch.distributed is not supported by apportion's groups: use SUM or AVG")

    # The names that torch had for these before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


@final
class _EndedWork(dist.Work):
    """A collective that has ended."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future
