"""The sum of every rank's gradients, in few messages.

Small gradients are packed into one flat buffer, large ones are summed where they lie. Which parameters were used, and
the loss, ride in the tail of the first buffer: a parameter that no rank used keeps ``grad=None``, so that the
optimizer skips it as it would on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apportion.comm.group import Group, Work

LARGE_BYTES = 1 << 20
"""From here on copying a gradient costs more than a message of its own."""


@dataclass
class _Packed:
    """Parameters whose gradients travel in one flat buffer, of one dtype and device."""

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    tail: Tensor


class GradientSum:
    """Sums ``p.grad`` of these parameters over a group, in a fixed order."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, *, sparse: Sequence[nn.Parameter] = ()
    ) -> None:
        self._group = group
        self._sparse = [p for p in parameters if any(p is s for s in sparse)]
        dense = [p for p in parameters if not any(p is s for s in sparse)]
        self._dense = dense
        self._large = [p for p in dense if p.numel() * p.element_size() >= LARGE_BYTES]
        small = [p for p in dense if p.numel() * p.element_size() < LARGE_BYTES]
        kinds = dict.fromkeys((p.dtype, p.device) for p in small)
        self._packed = [_pack([p for p in small if (p.dtype, p.device) == kind], 0) for kind in kinds]
        device = parameters[0].device if parameters else torch.device("cpu")
        # One slot a parameter says whether it was used, the last one carries the loss.
        self._tail = torch.zeros(len(dense) + 1, device=device)
        if self._packed and self._packed[0].flat.dtype.is_floating_point:
            first = self._packed[0] = _pack(self._packed[0].parameters, len(dense) + 1)
            self._tail = first.tail

    def rejoin(self, group: Group) -> None:
        """The same parameters over other ranks."""
        self._group = group

    def __call__(self, loss: Tensor | None, weight: float) -> Tensor:
        """Every ``p.grad`` becomes the sum over the ranks; the sum of weight times loss (None: no rows here)."""
        used = [p.grad is not None for p in self._dense]
        self._fill_tail(used, loss, weight)
        pending = [self._start_packed(packed) for packed in self._packed]
        if not self._packed or self._tail is not self._packed[0].tail:
            pending.append(self._group.all_reduce(self._tail))
        pending += [self._start_large(p) for p in self._large]
        for work in pending:
            work.wait()
        for packed in self._packed:
            for p, view in zip(packed.parameters, packed.views, strict=True):
                p.grad = view
        total = self._tail[-1].clone()
        if not all(used):
            self._drop_unused()
        for p in self._sparse:
            self._sum_sparse(p)
        return total

    def _fill_tail(self, used: list[bool], loss: Tensor | None, weight: float) -> None:
        tail = self._tail
        if all(used):
            tail.fill_(1.0)
        else:
            tail[:-1] = torch.tensor(used, dtype=tail.dtype)
        if loss is None:
            tail[-1] = 0.0
        else:
            torch.mul(loss, weight, out=tail[-1])

    def _start_packed(self, packed: _Packed) -> Work:
        present = [(v, p.grad) for v, p in zip(packed.views, packed.parameters, strict=True) if p.grad is not None]
        if len(present) < len(packed.views):
            packed.flat[: packed.flat.numel() - packed.tail.numel()].zero_()
        if present:
            torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
        return self._group.all_reduce(packed.flat)

    def _start_large(self, p: nn.Parameter) -> Work:
        if p.grad is None:
            p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
        elif not p.grad.is_contiguous():
            p.grad = p.grad.contiguous()
        return self._group.all_reduce(p.grad)

    def _drop_unused(self) -> None:
        """A rank that used every parameter need not look: each of them was used."""
        for p, ranks in zip(self._dense, self._tail[:-1].tolist(), strict=True):
            if ranks == 0.0:
                p.grad = None

    def _sum_sparse(self, p: nn.Parameter) -> None:
        gradient = p.grad.coalesce() if p.grad is not None else None
        indices = (
            gradient.indices().t().contiguous() if gradient is not None else p.new_zeros((0, 1), dtype=torch.int64)
        )
        values = gradient.values() if gradient is not None else p.new_zeros((0, *p.shape[1:]))
        rows = torch.cat(self._group.all_gather_rows(indices))
        summed = torch.cat(self._group.all_gather_rows(values))
        p.grad = (
            torch.sparse_coo_tensor(rows.t(), summed, p.shape, check_invariants=False).coalesce() if len(rows) else None
        )


def _pack(parameters: list[nn.Parameter], tail: int) -> _Packed:
    total = sum(p.numel() for p in parameters)
    flat = parameters[0].new_zeros(total + tail)
    parts = flat[:total].split([p.numel() for p in parameters])
    views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
    return _Packed(parameters, flat, views, flat[total:])
