"""What is the same for all readers: layers of neurons whose spikes are counted, batches, steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Counts = dict[str, Tensor]
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def neurons(graph: Any) -> list[str]:
    """Return the names of the nodes of a NIR graph that fire."""
    return [name for name, node in graph.nodes.items() if type(node).__name__ == "IF"]


class SpikeCounter:
    """Counts what the layers of these names give, in whole numbers; a layer that returns its state returns it last."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.counts: Counts = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(self._counting(name))

    def _counting(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def count(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            spikes = outputs[0] if isinstance(outputs, tuple) else outputs
            self.counts[name] = self.counts.get(name, 0) + spikes.detach().to(torch.int32)

        return count


def step_by_step(model: nn.Module, names: list[str], inputs: Tensor, timesteps: int) -> tuple[Tensor, Counts]:
    """Run a model that is called as ``outputs, state = model(inputs, state)``, and return the mean of its outputs and
    the counts of spikes."""
    counter = SpikeCounter(model, names)
    state, total = None, torch.zeros(())
    for _ in range(timesteps):
        outputs, state = model(inputs, state)
        total = total + outputs
    return total / timesteps, counter.counts


def in_batches(run: Callable[[Tensor], tuple[Tensor, Counts]], inputs: Tensor, size: int) -> tuple[Tensor, Counts]:
    """Run ``size`` examples at once, and return what all of them give."""
    found = [run(part) for part in inputs.split(size)]
    return torch.cat([outputs for outputs, _ in found]), {
        name: torch.cat([counts[name] for _, counts in found]) for name in found[0][1]
    }
