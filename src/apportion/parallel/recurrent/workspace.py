"""Memory that an LSTM layer keeps from step to step: what a pass computes, and the gradients of the weights."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn


@final
class LSTMWorkspace:
    """The memory of a pass over so many moments and rows. Fresh pages at every step would cost as much as the
    arithmetic on them."""

    def __init__(self, w_hh: Tensor, time: int, rows: int) -> None:
        H = w_hh.shape[1]
        self.shape = (time, rows)
        sizes = [*(time * rows * n for n in (4 * H, 4 * H, H)), (time + 1) * rows * H, H * 4 * H]
        gates, dgates, tanh_c, c, whh_t = w_hh.new_empty(sum(sizes)).split(sizes)
        self.gates, self.dgates = gates.view(time, rows, 4 * H), dgates.view(time, rows, 4 * H)
        self.tanh_c, self.c, self.whh_t = tanh_c.view(time, rows, H), c.view(time + 1, rows, H), whh_t.view(H, 4 * H)
        self.dh, self.dc = (w_hh.new_empty(rows, H) for _ in range(2))
        # Views by moment, made once: slicing costs about as much as the arithmetic on small layers.
        self.moments = [
            (g, g[:, : 2 * H], g[:, 2 * H : 3 * H], g[:, 3 * H :], g[:, :H], g[:, H : 2 * H], *cs, tc)
            for g, *cs, tc in zip(self.gates, self.c, self.c[1:], self.tanh_c, strict=False)
        ]
        self.factors = [
            (d, d.view(rows, 4, H)[:, :3], d[:, 3 * H :], tc, g[:, H : 2 * H])
            for d, tc, g in zip(self.dgates, self.tanh_c, self.gates, strict=True)
        ]


@final
class GradientMemory:
    """The memory that the gradients of a layer's weights are computed into, the same at every step."""

    def __init__(self) -> None:
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._more: list[tuple[nn.Parameter, Tensor]] = []
        """The parameters that have a gradient already, with what is to be added to it."""

    def of(self, p: nn.Parameter) -> Tensor:
        """Return the memory that is ``p.grad`` from now on; where there is a gradient already, memory for what ``add``
        will add to it."""
        if p.grad is not None:
            self._more.append((p, torch.empty_like(p, memory_format=torch.contiguous_format)))
            return self._more[-1][1]
        if p not in self._kept:
            self._kept[p] = torch.empty_like(p, memory_format=torch.contiguous_format)
        p.grad = self._kept[p]
        return p.grad

    def add(self) -> None:
        """Add to the gradients that were there before what has been computed for them."""
        for p, gradient in self._more:
            assert p.grad is not None
            p.grad.add_(gradient)
        self._more = []
