"""A NIR file run by spikingjelly, in float64, in steps of 1: in its own steps of 0.1 ms it refuses r = 1."""

from __future__ import annotations

import nir
import torch
from spikingjelly.activation_based.nir_exchange import import_from_nir
from torch import Tensor

from apportion.exporting.spiking.readers.counting import Counts, in_batches, neurons, step_by_step

_AT_ONCE = 50


def run(path: str, inputs: Tensor, timesteps: int) -> tuple[Tensor, Counts]:
    """Return the mean of the outputs over the steps and the counts of spikes."""
    graph = nir.read(path)

    def batch(part: Tensor) -> tuple[Tensor, Counts]:
        model = import_from_nir(graph, dt=1.0, dtype=torch.float64)
        return step_by_step(model, neurons(graph), part, timesteps)

    return in_batches(batch, inputs, _AT_ONCE)
