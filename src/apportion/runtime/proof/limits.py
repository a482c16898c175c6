"""The time and the memory that a proof may take before a run, and how much of them it needs."""

from __future__ import annotations

import math
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

    def record_step(self, rows: int, seconds: float) -> None:
        """Records that a step of one rank on ``rows`` rows took ``seconds`` in float64."""
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
        (least, quickest), (most, slowest) = min(self._fastest.items()), max(self._fastest.items())
        row = max(0.0, slowest - quickest) / (most - least) if most > least else 0.0
        return (slowest + row * most * max(0.0, times - 1.0)) / WIDER


def budget(run_seconds: float) -> float:
    """Returns the seconds that measuring, trying and proving may take together before a run of ``run_seconds``."""
    return max(BUDGET_SECONDS, BUDGET_SHARE * run_seconds)


PROOF_SECONDS, PROOF_STEPS = 4.5, 16
"""The seconds that a short proof takes, and the number of its steps on a few rows in float64, in four processes on two
cores."""


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
    """Returns the seconds that writing and reading states of ``elements`` elements takes at least, over ``steps``
    steps: a lower bound of what a proof takes."""
    with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
        path, sample = Path(folder, "sample"), torch.ones(SAMPLE, dtype=torch.float64)
        began = time.perf_counter()
        save_file({"sample": sample}, path)
        float((load_file(path)["sample"] - sample).abs().max())
        took = time.perf_counter() - began
    return took * (elements / SAMPLE) * STATES * steps


COPIES = 5
"""A process of a proof holds this many times the bytes of the weights: weights, gradients, two slots, and the state
that it gives."""
SLOTS = 3
"""A state has this many elements for each weight: the weight itself, and two slots of Adam's."""
COMPARED = 12
"""The comparison holds this many times the bytes of the weights: four states of weights and two slots."""
WARMING = 2.0
"""The first step of a process takes up to this many times as long as those after it."""


class OutOfTimeError(Exception):
    """The time that a proof was given is over; says how much it needs."""


class OutOfMemoryError(Exception):
    """The memory that a proof needs is not there; says how much that is."""


@final
class ProofLimits:
    """The limits of one proof under way, and how far it is. Without ``seconds`` it takes as long as it does."""

    def __init__(self, seconds: float | None, *, share: float, run_steps: int, least: bool = False) -> None:
        """``share``: the share of the run that the proof may take, where that is more than ``seconds``; ``run_steps``:
        the steps of that run; ``least``: what is made before ``least_made`` is made whatever the time."""
        self._began = time.monotonic()
        self._deadline = None if seconds is None else self._began + seconds
        self._share, self._run_steps, self._least = share, run_steps, least
        self._steps = ProofSteps()
        self._bytes = 0
        self._progress = 0.0
        """The share of the proof that is done."""

    @property
    def seconds_left(self) -> float:
        """The seconds that are left; infinite where the proof is not limited, or not yet."""
        return float("inf") if self._least else self.remaining

    @property
    def remaining(self) -> float:
        """The seconds until the proof should be over, whether or not it may go on."""
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()

    def least_made(self) -> None:
        """Notes that what is made whatever the time has been made."""
        self._least = False

    def lengthen(self, rows: int, seconds: float, times: float) -> None:
        """Gives the proof its share of the run, as far as its own steps tell how long the run will be: one of them took
        ``seconds`` for ``rows`` rows, and the run has ``times`` as many."""
        self._steps.record_step(rows, seconds)
        if self._deadline is not None:
            run = self._run_steps * self._steps.run_step(times)
            self._deadline = max(self._deadline, self._began + self._share * run)

    def rows_in_time(self, rows: int, share: float) -> int:
        """Returns the rows of one more step that fits into this share of the time that is left. ``rows``: those of the
        largest step so far; each takes as long as one of its rows."""
        seconds = self._steps.slowest
        return rows if not seconds else int(rows * max(1.0, share * self.seconds_left / (WARMING * seconds)))

    def step(self, seconds: float, share: float, ahead: int) -> None:
        """Notes a step of the proof, which is this share of it. Raises OutOfTimeError where the first step took so long
        that those ``ahead`` cannot end in time."""
        first = self._progress == 0.0
        self._progress += share
        if not self._least and first and seconds / WARMING * ahead > self.seconds_left:
            raise self.out_of_time()

    def must_fit(self, parameters: int, processes: int, steps: int) -> None:
        """Raises OutOfMemoryError where all the processes together would not fit what is free. ``steps``: the number of
        states that are compared."""
        self._bytes = parameters * 8 * (COPIES * processes + COMPARED)
        free = _free_bytes()
        if self._deadline is not None and self._bytes > free:
            raise OutOfMemoryError(
                f"it needs {self._bytes / 1e9:.3g} GB of memory, of which {free / 1e9:.3g} GB are free, and at least "
                f"{comparing(SLOTS * parameters, steps):.0f} s"
            )

    def out_of_time(self) -> OutOfTimeError:
        """Returns the error which says how long the whole proof would take."""
        spent = time.monotonic() - self._began
        if self._progress:
            return OutOfTimeError(f"the whole proof needs about {math.ceil(spent / self._progress)} s")
        return OutOfTimeError(f"its first step was not over after {spent:.2g} s")


def _free_bytes() -> float:
    """Returns the bytes of memory that are free; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError):
        return float("inf")
