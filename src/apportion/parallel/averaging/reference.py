"""A simulation, one after the other in one process, of replicas that are averaged at intervals: what local_sgd must
compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.averaging.contribution import Outer
from apportion.parallel.averaging.round_log import LoggedPart, LoggedRound, RoundLog
from apportion.parallel.replica.step import OneDeviceStep

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


def simulated_averages(
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
                average.add_round(waiting.pop(0))
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

    def add_round(self, ended: EndedRound, slots: Tensors | None = None) -> None:
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


def replayed_average(
    workload: Workload, log: RoundLog, outer: Outer | None, *, averaged_slots: bool, start: State | None = None
) -> State:
    """Return the last average that a log leads to, from the beginning or from ``start``. ValueError where the log is
    not one run's, or has another beginning."""
    check_log(log, 0 if start is None else start.step)
    first = OneDeviceStep(workload, torch.device("cpu"))
    if start is not None:
        first.load_state_dict(start)
    average = SimulatedAverage(first, outer)
    if start is not None:
        average.resume(start)
    made: dict[int, list[LoggedPart]] = defaultdict(list)
    for each in log.rounds:
        for part in each.parts:
            made[part.begun].append(part)
    replicas: dict[int, _ReplayedReplica] = {}
    for each in log.rounds:
        begun, ended = dict(average.state.model), dict[int, State]()
        for part in made[each.number]:
            replica = replicas.get(part.life)
            if replica is None:
                replica = replicas[part.life] = _ReplayedReplica.from_average(workload, part.rank, average)
            else:
                replica.go_on(average, averaged_slots=averaged_slots)
            ended[part.life] = replica.run_part(part, each)
        counted = [part for part in each.parts if part.examples]
        if counted:
            _add(average, counted, ended, begun, averaged_slots)
    return average.state


def _add(
    average: SimulatedAverage,
    counted: Sequence[LoggedPart],
    ended: dict[int, State],
    begun: dict[str, torch.Tensor],
    averaged_slots: bool,
) -> None:
    slots = None
    if not averaged_slots:  # then they are rank 0's, as far as it has given them
        slots = next((ended[p.life].optimizer for p in counted if p.rank == 0), average.slots)
    states = [ended[part.life] for part in counted]
    done = average.state.step + sum(len(part.batches) for part in counted)
    seen = [int(part.examples) for part in counted]
    average.add_round(EndedRound(states, seen, [begun] * len(states), done), slots)


@dataclass
class _ReplayedReplica:
    """A replica from when it came to when it went."""

    step: OneDeviceStep
    first: dict[str, Any]
    """The settings of its optimizers before any step."""
    scheduled: int = 0
    """The number of batches that its schedules have behind them."""

    @classmethod
    def from_average(cls, workload: Workload, rank: int, average: SimulatedAverage) -> _ReplayedReplica:
        """Begin from an average, with the optimizer slots that this has."""
        step = OneDeviceStep(workload, torch.device("cpu"), rank=rank)
        state, found = step.state_dict(), average.state
        self = cls(step, state.settings)
        self.step.load_state_dict(replace(state, model=found.model, optimizer=average.slots, buffers=found.buffers))
        return self

    def go_on(self, average: SimulatedAverage, *, averaged_slots: bool) -> None:
        """Go on from an average, with the slots that it has kept, or with those of the average."""
        state, found = self.step.state_dict(), average.state
        slots = average.slots if averaged_slots else state.optimizer
        self.step.load_state_dict(replace(state, model=found.model, optimizer=slots, buffers=found.buffers))

    def run_part(self, part: LoggedPart, round: LoggedRound) -> State:
        """Make the steps of a part of a round, and return the state after them. The schedules begin where the average
        is, and go on by as many batches at each step as there are replicas, but never past the end."""
        self._advance(round.done)
        for number, batch in enumerate(part.batches, 1):
            self.step(self.step.source.at(batch))
            self.scheduled += 1
            left = part.dealt - number
            self._advance(min(round.done + number * round.present, self.step.source.total - left))
        return self.step.state_dict()

    def _advance(self, batches: int) -> None:
        if batches < self.scheduled:  # from the beginning: no schedule goes back
            self.step.load_state_dict(replace(self.step.state_dict(), settings=self.first))
            self.scheduled = 0
        while self.scheduled < batches:
            self.step.replica.optimizers.advance(1)
            self.scheduled += 1


def check_log(log: RoundLog, begin: int) -> None:
    """Raise ValueError where a log begins after another number of batches, or is not of one run: where a batch is in
    two averages, or a round begins with more or fewer batches than those before it have made."""
    if log.first != begin:
        raise ValueError(f"the log begins after {log.first} batches: give start=, the state that the run began with")
    done, seen = begin, set[int]()
    for each in log.rounds:
        if each.done != done:
            raise ValueError(f"the log is not whole: round {each.number} begins with {each.done} batches, not {done}")
        for part in each.parts:
            if not part.examples:
                continue
            if part.begun != each.number:
                raise ValueError(f"the log is not one run's: round {each.number} has a part of round {part.begun}")
            if twice := seen.intersection(part.batches):
                raise ValueError(f"the log is not one run's: batch {min(twice)} is in two averages")
            seen.update(part.batches)
            done += len(part.batches)
