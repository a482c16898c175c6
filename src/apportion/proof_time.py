"""How long a step of a run takes, as far as the steps of its proof tell, and how long a proof takes at least."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import final

import torch
from safetensors.torch import load_file, save_file

WIDER = 2.0
"""A proof computes in float64, which takes at least so many times as long as float32."""


@final
class ProofSteps:
    """The fastest step of a proof, for each number of rows."""

    def __init__(self) -> None:
        self._fastest: dict[int, float] = {}

    def take(self, rows: int, seconds: float) -> None:
        """A step on so many rows, of one rank, took so many seconds in float64."""
        self._fastest[rows] = min(seconds, self._fastest.get(rows, seconds))

    def run_step(self, times: float) -> float:
        """Seconds of a step of the run, which has ``times`` as many rows as the largest of these. What a row takes is
        the slope between steps of two sizes; where there is one size alone, rows count as nothing."""
        if not self._fastest:
            return 0.0
        (few, less), (many, more) = min(self._fastest.items()), max(self._fastest.items())
        row = max(0.0, more - less) / (many - few) if many > few else 0.0
        return (more + row * many * max(0.0, times - 1.0)) / WIDER


SAMPLE = 1 << 20
"""So many elements are written and read to see how long that takes: 8 MB."""
STATES = 3
"""After each step three states are written and read: the strategy's, the reference's, and the one moved by rounding."""


def comparing(elements: int, steps: int) -> float:
    """The seconds that writing and reading states of so many elements takes at least here, over so many steps: a lower
    bound of what a proof takes."""
    with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
        path, sample = Path(folder, "sample"), torch.ones(SAMPLE, dtype=torch.float64)
        began = time.perf_counter()
        save_file({"sample": sample}, path)
        float((load_file(path)["sample"] - sample).abs().max())
        took = time.perf_counter() - began
    return took * (elements / SAMPLE) * STATES * steps
