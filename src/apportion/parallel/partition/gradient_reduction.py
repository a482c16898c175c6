"""The gradients of a network in parts, from what this rank's backward pass left to what its optimizers take."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from apportion.comm.group import Group
from apportion.core.workload import Workload
from apportion.parallel.partition.partitioner import PartitionedModel
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.replica.gradient_buckets import GradientSum


@final
class GradientReduction:
    """The sums of partial gradients over those that hold them, the hooks, and the clipping by the norm of the whole
    gradient, of which each element is counted by one owner. ``waits``: no rank goes on before all have come here."""

    def __init__(self, workload: Workload, own: PartitionedModel, group: Group, *, waits: bool) -> None:
        self._workload, self._own, self._group, self._waits = workload, own, group, waits
        self._counted = own.layout.owned(group.rank)
        self._others: list[nn.Parameter] = []
        """The parameters whose gradients other ranks sum, and of which nothing is held here."""
        self._sums = self._make_sums()

    def _make_sums(self) -> dict[str | None, GradientSum]:
        """Make the sums of the partial gradients: one of all, or with ``update`` one of each optimizer's."""
        full, replica = self._own.full, self._own.replica
        own = {name: p for p, name in replica.names.items()}
        found: dict[str | None, GradientSum] = {}
        for scope in [None] if self._workload.update is None else list(replica.optimizers):
            terms, sparse = [], []
            for name, piece, ranks in self._own.layout.sums():
                if name in full.trained and scope in (None, full.trained[name]):
                    held = self._group.rank in ranks
                    # Who does not hold it adds nothing.
                    terms.append(own[name] if held else _nothing(piece, full.dtypes[name], replica.device))
                    self._others += [] if held else terms[-1:]
                    sparse += terms[-1:] if name in full.sparse else []
            if terms:
                optimizers = [*replica.optimizers.values()]
                found[scope] = GradientSum(terms, self._group, sparse=sparse, optimizers=optimizers)
        return found

    @torch.no_grad()
    def __call__(self, scope: str | None, loss: Tensor | None) -> Tensor | None:
        """Complete the gradients in ``p.grad`` of one optimizer's parameters or of all, clipped; returns the loss, on
        every rank. This is all that an update waits for."""
        replica, hooks, part = self._own.replica, self._own.hooks, self._own.part
        if scope in self._sums:
            self._sums[scope](None, 0.0)
            for p in self._others:
                p.grad = None
        if hooks:
            named = {p: replica.names[p] for p in replica.trainable(scope)}
            hooks(named, of_parameters=scope is None)
        largest = self._workload.clip_grad_norm
        if largest is None and part.alike:
            if self._waits:
                self._group.barrier()
            return loss
        gradients = [(p, p.grad) for p in replica.trainable(scope) if p.grad is not None]
        tail = torch.zeros(3, dtype=torch.float64, device=replica.device)
        if loss is not None:
            tail[0], tail[1] = loss, 1.0
        if largest is not None:
            counted = [g for p, g in gradients if replica.names[p] in self._counted]
            norms = [torch.linalg.vector_norm(g).double() for g in counted]
            tail[2] = torch.stack(norms).square().sum() if norms else 0.0
        self._group.all_reduce(tail).wait()
        if largest is not None:
            scale = (largest / (tail[2].sqrt() + 1e-6)).clamp(max=1.0)
            for _, gradient in gradients:
                gradient.mul_(scale.to(gradient.dtype))
        return (tail[0] / tail[1]).to(self._workload.dtype) if tail[1] else None


def _nothing(piece: TensorShard, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter of a piece's shape that takes no memory."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(piece.held))
