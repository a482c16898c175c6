"""The value of the metric that says which checkpoint is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch

from apportion.comm.group import Group, collective


@final
class BestMetric:
    """The best value that the metric has had so far, the same on every rank after each evaluation."""

    def __init__(self, value: float | None) -> None:
        self.value = value
        """The value, where more is better; None: there was no evaluation yet."""

    def improve(self, rule: str | None, metrics: Mapping[str, float]) -> bool:
        """Takes the value that these metrics give by the rule ("max accuracy"); tells whether it is the best so far."""
        if rule is None:
            return False
        sense, _, name = rule.partition(" ")
        value = metrics[name] if sense == "max" else -metrics[name]
        if math.isnan(value) or (self.value is not None and not value > self.value):
            return False
        self.value = value
        return True

    @collective
    def agree(self, best: bool, group: Group, device: torch.device) -> bool:
        """Returns rank 0's answer: a replacement does not know how well the network did before it came. Called by all
        ranks of the group."""
        told = torch.tensor([float(best), math.nan if self.value is None else self.value], dtype=torch.float64)
        told = told.to(device)
        group.broadcast(told)
        self.value = None if math.isnan(told[1].item()) else told[1].item()
        return bool(told[0].item())
