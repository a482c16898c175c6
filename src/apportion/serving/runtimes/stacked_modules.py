"""Modules of torch that are computed as one: in turn, or, where they are of one architecture, all at once with their
weights stacked (``torch.func.vmap``), whichever is faster on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from apportion.core.torch_private import pytree
from apportion.exporting.target import called

TURNS = 5
TOLERANCE = 1e-4
"""The largest difference between the outputs of the two ways, relative to the largest output: vmap computes with other
kernels."""


class InOrder(nn.Module):
    """A module whose outputs are given as a list, in another order."""

    def __init__(self, module: nn.Module, order: Sequence[int]) -> None:
        super().__init__()
        self.module, self._order = module, order

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        found = pytree.tree_leaves(self.module(*args, **kwargs))
        return [found[n] for n in self._order]


class InTurn(nn.Module):
    """Modules that are computed in turn: the outputs are those of the first, then of the second, and so on."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(modules)

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [x for member in self.members for x in pytree.tree_leaves(member(*args, **kwargs))]


class Stacked(nn.Module):
    """Modules that are computed in one pass: the outputs are those of the first, then of the second, and so on. Raises
    RuntimeError where they are of different architectures."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._parameters_stacked, self._buffers_stacked = stack_module_state(list(modules))
        self.first, self._many = modules[0], len(modules)

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any:
            return functional_call(self.first, (parameters, buffers), args, kwargs)

        found = pytree.tree_leaves(vmap(one)(self._parameters_stacked, self._buffers_stacked))
        return [x[n] for n in range(self._many) for x in found]


def together(modules: Sequence[nn.Module], sample: Any) -> nn.Module:
    """Return the faster of ``InTurn`` and ``Stacked``. ``sample``: the inputs that each module is called with."""
    in_turn = InTurn(modules)
    with torch.inference_mode():
        try:
            stacked = Stacked(modules)
            pairs = zip(called(stacked, sample), called(in_turn, sample), strict=True)
        except Exception:  # of another architecture, or of operations that vmap does not know
            return in_turn
        if not all(_alike(ours, theirs) for ours, theirs in pairs):
            return in_turn
        taken: dict[nn.Module, list[float]] = {in_turn: [], stacked: []}
        for _ in range(TURNS):
            for module, own in taken.items():
                began = time.perf_counter()
                called(module, sample)
                own.append(time.perf_counter() - began)
    return min(taken, key=lambda module: sorted(taken[module])[TURNS // 2])


def _alike(some: Tensor, other: Tensor) -> bool:
    if some.shape != other.shape or some.dtype != other.dtype:
        return False
    if not some.is_floating_point():
        return torch.equal(some, other)
    return bool((some - other).abs().max() <= TOLERANCE * other.abs().max() + 1e-7) if some.numel() else True
