"""Collectives that gradients flow through, each with its adjoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from apportion.comm.group import Group


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        parts = group.all_gather_rows(rows)
        ctx.own = sum(len(p) for p in parts[: group.rank]), len(rows)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        start, length = ctx.own
        return gradient[start : start + length].contiguous(), None


def gather_rows(rows: Tensor, group: Group) -> Tensor:
    """Every rank's rows (dimension 0, which may differ between ranks), in rank order.

    For a function that every rank computes alike on the gathered rows: its gradient is already whole on each rank,
    so the adjoint takes this rank's rows of it and sends nothing.
    """
    gathered: Tensor = _GatherRows.apply(rows, group)
    return gathered
