"""Schedules that are not stepped once an update: by the epoch, and by a metric of the evaluation. Both take the place
of torch's scheduler where one is stepped, saved and loaded."""

from __future__ import annotations

from typing import Any, final

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


@final
class EpochSchedule:
    """A scheduler that is stepped with the last update of each epoch."""

    def __init__(self, scheduler: LRScheduler, steps_per_epoch: int) -> None:
        self._scheduler, self._every, self._updates = scheduler, steps_per_epoch, 0

    def step(self) -> None:
        """Take note of an update."""
        self._updates += 1
        if self._updates % self._every == 0:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and the number of updates."""
        return {"updates": self._updates, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._updates = state["updates"]
        self._scheduler.load_state_dict(state["scheduler"])


@final
class MetricSchedule:
    """A ReduceLROnPlateau, which is stepped after each evaluation."""

    def __init__(self, scheduler: ReduceLROnPlateau, metric: str) -> None:
        self._scheduler, self.metric = scheduler, metric

    def step(self) -> None:
        """Nothing: an update has no metric."""

    def evaluated(self, value: float) -> None:
        """Take the value of the metric, which is the same on every rank."""
        self._scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and the rates that it has set."""
        rates = [group["lr"] for group in self._scheduler.optimizer.param_groups]
        return {"rates": rates, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for group, rate in zip(self._scheduler.optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        self._scheduler.load_state_dict(state["scheduler"])
