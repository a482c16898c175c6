"""A schedule followed ahead, on a copy of the optimizer: does it shrink the learning rate to nothing in one epoch?

A schedule is stepped once an update. Recipes are often written for one step an epoch, and the same decay once an update
ends the training within the first minutes, without a word.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

SHRUNK = 1e6
"""A rate this many times smaller than the largest so far is too small to train with."""
FOLLOWED = 5_000
"""The number of updates that are followed at most: some ten microseconds each."""
_LAST = 0.1
"""The share of all updates, at the end, in which a schedule may have rates of nearly zero, as a cosine does."""


def rates_ahead(
    schedule: Callable[[Optimizer, int], Any], optimizer: Optimizer, total: int, updates: int
) -> list[float]:
    """Returns the learning rate of the first group before each of ``updates`` updates. The optimizer is not touched."""
    copied = copy.copy(optimizer)
    copied.defaults = dict(optimizer.defaults)
    # Its own weights, hyperparameters and hooks: a schedule writes into the groups, and wraps ``step``.
    copied.param_groups = [
        {**{k: copy.copy(v) for k, v in group.items() if k != "params"}, "params": [torch.nn.Parameter(torch.zeros(1))]}
        for group in optimizer.param_groups
    ]
    for group in copied.param_groups:  # as they were before the training's own schedule
        group["lr"] = group.pop("initial_lr", group["lr"])
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the schedule is stepped before the optimizer
        made = schedule(copied, total)
        for _ in range(updates):
            rates.append(float(copied.param_groups[0]["lr"]))
            made.step()
    return rates


def shrunk_at(rates: list[float]) -> int | None:
    """Returns the update from which on, to the last, the rate is at most a millionth of the largest before it, or
    None."""
    largest, since = 0.0, None
    for number, rate in enumerate(rates):
        largest = max(largest, rate)
        if largest == 0.0 or rate * SHRUNK > largest * (1 + 1e-9):
            since = None
        elif since is None:
            since = number
    return since


def warning_of(
    schedule: Callable[[Optimizer, int], Any], optimizer: Optimizer, *, total: int, steps_per_epoch: int
) -> str | None:
    """Returns what is wrong with the schedule, and the cure; None where it does not shrink the rate so within the first
    epoch."""
    try:
        rates = rates_ahead(schedule, optimizer, total, min(steps_per_epoch, total, FOLLOWED))
    except Exception:  # what it raises is raised where it is made for the training
        return None
    number = shrunk_at(rates)
    if number is None or total - number <= _LAST * total:
        return None
    return (
        f"the schedule shrinks the learning rate from {max(rates):.3g} to {rates[number]:.3g} by update {number} of "
        f"{total:,}, within the first epoch of {steps_per_epoch:,}: a schedule is stepped once an update, not once an "
        f"epoch; where gamma was meant for an epoch give gamma ** (1 / {steps_per_epoch}), and {steps_per_epoch} times "
        "as many steps for step_size, milestones or T_max"
    )
