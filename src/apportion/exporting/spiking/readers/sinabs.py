"""A NIR file run by sinabs: all steps of a batch at once, layer after layer.

Only ``sinabs.nir`` is used, which needs sinabs' layers, nirtorch and nir, and no driver of a chip. Its neurons give
their spikes in float32 whatever the model is cast to. They are whole numbers, and are widened without a loss, so that
the layers after them compute in float64.
"""

from __future__ import annotations

from typing import Any

import nir
import sinabs.nir
import torch
from torch import Tensor, nn

from apportion.exporting.spiking.readers.counting import Counts, in_batches, neurons

_STEPS_AT_ONCE = 256
"""The largest number of examples times steps in a batch: the program keeps what every layer gives."""


def run(path: str, inputs: Tensor, timesteps: int) -> tuple[Tensor, Counts]:
    """Return the mean of the outputs over the steps and the counts of spikes."""

    def batch(part: Tensor) -> tuple[Tensor, Counts]:
        graph = nir.read(path)
        model = sinabs.nir.from_nir(graph, batch_size=len(part), num_timesteps=timesteps).double()
        counts: Counts = {}
        for name in neurons(graph):
            model.get_submodule(name).register_forward_hook(_widened(name, counts, len(part)))
        outputs, _ = model(part.repeat_interleave(timesteps, 0))
        return outputs.unflatten(0, (len(part), timesteps)).mean(1), counts

    return in_batches(batch, inputs, max(1, _STEPS_AT_ONCE // timesteps))


def _widened(name: str, counts: Counts, examples: int) -> Any:
    def widen(_module: nn.Module, _inputs: Any, spikes: Tensor) -> Tensor:
        counts[name] = spikes.unflatten(0, (examples, -1)).sum(1).to(torch.int32)
        return spikes.double()

    return widen
