"""Counts the steps of the schedulers of each optimizer.

A warm-up that is advanced twice for each optimizer step has the rates of one with twice the rate, and only the count
tells them apart.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from apportion.script_check.recording.recorder import Recorder


class ScheduleSteps:
    """The number of steps that schedulers have made, by optimizer."""

    def __init__(self) -> None:
        self._made = weakref.WeakKeyDictionary[Any, int]()

    def add(self, optimizer: Any) -> None:
        """After a step of a scheduler of an optimizer, or of an object that holds it, as accelerate's does."""
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        self._made[optimizer] = self._made.get(optimizer, 0) + 1

    def count(self, optimizer: Any) -> int:
        """Returns the number of steps that the schedulers of an optimizer have made."""
        try:
            return self._made.get(optimizer, 0)
        except TypeError:  # of another class than torch's, to which there is no weak reference
            return 0


def install(recorder: Recorder) -> ScheduleSteps:
    """Watch ``step`` of torch's schedulers."""
    steps, step = ScheduleSteps(), LRScheduler.step

    @wraps(step)
    def counted(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        if recorder.active:
            steps.add(self.optimizer)

    LRScheduler.step = counted  # type: ignore[method-assign]
    return steps
