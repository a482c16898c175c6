"""A network whose first layers each rank computes for a share of the examples, and whose last ones it has slices of.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: what crosses is exchanged between
the two, all of it at once, or one rank's share after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion import tree
from apportion.batch import Batch
from apportion.comm.differentiable import gather_from
from apportion.comm.group import Group
from apportion.deal import DataShard
from apportion.network import evaluating
from apportion.parallel import batch_functions
from apportion.parallel.batch_norm import Attendance, use_whole_batch
from apportion.parallel.memory_format import channels_last
from apportion.parallel.pieces import Piece
from apportion.parallel.replica import Replica
from apportion.parallel.rotation import rotation
from apportion.parallel.sliced import Plan, SlicedModel
from apportion.parallel.sliced_linear import OwnDraws
from apportion.parallel.two_parts import Parts
from apportion.workload import Workload, examples


@final
class Exchanging(SlicedModel):
    """The front on this rank's rows, the back on all of them."""

    def __init__(  # noqa: PLR0913 (what it is made of)
        self,
        model: nn.Module,
        plan: Plan,
        group: Group,
        workload: Workload,
        *,
        trains: Parts,
        evaluates: Parts,
        rotates: bool,
        channels_last: bool,
    ) -> None:
        super().__init__(model, plan, group, workload)
        self._trains, self._evaluates, self._rotates = trains, evaluates, rotates
        self._channels_last = channels_last
        self._count = workload.count
        self._attendance = Attendance(group)
        for name in trains.front_calls | evaluates.front_calls:
            use_whole_batch(model.get_submodule(name), self._attendance)
        terms = trains.front_uses
        for name, p in model.named_parameters(remove_duplicate=False):
            if p in terms:
                self.pieces = {**self.pieces, name: Piece(tuple(p.shape), partial=True)}
        self._draws = OwnDraws(group.rank, 1 << 20)

    def use_whole_functions(self, names: Sequence[str]) -> None:
        """These modules of the front take their batch statistics over all ranks."""
        for parts in (self._trains, self._evaluates):
            known = dict(parts.front.named_modules())
            batch_functions.use_whole_functions(parts.front, [n for n in names if n in known], self._attendance)

    def backward(self, replica: Replica, batch: Batch) -> Tensor:
        with self._draws(replica.device), replica.autocast():
            values, shares = self._front(self._trains, batch)
        if self._rotates:
            return self._rotate(replica, batch, values, shares)
        with replica.autocast():
            whole = self._gathered(values, shares)
            loss = self.loss(replica, lambda: self._trains.back(*whole), batch.targets)
        replica.backward(loss, 1.0)
        return loss.detach()

    def _front(self, parts: Parts, batch: Batch) -> tuple[list[Tensor], list[slice]]:
        """What crosses, of this rank's rows; every rank's rows. A rank without any computes the first, for nothing."""
        size = self._group.size
        shares = [DataShard(rank, size).rows(len(batch)) for rank in range(size)]
        own = shares[self._group.rank]
        self._attendance.present = own.stop > own.start
        rows = own if self._attendance.present else slice(0, 1)
        inputs = tree.rows(batch.inputs, rows)
        values = tree.call(parts.front, channels_last(inputs) if self._channels_last else inputs)
        return [value[: own.stop - own.start] for value in values], shares

    def _gathered(self, values: Sequence[Tensor], shares: Sequence[slice]) -> list[Tensor]:
        sizes = [share.stop - share.start for share in shares]
        return [gather_from(value, self._group, 0, sizes) for value in values]

    def _rotate(self, replica: Replica, batch: Batch, values: Sequence[Tensor], shares: Sequence[slice]) -> Tensor:
        """Loss and gradient of one rank's rows after the other; then this rank's go back through the front."""
        total = self._terms(batch.targets, slice(0, len(batch))) or 1.0
        mean = torch.zeros((), dtype=replica.workload.dtype, device=replica.device)
        gradients = [torch.zeros_like(value) for value in values]
        own = [value.detach().contiguous() for value in values]
        for rank, given in rotation(own, [share.stop - share.start for share in shares], self._group):
            weight = self._terms(batch.targets, shares[rank]) / total
            leaves = [t.requires_grad_(v.requires_grad) for t, v in zip(given, values, strict=True)]
            with replica.autocast():
                copies = [leaf.clone() for leaf in leaves]  # what the back does in place, it does to them
                outputs = partial(self._trains.back, *copies)
                # Of no terms the mean is a NaN, and 0 times NaN is one too: zero, through the same layers.
                loss = (
                    self.loss(replica, outputs, tree.rows(batch.targets, shares[rank])) if weight else _zero(outputs())
                )
            replica.backward(loss, weight)
            mean += loss.detach() * weight
            if rank == self._group.rank:
                gradients = [g if leaf.grad is None else leaf.grad for g, leaf in zip(gradients, leaves, strict=True)]
        wanted = [(v, g) for v, g in zip(values, gradients, strict=True) if v.requires_grad]
        if wanted:
            torch.autograd.backward([v for v, _ in wanted], [g for _, g in wanted])
        return mean

    def _terms(self, targets: Any, rows: slice) -> float:
        """Loss terms in these rows."""
        assert self._count is not None
        if self._count is examples:
            return float(rows.stop - rows.start)
        return float(self._count(tree.rows(targets, rows)))

    @torch.no_grad()
    def predict(self, replica: Replica, batch: Batch) -> Any:
        with evaluating(self.model.modules()), replica.autocast():
            values, shares = self._front(self._evaluates, batch)
            return self._evaluates.back(*self._gathered(values, shares))


def _zero(outputs: Any) -> Tensor:
    return torch.stack([(t * 0.0).sum() for t in tree.tensors(outputs) if t.is_floating_point()]).sum()
