"""A simulation, one after the other in one process, of replicas that are averaged at intervals: what local_sgd must
compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.averaging.contribution import Outer
from apportion.parallel.replica.single_process import OneDeviceStep

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class EndedRound:
    """What replicas have at the end of a round."""

    states: list[State]
    seen: list[int]
    """The examples of each in this round."""
    begun: list[Tensors]
    """The weights that each began it with."""
    done: int
    """The batches handed out up to its end."""


def simulated(
    workload: Workload,
    replicas: int,
    every: int,
    outer: Outer | None,
    *,
    averaged_slots: bool,
    overlap: bool = False,
) -> Iterator[State]:
    """Yield the last average, after each step that every replica has made. ``overlap``: an average is taken at the end
    of the round after its own, except for the last one."""
    steps = [OneDeviceStep(workload, torch.device("cpu"), rank=rank) for rank in range(replicas)]
    total, seen = steps[0].source.total, [0] * replicas
    average = SimulatedAverage(steps[0], outer)
    begun = [dict(average.state.model) for _ in steps]
    waiting: list[EndedRound] = []
    for number, first in enumerate(range(0, total, replicas), 1):
        last = first + replicas >= total
        for rank, step in enumerate(steps[: total - first]):
            batch = step.source.at(first + rank)
            step(batch)
            seen[rank] += batch.averaged_rows
            for schedule in step.replica.optimizers.schedules.values():
                for _ in range(min(total, first + replicas) - first - 1):
                    schedule.step()
        if number % every == 0 or last:
            waiting.append(EndedRound([s.state_dict() for s in steps], seen, begun, min(total, first + replicas)))
            ended, seen = waiting[-1], [0] * replicas
            while waiting and (last or len(waiting) > overlap):
                average.add(waiting.pop(0))
            begun = [average.go_on(step, ended, rank, averaged_slots, overlap) for rank, step in enumerate(steps)]
        yield average.state


class SimulatedAverage:
    """The average of all replicas, as a state."""

    def __init__(self, step: OneDeviceStep, outer: Outer | None) -> None:
        self.state = step.state_dict()
        trained = {p: name for name, p in step.model.named_parameters() if p.requires_grad}
        named = step.model.named_parameters(remove_duplicate=False)
        self._first = {name: trained[p] for name, p in named if p in trained}
        """The parameters that are trained, by every name, and the first name of each."""
        self._weights = {n: torch.nn.Parameter(self.state.model[n].clone()) for n in trained.values()}
        self.slots: Tensors = {}
        self._optimizer: Any = None
        if outer is not None:
            self._optimizer = torch.optim.SGD(
                self._weights.values(), lr=outer.lr, momentum=outer.momentum, nesterov=True
            )

    def resume(self, state: State) -> None:
        """Go on from the optimizer slots of a state, whose weights this average has already."""
        self.slots = {n: t for n, t in state.optimizer.items() if not n.startswith("outer/")}
        for name, w in self._weights.items() if self._optimizer is not None else ():
            if (momentum := state.optimizer.get(f"outer/{name}/momentum_buffer")) is not None:
                self._optimizer.state[w]["momentum_buffer"] = momentum.clone()

    def add(self, ended: EndedRound, slots: Tensors | None = None) -> None:
        """Add what replicas have learnt in a round. ``slots``: the optimizer slots of the average; None: the mean of
        the replicas' is."""
        states, seen = ended.states, ended.seen
        changes = [
            {n: state.model[n] - begun[n] for n in self._weights}
            for state, begun in zip(states, ended.begun, strict=True)
        ]
        for name, change in mean(changes, seen).items():
            w = self._weights[name]
            w.grad = -change
            if self._optimizer is None:
                w.data = w.data + change
        own = self.slots = mean([s.optimizer for s in states], seen) if slots is None else slots
        if self._optimizer is not None:
            self._optimizer.step()
            momenta = {n: self._optimizer.state[w]["momentum_buffer"].clone() for n, w in self._weights.items()}
            own = own | {f"outer/{n}/momentum_buffer": m for n, m in momenta.items()}
        weights = {name: self._weights[first].detach().clone() for name, first in self._first.items()}
        self.state = State(
            step=ended.done,
            model=mean([s.model for s in states], seen) | weights,
            optimizer=own,
            settings=states[0].settings,
            buffers=mean([s.buffers for s in states], seen),
        )

    def go_on(self, step: OneDeviceStep, ended: EndedRound, rank: int, averaged_slots: bool, overlap: bool) -> Tensors:
        """Have a replica begin its next round, and return the weights that it begins with: those of the average, and
        what it has learnt since where that comes late."""
        state, model, buffers = ended.states[rank], self.state.model, self.state.buffers
        if overlap:
            learnt = {n: state.model[n] - ended.begun[rank][first] for n, first in self._first.items()}
            model = state.model | {n: model[n] + change for n, change in learnt.items()}
            buffers = state.buffers
        slots = self.slots if averaged_slots else state.optimizer
        step.load_state_dict(replace(state, model=model, optimizer=slots, buffers=buffers))
        return model


def mean(tensors: Sequence[Tensors], seen: Sequence[int]) -> Tensors:
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
