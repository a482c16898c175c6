"""The times of what comes before a run: how long may be measured, tried and proved; how long a step of the run takes,
as far as the steps of its proof tell; and how long a proof takes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import final

import torch
from safetensors.torch import load_file, save_file

BUDGET_SECONDS, BUDGET_SHARE = 10.0, 0.05
"""The seconds that measuring, trying and proving take together at most, or their share of the run, whichever is
more."""
STARTED_SECONDS = 1.5
"""The seconds of the budget that a program takes before it decides anything: Python, torch and the workload's own
modules."""
WIDER = 2.0
"""A proof computes in float64, which takes at least this many times as long as float32."""


@final
class ProofSteps:
    """The fastest step of a proof, for each number of rows."""

    def __init__(self) -> None:
        self._fastest: dict[int, float] = {}

    def take(self, rows: int, seconds: float) -> None:
        """Notes that a step on so many rows, of one rank, took so many seconds in float64."""
        self._fastest[rows] = min(seconds, self._fastest.get(rows, seconds))

    @property
    def slowest(self) -> float:
        """The seconds of a step on the largest number of rows; 0 where there was none."""
        return self._fastest[max(self._fastest)] if self._fastest else 0.0

    def run_step(self, times: float) -> float:
        """Returns the seconds of a step of the run, which has ``times`` as many rows as the largest of the proof's
        steps. The time of a row is the slope between steps of two sizes; where there is one size alone, rows count as
        nothing."""
        if not self._fastest:
            return 0.0
        (few, less), (many, more) = min(self._fastest.items()), max(self._fastest.items())
        row = max(0.0, more - less) / (many - few) if many > few else 0.0
        return (more + row * many * max(0.0, times - 1.0)) / WIDER


def budget(run_seconds: float) -> float:
    """Returns the seconds that measuring, trying and proving may take together before a run of ``run_seconds``."""
    return max(BUDGET_SECONDS, BUDGET_SHARE * run_seconds)


PROOF_SECONDS, PROOF_STEPS = 4.5, 16
"""The seconds that a short proof takes, with so many steps of a few rows in float64, in four processes on two cores."""


def proving(built: float, step: float) -> float:
    """Returns about the seconds that a short proof takes of a workload whose processes start in ``built`` seconds, and
    of which a step takes ``step``."""
    return PROOF_SECONDS + built + PROOF_STEPS * step


SAMPLE = 1 << 20
"""The number of elements that are written and read to see how long that takes: 8 MB."""
STATES = 3
"""The number of states that are written and read after each step: the strategy's, the reference's, and the one moved by
rounding."""


def comparing(elements: int, steps: int) -> float:
    """Returns the seconds that writing and reading states of so many elements takes at least here, over so many steps:
    a lower bound of what a proof takes."""
    with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
        path, sample = Path(folder, "sample"), torch.ones(SAMPLE, dtype=torch.float64)
        began = time.perf_counter()
        save_file({"sample": sample}, path)
        float((load_file(path)["sample"] - sample).abs().max())
        took = time.perf_counter() - began
    return took * (elements / SAMPLE) * STATES * steps
