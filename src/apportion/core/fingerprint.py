"""The fingerprint of a run: what a resumed run must have in common with the one that wrote its checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.core.sampler import PartSampler, Sampler
from apportion.core.workload import Workload


def fingerprint(
    workload: Workload, model: nn.Module, optimizers: Mapping[str, Optimizer], deal: Sampler
) -> dict[str, Any]:
    """The settings, as plain JSON, that a resumed run must have in common with the one that wrote the checkpoint.

    ``model`` is the plain one and ``optimizers`` what the workload's factory made for it, before any update;
    ``deal``: the order in which the examples of the training set are taken. Training longer makes no difference, unless
    a schedule spreads over the steps.
    """
    found: dict[str, Any] = {
        name: getattr(workload, name) for name in ("batch_size", "seed", "precision", "clip_grad_norm")
    }
    found["order"] = str(workload.order)
    # Runs that were begun before these fields were there have neither.
    if workload.drop_last:
        found["drop_last"] = True
    if workload.schedule_every != "update":
        found["schedule_every"] = workload.schedule_every
    if workload.schedule_on is not None:
        found["schedule_on"] = workload.schedule_on
    if workload.average is not None:
        found["average"] = str(workload.average)
    if workload.accumulate > 1:
        found["accumulate"] = workload.accumulate
    given = ("loss", "update", "carry", "augment", "schedule")
    found |= {name: "given" if getattr(workload, name) is not None else None for name in given}
    if workload.per_rank_draws:
        found["per rank draws"] = sorted(workload.per_rank_draws)
    found |= {f"argument {name}": value for name, value in workload.arguments.items()}
    found["examples"] = deal.examples
    if isinstance(deal, PartSampler):
        found["examples of each part"] = [*deal.lengths]
    if workload.schedule is not None:
        found["total steps"] = workload.total_steps(deal.batches)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found["parameters"] = _shapes(parameters) | {"trained": sum(p.requires_grad for p in parameters.values())}
    found["buffers"] = _shapes(dict(model.named_buffers(remove_duplicate=False)))
    for name, optimizer in optimizers.items():
        groups = {f"group {i}": _hyperparameters(group) for i, group in enumerate(optimizer.param_groups)}
        found[f"optimizer {name}".rstrip()] = {"class": type(optimizer).__qualname__, **groups}
    return found


def check_fingerprint(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError naming each field in which two fingerprints differ, with both values and the cure."""
    then, today = dict(_leaves(saved)), dict(_leaves(now))
    differ = [
        f"{name} was {then.get(name, 'absent')} and is {today.get(name, 'absent')}"
        for name in dict.fromkeys((*then, *today))
        if then.get(name, "absent") != today.get(name, "absent")
    ]
    if differ:
        raise ValueError(
            f"the run was started with another workload: {'; '.join(differ)}. Change it back to go on with "
            "resume=True, or start a new run in another run_dir="
        )


def _leaves(tree: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{place}{name}, ")
        else:
            yield f"{place}{name}", json.dumps(value)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    listed = json.dumps([[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()])
    digest = hashlib.sha256(listed.encode()).hexdigest()[:16]
    return {
        "tensors": len(tensors),
        "elements": sum(t.numel() for t in tensors.values()),
        "names, shapes and dtypes": digest,
    }


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of an optimizer's group, without how it is computed (``fused``) and without what a schedule
    makes of the rate."""
    how = ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable")
    found = {name: _scalar(value) for name, value in group.items() if name not in how}
    if "initial_lr" in group:
        found["lr"] = _scalar(group["initial_lr"])
    return {"parameters": len(group["params"]), **found}


def _scalar(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_scalar(v) for v in value]
    return value if value is None or isinstance(value, str | int | float) else type(value).__qualname__
