"""The replay of rounds that closed at their deadline, one replica after the other in one process: what such a run must
have computed, given the log of who took part in which round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.averaging.contribution import Outer
from apportion.parallel.averaging.open.round_log import LoggedPart, LoggedRound, RoundLog
from apportion.parallel.averaging.reference import EndedRound, SimulatedAverage
from apportion.parallel.replica.single_process import OneDeviceStep


def replayed(
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
    lives: dict[int, _ReplayedReplica] = {}
    for each in log.rounds:
        begun, ended = dict(average.state.model), dict[int, State]()
        for part in made[each.number]:
            life = lives.get(part.life)
            if life is None:
                life = lives[part.life] = _ReplayedReplica.begin(workload, part.rank, average)
            else:
                life.go_on(average, averaged_slots=averaged_slots)
            ended[part.life] = life.make(part, each)
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
    average.add(EndedRound(states, seen, [begun] * len(states), done), slots)


@dataclass
class _ReplayedReplica:
    """A replica from when it came to when it went."""

    step: OneDeviceStep
    first: dict[str, Any]
    """The settings of its optimizers before any step."""
    scheduled: int = 0
    """The number of batches that its schedules have behind them."""

    @classmethod
    def begin(cls, workload: Workload, rank: int, average: SimulatedAverage) -> _ReplayedReplica:
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

    def make(self, part: LoggedPart, of: LoggedRound) -> State:
        """Make the steps of a part of a round, and return the state after them. The schedules begin where the average
        is, and go on by as many batches at each step as there are replicas, but never past the end."""
        self._advance(of.done)
        for number, batch in enumerate(part.batches, 1):
            self.step(self.step.source.at(batch))
            self.scheduled += 1
            left = part.dealt - number
            self._advance(min(of.done + number * of.present, self.step.source.total - left))
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
