"""A NIR file read for its verification, by the rules of its dialect and by the dialect's program where it is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apportion.exporting.spiking.dialects.dialect import dialect
from apportion.exporting.spiking.graph import SpikingGraph
from apportion.exporting.spiking.nir_file import read
from apportion.exporting.spiking.readers.process import READERS, run, version
from apportion.exporting.spiking.simulator import simulate
from apportion.exporting.target import Reading

BY_PROGRAM = 2
"""The number of batches, the first of them, that the program itself runs: it is slow."""
SIMULATOR = "apportion"


def readings(
    path: Path, dialect_name: str, batches: Sequence[Tensor], *, dtype: torch.dtype = torch.float64
) -> list[Reading]:
    """Return what the file computes by the dialect's rules, in our simulator, and what the program itself computes.

    The program runs it where it is installed. ``dtype``: the type that the simulator computes in.
    """
    graph = read(path, dialect_name)
    found = [
        Reading(
            reader=dialect(dialect_name).program,
            simulated_by=SIMULATOR,
            outputs=([simulate(graph.to(dtype), x).outputs.numpy()] for x in batches),
        )
    ]
    installed = version(dialect_name) if dialect_name in READERS else None
    if installed is not None:
        outputs = _by_program(path, dialect_name, graph, batches[:BY_PROGRAM])
        found.append(Reading(reader=f"{dialect_name} {installed}", outputs=outputs))
    return found


def _by_program(path: Path, reader: str, graph: SpikingGraph, batches: Sequence[Tensor]) -> Iterator[Sequence[Any]]:
    made = run(reader, path, torch.cat(list(batches)), timesteps=graph.timesteps)
    outputs = made.outputs.reshape(-1, *graph.readout.shape)
    for part in outputs.split([len(x) for x in batches]):
        yield [part.numpy()]
