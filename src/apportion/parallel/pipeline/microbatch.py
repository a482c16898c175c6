"""The passes of micro-batches through one stage: what comes in, what is handed on, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from apportion.comm.group import Group, collective
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.parallel.ops.factored_linear import Products
from apportion.parallel.pipeline.transfer import StageReceiver, StageSender
from apportion.parallel.pipeline.whole_batch import BatchRows, join_microbatches, split_microbatches
from apportion.parallel.replica.replica import Replica

Run = Callable[[Sequence[Any], Batch], Any]
"""A function (what has come in, micro-batch) -> what is handed on; for the last stage the network's outputs."""


@dataclass(frozen=True)
class StageLinks:
    """The connections between a stage and the ones before and after it: values go forward, their gradients back. None:
    the stage has no such neighbour."""

    before: StageReceiver | None
    after: StageSender | None
    gradients_in: StageReceiver | None
    gradients_out: StageSender | None
    lane: Group | None = None
    """The group whose connection carries these messages alone; None where they go through the group of the stages."""

    @classmethod
    @collective
    def connect(cls, group: Group, device: torch.device) -> StageLinks:
        """The links of the stage that a rank is. Called by all ranks of the group."""
        first, last = group.rank == 0, group.rank == group.size - 1
        ahead = group.beside and device.type == "cpu"  # NCCL's next message would stand in the way of all others
        lane = group.lane() if ahead else group
        return cls(
            None if first else StageReceiver(lane, group.rank - 1, device, ahead=ahead),
            None if last else StageSender(lane, group.rank + 1, ahead=ahead),
            None if last else StageReceiver(lane, group.rank + 1, device, ahead=ahead),
            None if first else StageSender(lane, group.rank - 1, ahead=ahead),
            lane if ahead else None,
        )

    def finish(self) -> None:
        """Wait until what was sent needs no further work of this rank."""
        for outlet in (self.after, self.gradients_out):
            if outlet is not None:
                outlet.finish()

    def close(self) -> None:
        """Close the connection that carries these messages alone."""
        if self.lane is not None:
            self.lane.close()


@final
class MicrobatchPasses:
    """The passes of one batch's micro-batches through a stage."""

    def __init__(
        self, run: Run, products: Products, ends: StageLinks, replica: Replica, batch: Batch, parts: Sequence[Batch]
    ) -> None:
        self._run, self._products, self._ends = run, products, ends
        self._replica, self._batch, self._parts = replica, batch, parts
        self._kept: dict[int, tuple[list[_Arrival], Any]] = {}
        self.loss: Tensor | None = None
        self.most = 0

    def forward(self, number: int) -> None:
        ends, part = self._ends, self._parts[number]
        values, arrivals = self._received()
        if number:
            self._replica.decide(self._batch.step)
        with self._replica.autocast():
            found = self._run(values, part)
            kept: Any = self._weighted_loss(found, part) if ends.after is None else None
        if ends.after is not None:
            ends.after.send(found)
            kept = _origins(found)
        self._kept[number] = arrivals, kept
        self.most = max(self.most, len(self._kept))

    def backward(self, number: int) -> None:
        ends = self._ends
        arrivals, kept = self._kept.pop(number)
        if ends.gradients_in is None:
            self._replica.backward(*kept)
        else:
            _go_back(kept, ends.gradients_in.receive())
        # The last reference to the activations of this micro-batch, which are not needed while the gradients leave.
        del kept
        if ends.gradients_out is not None:
            ends.gradients_out.send([arrival.gradient for arrival in arrivals])
        self._products.add_up()  # by now the stage before is at work again

    def at_once(self, before: Sequence[BatchRows], after: Sequence[BatchRows]) -> None:
        """Compute the passes of the whole batch at once, while all that comes and goes does so in micro-batches, as in
        gpipe. ``before``, ``after``: how what comes, and what goes, depends on the rows."""
        ends, count = self._ends, len(self._parts)
        received = [self._received() for _ in range(count)]
        values = join_microbatches([values for values, _ in received], before) if ends.before is not None else []
        arrivals = [arrived for _, arrived in received]
        del received
        with self._replica.autocast():
            found = self._run(values, self._batch)
            kept: Any = self._weighted_loss(found, self._batch) if ends.after is None else []
        del values
        self.most = count
        if ends.after is not None:
            for part in split_microbatches(found, after, [len(part) for part in self._parts]):
                ends.after.send(part)
                kept.append(_origins(part))
        del found
        if ends.gradients_in is None:
            self._replica.backward(*kept)
        else:
            gradients = [ends.gradients_in.receive() for _ in range(count)]
            _go_back([t for part in kept for t in part], [g for part in reversed(gradients) for g in part])
        if ends.gradients_out is not None:
            for arrived in reversed(arrivals):
                ends.gradients_out.send([arrival.gradient for arrival in arrived])
        self._products.add_up()

    def _received(self) -> tuple[list[Any], list[_Arrival]]:
        """The values that come from the stage before, with tensors that require gradients, and the objects in which
        these gradients are to be found."""
        arrivals: list[_Arrival] = []
        received = self._ends.before.receive() if self._ends.before is not None else []
        return [tree.map_tensors(lambda t: _arrived(t, arrivals), value) for value in received], arrivals

    @cached_property
    def _total(self) -> float:
        """The number of loss terms of the batch."""
        return float(self._batch.size) if self._batch.counts_rows else self._batch.count

    def _weighted_loss(self, outputs: Any, part: Batch) -> tuple[Tensor, float]:
        """The mean loss of a micro-batch, and its share of the terms of the batch."""
        count = self._replica.workload.count
        if count is None:
            loss, weight = self._replica.loss(outputs, part.targets), 1.0
        elif terms := part.count:
            loss = self._replica.loss(outputs, part.targets)
            weight = terms / self._total if part is not self._batch else 1.0
        else:  # a mean of nothing is a NaN: zero, through the same layers
            zeros = [(t * 0.0).sum() for t in tree.tensors(outputs) if t.is_floating_point()]
            loss, weight = torch.stack(zeros).sum(), 0.0
        share = loss.detach() * weight
        self.loss = share if self.loss is None else self.loss + share
        return loss, weight


def _origins(values: Any) -> list[Any]:
    """The gradient edges of the tensors of a tree that have gradients: the backward pass goes on there, without what
    was computed."""
    return [get_gradient_edge(t) for t in tree.tensors(values) if t.requires_grad]


def _go_back(origins: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    pairs = [(origin, g) for origin, g in zip(origins, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([origin for origin, _ in pairs], [g for _, g in pairs])


class _Arrival:
    """A tensor from the stage before, and its gradient once there is one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.gradient: Tensor | None = None


class _Arrive(Function):
    """A tensor that has arrived, as the result of a function: unlike a leaf it may be written to in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: _Arrival) -> Tensor:
        ctx.arrival, tensor, arrival.tensor = arrival, arrival.tensor, None
        assert tensor is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.arrival.gradient = gradient
        return None, None


def _arrived(tensor: Tensor, arrivals: list[_Arrival]) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    arrivals.append(_Arrival(tensor.requires_grad_(False)))
    anchor = torch.empty((), device=tensor.device, requires_grad=True)
    arrived: Tensor = _Arrive.apply(anchor, arrivals[-1])
    return arrived
