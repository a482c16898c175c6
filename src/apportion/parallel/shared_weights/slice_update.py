"""The update of one rank's slice: everyone's gradients of it, summed and clipped, and the live version of it give the
same slice of the other version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.group import Group
from apportion.parallel.optim.elementwise import FlatPiece
from apportion.parallel.replica.replica import Replica
from apportion.parallel.shared_weights.gradient_slots import DENSE, GradientSlots
from apportion.parallel.shared_weights.rank_slice import RankSlice, SlicePart
from apportion.parallel.shared_weights.weights_memory import RankLines, WeightsMemory


@final
class SliceUpdate:
    """The update of the slice that this rank has among the ranks of a group."""

    def __init__(
        self, replica: Replica, memory: WeightsMemory, slots: GradientSlots, lines: RankLines, group: Group
    ) -> None:
        self._memory, self._slots, self._lines, self._group = memory, slots, lines, group
        (self._optimizer,) = replica.optimizers.values()
        self._clip_norm = replica.workload.clip_grad_norm
        self.slice = RankSlice(memory, slots, group.rank, group.size, keeps_gradient=self._clip_norm is not None)
        self.uniform = True
        """True while all parameters have had equally many updates."""
        self._used_by: Any = None

    def __call__(self, old: int, new: int) -> Any:
        """Write the slice of the new version from that of the old one; returns which parameters any rank has used, by
        number (None: all)."""
        by = self._used_by = self._lines.used_by()
        used: Any = None if by is None else by.any(0)
        # Adam's correction depends on the number of updates: once it differs between parameters, each is updated by
        # itself.
        self.uniform = self.uniform and used is None
        parts = self.slice.parts if self.uniform else self.slice.each_parameter()
        live = parts if used is None else [part for part in parts if used[part.first]]
        if self._clip_norm is None:
            for part in live:
                self._apply(part, self._gradient(part), old, new)
        else:
            scale = self._clip([self._gradient(part) for part in live], self._clip_norm)
            for part in live:
                self._apply(part, part.scratch if scale == 1.0 else part.scratch.mul_(scale), old, new)
        for part in parts if used is not None else ():
            if not used[part.first]:
                _keep(part.versions[old], part.versions[new])
        return used

    def _apply(self, part: SlicePart, gradient: Tensor, old: int, new: int) -> None:
        count = int(self._memory.counts[old][part.first]) + 1
        group = self._optimizer.param_groups[part.region.group]
        part.region.rule.update(group, count, gradient, part.versions[old], part.versions[new])

    def _gradient(self, part: SlicePart) -> Tensor:
        """Return the sum of the gradients over ranks, in rank order."""
        if part.layer >= 0:
            return self._product(part)
        by = self._used_by
        givers = (
            part.gradients
            if by is None
            else [g for g, used in zip(part.gradients, by[:, part.first], strict=True) if used]
        )
        if len(givers) == 1:
            return part.scratch.copy_(givers[0])
        torch.add(givers[0], givers[1], out=part.scratch)
        for gradient in givers[2:]:
            part.scratch.add_(gradient)
        return part.scratch

    def _product(self, part: SlicePart) -> Tensor:
        """Return the gradient of a factored layer's rows as a product of every rank's factors."""
        slots = self._slots
        table = slots.rows[: self._group.size, part.layer]
        inputs, outputs = slots.inputs[part.layer], slots.outputs[part.layer]
        found = part.scratch.view(part.rows.stop - part.rows.start, -1)
        fresh = True
        for start, stop in stretches(table):
            product = outputs[start:stop, part.rows].t()
            if fresh:
                torch.mm(product, inputs[start:stop], out=found)
            else:
                found.addmm_(product, inputs[start:stop])
            fresh = False
        for gradient, dense in zip(part.gradients, table[:, DENSE], strict=True):
            if dense:
                part.scratch.copy_(gradient) if fresh else part.scratch.add_(gradient)
                fresh = False
        return part.scratch.zero_() if fresh else part.scratch

    def _clip(self, gradients: Sequence[Tensor], most: float) -> float:
        """Return the factor that torch's clip_grad_norm_ scales by; each element's square is counted by the rank that
        owns it."""
        norms = [float(g.norm(dtype=torch.float64)) for g in gradients]
        self._lines.report_squares(sum(norm * norm for norm in norms))
        # Every rank has written its squares before any rank adds them up.
        self._group.barrier()
        norm = math.sqrt(self._lines.squares())
        scale = most / (norm + 1e-6)
        return 1.0 if scale >= 1.0 else scale  # also where it is NaN: torch then makes the whole gradient NaN


def _keep(old: FlatPiece, new: FlatPiece) -> None:
    new.weights.copy_(old.weights)
    for slot, before in zip(new.slots, old.slots, strict=True):
        slot.copy_(before)


def stretches(table: Any) -> list[tuple[int, int]]:
    """Return the stretches (from, to) of rows that ranks have written, where consecutive ones are joined."""
    joined: list[tuple[int, int]] = []
    for start, rows, _ in table.tolist():
        if not rows:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], start + rows)
        else:
            joined.append((start, start + rows))
    return joined
