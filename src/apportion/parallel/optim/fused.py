"""An optimizer's update in one pass over each slice, with torch's fused kernels.

A rank of a sliced network updates its own part alone, so this is all of its work: what remains is memory bandwidth, and
a fused kernel reads and writes every number once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from apportion.core import fast_paths
from apportion.core.workload import Parameters, Workload
from apportion.parallel.optim.step_hooks import OURS

_KINDS = (SGD, Adam, AdamW, Adagrad)
_WHOLE = (SGD, Adagrad)
"""The optimizers whose fused kernels do not accept DTensor shards in torch; the others' do."""


def with_fused_updates(workload: Workload) -> Workload:
    """Return the workload with its optimizers run fused; unchanged where the plain path is asked for."""
    if fast_paths.is_plain("fused"):
        return workload

    def made(parameters: Parameters) -> Optimizer | Mapping[str, Optimizer]:
        optimizers = workload.make_optimizer(parameters)
        for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers.values():
            _run_fused(optimizer)
        return optimizers

    return replace(workload, optimizer=made)


def needs_whole_weights(optimizer: Optimizer) -> bool:
    """Return whether the optimizer itself asks for a fused kernel that goes through whole tensors alone."""
    return type(optimizer) in _WHOLE and any(group.get("fused") for group in optimizer.param_groups)


def _run_fused(optimizer: Optimizer) -> None:
    """Run the optimizer's steps fused from now on, where it has a kernel and its groups do not ask for another one.
    Between steps the groups are as they were written: how a step is computed does not belong to a state."""
    if type(optimizer) in _KINDS:
        chosen: list[dict[str, Any]] = []

        def choose(*_: Any) -> None:
            _choose(optimizer, chosen)

        def restore(*_: Any) -> None:
            _restore(chosen)

        for hook, register in (
            (choose, optimizer.register_step_pre_hook),
            (restore, optimizer.register_step_post_hook),
        ):
            setattr(hook, OURS, True)
            register(hook)


def _choose(optimizer: Optimizer, chosen: list[dict[str, Any]]) -> None:
    chosen.clear()
    for group in optimizer.param_groups:
        free = group.get("fused") is None and group.get("foreach") is None
        plain = not group["differentiable"] and not isinstance(group["lr"], Tensor)
        if free and plain and _suited(optimizer, group["params"]):
            group["fused"] = True
            _bring_steps(optimizer, group["params"])
            chosen.append(group)


def _suited(optimizer: Optimizer, parameters: list[Any]) -> bool:
    """Return whether a fused kernel gives the right result for these parameters. The kernels go through memory in its
    order, whatever the strides say; and SGD's wants momentum for all or none of the weights, which one that is used for
    the first time does not have."""
    kind: Any = type(optimizer)
    used = [p for p in parameters if p.grad is not None]
    begun = {bool(optimizer.state.get(p)) for p in used}
    return (
        len(begun) < 2
        and all(p.is_floating_point() and not p.grad.is_sparse for p in used)
        and all(p.is_contiguous() and p.grad.is_contiguous() for p in used)
        and all(_has_kernel(kind, device) for device in {p.device.type for p in used})
    )


@cache
def _has_kernel(optimizer: type[SGD | Adam | AdamW | Adagrad], device: str) -> bool:
    """Return whether torch has the optimizer's fused kernel for this type of device, which an update of one number
    tells: for Adagrad on GPUs some versions have it, and some do not."""
    if device == "cpu":
        return True
    number = nn.Parameter(torch.zeros(1, device=device))
    number.grad = torch.zeros_like(number)
    try:
        optimizer([number], lr=0.1, fused=True).step()
    except RuntimeError:
        return False
    return True


def _bring_steps(optimizer: Optimizer, parameters: list[Any]) -> None:
    """Move the numbers of updates to where the kernels read them: away from the CPU, beside the weights, as 32 bits. An
    update that was made unfused has its number on the CPU, and maybe as 64 bits. That is so in a state that was loaded
    (with ``fused=None`` in its group torch leaves it as it comes), after an update that was not suited, and for Adagrad
    from the start."""
    for p in parameters:
        step = optimizer.state.get(p, {}).get("step")
        if isinstance(step, Tensor) and p.device.type != "cpu":
            optimizer.state[p]["step"] = step.to(device=p.device, dtype=torch.float32)


def _restore(chosen: list[dict[str, Any]]) -> None:
    for group in chosen:
        group["fused"] = None
