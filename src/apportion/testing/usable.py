"""Refuses arguments that cannot be tried, and trials that compare nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from apportion.script_check.record import RankRecord

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
_FUNCTIONS = {
    "wrap": "a function that is called with the model on each rank, such as DistributedDataParallel",
    "optimizer": "a function that makes an optimizer from the parameters, such as torch.optim.AdamW",
    "reference": "a function reference(model, optimizer, rows) that makes the step in one process",
}
LONGEST = 7 * 24 * 3600.0
"""The longest time without progress, in seconds, that the deadlines of collectives can be made of."""
LARGEST = 1e100
"""The largest value that is compared: squares beyond it overflow."""


def refuse_unfit(step: Any, model: Any, ranks: int, steps: int, backend: str, timeout: float) -> None:
    """Raise ValueError for an argument that cannot be tried."""
    if not callable(step):
        raise ValueError(f"step={step!r}: it is a function step(model, optimizer, rows) that returns the loss")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise ValueError(f"ranks={ranks!r}: a distributed step is compared on at least 2 ranks; give ranks=2")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: it is the number of calls of step, at least 1; give steps=8")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST:
        raise ValueError(
            f"timeout={timeout!r}: it is a number of seconds above 0, at most {LONGEST:.0f}; give timeout=60.0"
        )
    if isinstance(model, nn.Module):
        if next(model.parameters(), None) is None:
            raise ValueError(
                f"model {type(model).__name__} has no parameters: gradients and weights are compared; give the network "
                "that the step trains"
            )
    elif not callable(model):
        raise ValueError(f"model={model!r}: it is a torch.nn.Module, or a function without arguments that returns one")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: it is one of {', '.join(map(repr, BACKENDS))}")
    if "nccl" in backend and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"backend={backend!r} has one GPU for each of ranks={ranks}, and this machine has "
            f"{torch.cuda.device_count()}: use backend='gloo', which computes on the CPU"
        )


def refuse_other_than_functions(given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument, by its name, that is neither None nor the function that it has to be."""
    for name, value in given.items():
        if value is None or (callable(value) and not isinstance(value, nn.Module)):
            continue
        shown = repr(value) if isinstance(value, str | int | float) else f"an object of type {type(value).__name__}"
        raise ValueError(f"{name}={shown}: it is {_FUNCTIONS[name]}")


def refuse_nothing_compared(ranks: Sequence[RankRecord], union: RankRecord) -> None:
    """Raise ValueError where the step has shown nothing: no loss, no optimizer step, or no gradient."""
    losses = [call["returned"] for record in ranks for call in record.events_of("call")]
    for who, returned in (
        ("on every rank", losses),
        ("in one process", [e["returned"] for e in union.events_of("call")]),
    ):
        if all(each == "None" for each in returned):
            raise ValueError(
                f"step returned None {who}: it returns the loss, a tensor with one element or a number; end it with "
                "`return loss`"
            )
    for who, records in (("on the ranks", ranks), ("in one process", [union])):
        if not any(record.steps for record in records):
            raise ValueError(
                f"step made no optimizer step {who} in {len(union.events_of('call'))} calls: it ends with "
                "optimizer.step() of the optimizer that it is given"
            )
    gradients = [array for step in union.steps for array in step["gradients"].values() if array is not None]
    if not any(np.any(array) for array in gradients):
        raise ValueError(
            "no parameter has a gradient other than zero when optimizer.step() is called in one process: call "
            "loss.backward() before it, and optimizer.zero_grad() before the backward pass or after the step"
        )
    weights = [array for step in union.steps for array in step["weights"].values()]
    largest = max(float(np.max(np.abs(array), initial=0.0)) for array in [*gradients, *weights])
    if not largest < LARGEST:
        raise ValueError(
            f"gradients or weights in one process reach {largest:g}, and nothing can be compared with that: use a "
            "smaller learning rate, fewer steps or other rows"
        )
