"""The lines of a comparison of strategies: what each of them took, fastest first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apportion.planner.trials.trial import Measured

ROUNDS = 5
"""The number of turns that each strategy's steps are divided in."""
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """The line of one strategy in the table."""

    strategy: str
    launcher: str
    workers: int
    threads: int
    """The number of threads of each worker."""
    step_seconds: float
    """The median of the seconds of a step, of the slowest rank."""
    examples_per_second: float
    times_one_device: float
    """The ratio of its examples/s to those of single_device with all threads."""
    computing: float
    """The share of the workers' time that is computing; with ``waiting`` (for other ranks) and ``communicating``, 1 in
    all."""
    waiting: float
    communicating: float
    exact: bool
    held_bytes: int
    """The bytes of weights, optimizer slots and buffers of all workers; what they share is counted once."""
    peak_bytes: int
    """The bytes of resident memory of the largest worker, with Python and torch."""
    steps: int
    predicted_seconds: float | None = None
    """The seconds of a step, by the strategy's price on this machine as it was measured, before any step was made;
    None: it has no price for this network, or on this machine."""

    @property
    def error(self) -> float | None:
        """The error of the prediction: 0.1 says that the step takes 10 % longer than predicted."""
        return None if self.predicted_seconds is None else self.step_seconds / self.predicted_seconds - 1

    def to_json(self) -> dict[str, Any]:
        """Returns plain data: the fields, and the ``error``."""
        return {**asdict(self), "error": self.error}


def row_of(measured: Measured, alone: Measured, predicted: float | None) -> ComparedRow:
    """Returns the line of one strategy. ``alone``: one device; ``predicted``: the seconds of a step."""
    total = measured.computing + measured.waiting + measured.communicating or 1.0
    chosen = measured.candidate
    return ComparedRow(
        strategy=str(chosen.strategy),
        launcher=str(chosen.launcher),
        workers=chosen.ranks,
        threads=chosen.launcher.threads_each(chosen.ranks),
        step_seconds=measured.step_seconds,
        examples_per_second=measured.examples_per_second,
        times_one_device=measured.examples_per_second / alone.examples_per_second,
        computing=measured.computing / total,
        waiting=measured.waiting / total,
        communicating=measured.communicating / total,
        exact=chosen.strategy.exact,
        held_bytes=measured.held_bytes,
        peak_bytes=measured.peak_bytes,
        steps=len(measured.seconds),
        predicted_seconds=predicted,
    )


def in_order(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Returns the rows, fastest first, the approximate ones after the exact ones."""
    return sorted(rows, key=lambda row: (not row.exact, -row.examples_per_second))


def save(rows: Sequence[ComparedRow], path: str | Path) -> None:
    """Saves the rows as JSON."""
    Path(path).write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")
