"""A NIR file run by the program of its dialect for the verification of an export, where the program is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apportion.exporting.spiking.nir_file import read
from apportion.exporting.spiking.readers.process import READERS, run, version
from apportion.exporting.target import Reading

BY_PROGRAM = 2
"""The number of batches, the first of them, that the program itself runs: it is slow."""


def by_program(path: Path, dialect_name: str, batches: Sequence[Tensor]) -> list[Reading]:
    """Return what the dialect's own program computes with the file, in float64, for the first batches; nothing where it
    is not installed, or where the dialect has no program."""
    installed = version(dialect_name) if dialect_name in READERS else None
    if installed is None:
        return []
    return [Reading(reader=f"{dialect_name} {installed}", outputs=_outputs(path, dialect_name, batches[:BY_PROGRAM]))]


def _outputs(path: Path, reader: str, batches: Sequence[Tensor]) -> Iterator[Sequence[Any]]:
    graph = read(path, reader)
    made = run(reader, path, torch.cat(list(batches)), timesteps=graph.timesteps)
    outputs = made.outputs.reshape(-1, *graph.readout.shape)
    for part in outputs.split([len(x) for x in batches]):
        yield [part.numpy()]
