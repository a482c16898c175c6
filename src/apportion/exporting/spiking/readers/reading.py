"""A NIR file run by the program of its dialect for the verification of an export, where the program is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apportion.exporting.spiking.graph import SpikingGraph
from apportion.exporting.spiking.nir_file import read
from apportion.exporting.spiking.readers.process import READERS, run, version
from apportion.exporting.spiking.simulator import simulate
from apportion.exporting.target import Reading

BY_PROGRAM = 2
"""The number of batches, the first of them, that the program itself runs: it is slow."""
_AT_ONCE = 50
"""The number of examples that are simulated at once."""


def by_program(path: Path, dialect_name: str, batches: Sequence[Tensor]) -> list[Reading]:
    """Return what the dialect's own program computes with the file, in float64, for the first batches; nothing where it
    is not installed, or where the dialect has no program.

    It is held to our simulator in float64. In float32 the rounding of a sum decides whether a membrane that ends at the
    threshold has reached it, and two right programs then differ by a whole spike. In float64 sums of numbers of float32
    are all but exact.
    """
    installed = version(dialect_name) if dialect_name in READERS else None
    if installed is None:
        return []
    graph = read(path, dialect_name)
    return [
        Reading(
            reader=f"{dialect_name} {installed}",
            outputs=_outputs(path, dialect_name, graph, batches[:BY_PROGRAM]),
            reference=partial(_simulated, graph.to(torch.float64)),
        )
    ]


def _outputs(path: Path, reader: str, graph: SpikingGraph, batches: Sequence[Tensor]) -> Iterator[Sequence[Any]]:
    made = run(reader, path, torch.cat(list(batches)), timesteps=graph.timesteps)
    outputs = made.outputs.reshape(-1, *graph.readout.shape)
    for part in outputs.split([len(x) for x in batches]):
        yield [part.numpy()]


def _simulated(graph: SpikingGraph, inputs: Tensor) -> list[Any]:
    return [torch.cat([simulate(graph, x).outputs for x in inputs.split(_AT_ONCE)]).numpy()]
