"""The average of the weights over a training: a slot beside those of the optimizer.

It is kept for each parameter, in the dtype of the parameter, as ``average`` in the state of its optimizer: so it is
divided, committed, saved and compared as the optimizer's slots are. Each update that changes a parameter changes its
average; a parameter without one has its weights as its average. Buffers, as the statistics of a batch normalisation,
are not averaged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.core.value import Value

AVERAGES = "apportion.core.averages"
"""The folder of the averages: one file each."""
SLOT = "average"
NO_AVERAGE = "no worker sees every update: use data_parallel, fully_sharded or single_device"
"""Why workers that train on their own keep no average of the weights."""


class WeightAverage(Value, ABC):
    """An average of the weights over updates."""

    @abstractmethod
    def update(self, slots: dict[str, Any], weights: Tensor) -> None:
        """Take the weights after an update into the average, which is among the parameter's slots."""

    @torch.no_grad()
    def after(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Take in what an optimizer has made of those of its parameters that have a gradient."""
        for p in parameters:
            if p.grad is not None:
                self.update(optimizer.state[p], p.detach())


@torch.no_grad()
def take_averages(model: nn.Module, averages: Mapping[str, Tensor]) -> None:
    """Put the averages in the place of a plain model's weights. ``averages``: by the name of the parameter, before
    which the name of its optimizer may stand."""
    for name, average in averages.items():
        _parameter(model, name).copy_(average)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters[name if name in parameters else name.partition("/")[2]]


def averages_in(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averages among optimizer slots that are named ``layer.weight/average``, by what stands before that."""
    end = f"/{SLOT}"
    return {name.removesuffix(end): tensor for name, tensor in slots.items() if name.endswith(end)}
