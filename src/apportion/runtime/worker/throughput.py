"""Measures what a rank's steps gave, and how fast they went, beside the steps; it is told now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from apportion.core.strategy import Step


class ThroughputMeter:
    """Values and speeds since they were last asked for."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.pending: list[Mapping[str, Tensor]] = []
        self._examples = self._own = self.steps = 0
        self._all_examples = 0
        self._first: float | None = None
        self._since = self._own_since = time.perf_counter()
        self._spent = dict(step.spent())

    def take(self, values: Mapping[str, Tensor], examples: int, own: int) -> None:
        """Takes the values of one step, with the examples of its batch and how many of them are this rank's own."""
        self.pending.append(values)
        self._examples += examples
        self._own += own
        self.steps += 1
        if self._first is None:  # the first step sets up what the later ones use
            self._first = time.perf_counter()
        else:
            self._all_examples += examples

    def pause(self) -> None:
        """Pauses the clock: what follows is not a step, but an evaluation or a checkpoint."""
        self._paused = time.perf_counter(), dict(self._step.spent())

    def go_on(self) -> None:
        """Goes on after a pause: steps follow again."""
        since, before = self._paused
        pause = time.perf_counter() - since
        self._own_since += pause
        self._since += pause
        if self._first is not None:
            self._first += pause
        for name, seconds in self._step.spent().items():
            self._spent[name] += seconds - before[name]

    def flush(self) -> dict[str, Any]:
        """Returns what a step event tells."""
        now = time.perf_counter()
        names = dict.fromkeys(name for values in self.pending for name in values)
        told = {
            "values": {n: torch.stack([v[n].reshape(()) for v in self.pending if n in v]).tolist() for n in names},
            "examples_per_second": self._examples / max(now - self._since, 1e-9),
        }
        self.pending, self._examples, self._since = [], 0, now
        return told

    def speed(self) -> dict[str, Any]:
        """Returns what a speed event tells of this rank."""
        now, spent, steps = time.perf_counter(), dict(self._step.spent()), max(1, self.steps)
        parts = {name: (spent[name] - self._spent[name]) / steps for name in spent}
        elapsed = max(now - self._own_since, 1e-9)
        told = {
            "examples_per_second": self._own / elapsed,
            **parts,
            "computing": max(0.0, elapsed / steps - sum(parts.values())),
        }
        self._own = self.steps = 0
        self._own_since, self._spent = now, spent
        return told

    def overall(self) -> float:
        """Returns the examples a second after the first step."""
        if self._first is None or not self._all_examples:
            return 0.0
        return self._all_examples / max(time.perf_counter() - self._first, 1e-9)
