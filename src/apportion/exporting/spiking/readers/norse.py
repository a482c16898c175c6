"""A NIR file run by norse, whose model is cast to float64 after it has read the numbers in float32."""

from __future__ import annotations

import nir
import norse.torch
from torch import Tensor

from apportion.exporting.spiking.readers.counting import Counts, in_batches, neurons, step_by_step

_AT_ONCE = 50


def run(path: str, inputs: Tensor, timesteps: int) -> tuple[Tensor, Counts]:
    """Return the mean of the outputs over the steps and the counts of spikes."""
    graph = nir.read(path)

    def batch(part: Tensor) -> tuple[Tensor, Counts]:
        model = norse.torch.from_nir(nir.read(path), dt=1.0).double()
        return step_by_step(model, neurons(graph), part, timesteps)

    return in_batches(batch, inputs, _AT_ONCE)
