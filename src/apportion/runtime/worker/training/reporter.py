"""The events that a rank makes of its run, and the meter of the speeds and values in them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from apportion.core.data.acted import ActedDataset
from apportion.core.event import Event
from apportion.core.loss_terms import description_of
from apportion.core.python_state.python_state import PythonState, remedy
from apportion.core.strategy import Step
from apportion.core.workload import Workload
from apportion.errors import CheckpointError
from apportion.runtime.checkpoint.run_directory import Saved
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.nonfinite_loss import LossGuard
from apportion.runtime.worker.schedule_lookahead import warning_of


class RunReporter:
    """Makes the events of one rank's run. ``rank``: this one's at the start; ``began``: the time from which their
    seconds count."""

    def __init__(self, job: Job, workload: Workload, step: Step, guard: LossGuard, *, rank: int, began: float) -> None:
        self._job, self._workload, self._step, self._guard, self._began = job, workload, step, guard, began
        self._rank, self._reported_lost = rank, set[str]()
        self.meter = ThroughputMeter(step)
        """The meter of the speeds and values that are reported."""

    def event(self, kind: Any, **data: Any) -> Event:
        """Returns an event of this moment."""
        done = self._step.done
        epoch = done / self._step.source.deal.batches
        return Event(kind=kind, step=done, epoch=epoch, seconds=time.perf_counter() - self._began, data=data)

    def start(self, workers: int, proof: Mapping[str, Any] | None) -> Event:
        """Returns the event that a run begins with."""
        source = self._step.source
        return self.event(
            "start",
            strategy=str(self._job.strategy),
            launcher=self._job.launcher,
            workers=workers,
            threads=torch.get_num_threads(),
            device=str(self._step.device.type),
            parameters=self._step.parameters,
            examples=source.deal.examples,
            batch_size=min(self._workload.update_size, source.deal.examples),
            count=description_of(self._workload.count, source.count),
            steps=source.total,
            steps_per_epoch=source.deal.batches,
            first_step=self._step.done,
            resumed=self._job.resume,
            proof=proof,
            **({"frames": source.dataset.frames} if isinstance(source.dataset, ActedDataset) else {}),
        )

    def step(self) -> Event:
        """Returns the event of the steps since the last one. Raises NotFinite where the run ends here."""
        report = self.meter.flush()
        self._guard.reported(self._step.done, report["values"])
        return self.event("step", **report, learning_rate=self._learning_rate())

    def _learning_rate(self) -> float:
        for optimizer in self._step.optimizers.values():
            return float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else 0.0
        return 0.0

    def speed(self, rank: int) -> Iterator[Event]:
        """Yields the events of this rank's speed since the last ones."""
        yield self.event("speed", rank=rank, **self.meter.speed())
        if isinstance(dataset := self._step.source.dataset, ActedDataset):
            yield self.event("rollouts", rank=rank, **dataset.rollout_facts())

    def warnings(self, rank: int) -> Iterator[Event]:
        """Yields the faults that do not end the run."""
        while self._guard.news:
            yield self.event("fault", rank=rank, cause=self._guard.news.pop(0), traceback=None, action="goes on")

    def lost(self, python: PythonState | None) -> Iterator[Event]:
        """Yields a fault for what the training keeps in Python and cannot be carried, once for each."""
        for name, reason in (python.lost if python is not None and self._rank == 0 else {}).items():
            if name not in self._reported_lost:
                self._reported_lost.add(name)
                cause = (
                    f"{name} is {reason}, and is neither kept in checkpoints nor carried to a replaced worker: from "
                    "here on the loss of a worker goes back to an earlier checkpoint, or stops the run, and "
                    f"resume=True is refused; {remedy(name)}"
                )
                yield self.event("fault", rank=0, cause=cause, traceback=None, action="goes on")

    def look_at_batch(self) -> None:
        """Warns where a batch is to have more examples than there are."""
        size, examples = self._workload.update_size, self._step.source.deal.examples
        if size > examples and self._step.done == 0:
            self._guard.news.append(
                f"batch_size={size} is more than the {examples} examples of data=: each batch has all {examples} of "
                f"them, and an epoch is one step; use batch_size<={examples}, or more data"
            )

    def look_at_schedule(self) -> None:
        """Warns where the schedule ends the training within its first epoch."""
        schedule, source = self._workload.schedule, self._step.source
        for optimizer in self._step.optimizers.values() if self._steps_by_update() else ():
            assert schedule is not None
            report = warning_of(schedule, optimizer, total=source.total, steps_per_epoch=source.deal.batches)
            self._guard.news += [] if report is None or report in self._guard.news else [report]

    def _steps_by_update(self) -> bool:
        """Tells whether this start has a schedule that is stepped once an update."""
        workload = self._workload
        by_update = workload.schedule_every == "update" and workload.schedule_on is None
        return workload.schedule is not None and by_update and self._step.done == 0

    def checkpoints(self, news: Iterable[Saved | CheckpointError]) -> Iterator[Event]:
        """Yields the events of what was saved, or could not be."""
        for saved in news:
            if isinstance(saved, CheckpointError):
                yield self.event("fault", rank=0, cause=str(saved), traceback=None, action="goes on without it")
            else:
                data = {"path": str(saved.path), "seconds": saved.seconds, "bytes": saved.bytes}
                event = self.event("checkpoint", **data)
                yield replace(event, step=saved.step, epoch=saved.step / self._step.source.deal.batches)


class ThroughputMeter:
    """Values and speeds since they were last asked for."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.pending: list[Mapping[str, Tensor]] = []
        self._examples = self._own = self.steps = 0
        self._all_examples = 0
        self._first: float | None = None
        self._since = self._own_since = time.perf_counter()
        self._spent = dict(step.spent())

    def record_step(self, values: Mapping[str, Tensor], examples: int, own: int) -> None:
        """Records the values of one step, with the examples of its batch and how many of them are this rank's own."""
        self.pending.append(values)
        self._examples += examples
        self._own += own
        self.steps += 1
        if self._first is None:  # the first step sets up what the later ones use
            self._first = time.perf_counter()
        else:
            self._all_examples += examples

    def pause(self) -> None:
        """Pauses the clock: what follows is not a step, but an evaluation or a checkpoint."""
        self._paused = time.perf_counter(), dict(self._step.spent())

    def go_on(self) -> None:
        """Goes on after a pause: steps follow again."""
        since, before = self._paused
        # Every start of a clock is moved by the pause, so that no later difference contains it.
        pause = time.perf_counter() - since
        self._own_since += pause
        self._since += pause
        if self._first is not None:
            self._first += pause
        for name, seconds in self._step.spent().items():
            self._spent[name] += seconds - before[name]

    def flush(self) -> dict[str, Any]:
        """Returns what a step event tells."""
        now = time.perf_counter()
        names = dict.fromkeys(name for values in self.pending for name in values)
        report = {
            "values": {n: torch.stack([v[n].reshape(()) for v in self.pending if n in v]).tolist() for n in names},
            "examples_per_second": self._examples / max(now - self._since, 1e-9),
        }
        self.pending, self._examples, self._since = [], 0, now
        return report

    def speed(self) -> dict[str, Any]:
        """Returns what a speed event tells of this rank."""
        now, spent, steps = time.perf_counter(), dict(self._step.spent()), max(1, self.steps)
        parts = {name: (spent[name] - self._spent[name]) / steps for name in spent}
        elapsed = max(now - self._own_since, 1e-9)
        report = {
            "examples_per_second": self._own / elapsed,
            **parts,
            "computing": max(0.0, elapsed / steps - sum(parts.values())),
        }
        self._own = self.steps = 0
        self._own_since, self._spent = now, spent
        return report

    def overall(self) -> float:
        """Returns the examples a second after the first step."""
        if self._first is None or not self._all_examples:
            return 0.0
        return self._all_examples / max(time.perf_counter() - self._first, 1e-9)
