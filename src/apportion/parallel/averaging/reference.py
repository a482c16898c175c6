"""A simulation, one after the other in one process, of replicas that are averaged at intervals: what local_sgd must
compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.averaging.contribution import Outer
from apportion.parallel.replica.single_process import OneDeviceStep


def simulated(
    workload: Workload, replicas: int, every: int, outer: Outer | None, *, averaged_slots: bool
) -> Iterator[State]:
    """Yield the last average, after each step that every replica has made."""
    steps = [OneDeviceStep(workload, torch.device("cpu"), rank=rank) for rank in range(replicas)]
    total, seen = steps[0].source.total, [0] * replicas
    average = steps[0].state_dict()
    trained = {p: name for name, p in steps[0].model.named_parameters() if p.requires_grad}
    shared = {name: trained[p] for name, p in steps[0].model.named_parameters(remove_duplicate=False) if p in trained}
    weights = {name: torch.nn.Parameter(average.model[name].clone()) for name in trained.values()}
    optimizer: Any = None
    if outer is not None:
        optimizer = torch.optim.SGD(weights.values(), lr=outer.lr, momentum=outer.momentum, nesterov=True)
    for number, first in enumerate(range(0, total, replicas), 1):
        for rank, step in enumerate(steps[: total - first]):
            batch = step.source.at(first + rank)
            step(batch)
            seen[rank] += len(batch)
            for schedule in step.replica.optimizers.schedules.values():
                for _ in range(min(total, first + replicas) - first - 1):
                    schedule.step()
        if number % every == 0 or first + replicas >= total:
            states = [step.state_dict() for step in steps]
            model = _mean([s.model for s in states], seen)
            slots = _mean([s.optimizer for s in states], seen)
            own = dict(slots)
            buffers = _mean([s.buffers for s in states], seen)
            if outer is not None:
                for name, w in weights.items():
                    w.grad = w.detach() - model[name]
                optimizer.step()
                model |= {name: weights[first].detach().clone() for name, first in shared.items()}
                own |= {f"outer/{n}/momentum_buffer": optimizer.state[w]["momentum_buffer"] for n, w in weights.items()}
            average = State(
                step=min(total, first + replicas),
                model=model,
                optimizer=own,
                settings=states[0].settings,
                buffers=buffers,
            )
            for step, state in zip(steps, states, strict=True):
                kept = slots if averaged_slots else state.optimizer
                step.load_state_dict(replace(state, model=model, optimizer=kept, buffers=buffers))
            seen = [0] * replicas
        yield average


def _mean(tensors: Sequence[dict[str, Tensor]], seen: Sequence[int]) -> dict[str, Tensor]:
    """Return the mean of tensors by name, weighted by the examples; of whole numbers the largest."""
    mean = {}
    for name in dict.fromkeys(name for each in tensors for name in each):
        given = [(n, each[name]) for n, each in zip(seen, tensors, strict=True) if n and name in each]
        if not given:
            mean[name] = tensors[0][name]
        elif given[0][1].is_floating_point() or given[0][1].is_complex():
            mean[name] = torch.stack([t * n for n, t in given]).sum(0) / sum(n for n, _ in given)
        else:
            mean[name] = torch.stack([t for _, t in given]).amax(0)
    return mean
