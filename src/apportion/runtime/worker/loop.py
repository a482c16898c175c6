"""The loop that every rank runs.

Its heart is three lines, which anyone can copy into a script under torchrun::

    step = strategy.build(workload, World.from_env())
    for batch in batches(step):
        values = step(batch)

``work`` adds what a run needs around them: events, evaluations, checkpoints, and stopping every rank at one step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from apportion.comm.group import Alone
from apportion.comm.world import World
from apportion.core.data.batch import BatchSource
from apportion.core.event import Event
from apportion.core.fingerprint import check_fingerprint
from apportion.core.replica_digest import check_replicated
from apportion.core.strategy import Recoverable, Step, batches
from apportion.core.workload import Workload
from apportion.errors import CheckpointError, MembershipChanged, NotFinite
from apportion.parallel.replica.resync import broadcast_state
from apportion.runtime.checkpoint.async_writer import Saver
from apportion.runtime.checkpoint.code_ownership import factory_of
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.worker.coordination import RunControl, StepCoordinator
from apportion.runtime.worker.evaluation import evaluate
from apportion.runtime.worker.evaluation_trial import try_evaluation
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.nonfinite_loss import LossGuard
from apportion.runtime.worker.schedule_lookahead import warning_of
from apportion.runtime.worker.throughput import ThroughputMeter

REPORT_SECONDS = 0.2
"""The seconds between two events of a kind: a person sees no more, and a step loses nothing to it."""
SPEED_SECONDS = 0.5


def work(job: Job, world: World, control: RunControl) -> Generator[Event, None, None]:
    """Trains as one rank of the world, and yields what happens, as it happens. Closing the generator stops every rank
    at the next step that they agree on."""
    run = _begin(job, world, control)
    events = run.events()
    try:
        for event in events:  # noqa: UP028 (`yield from` would close the loop where it stands)
            yield event
    except GeneratorExit:
        control.stop = True
        for _ in events:  # on to the step where all ranks stop
            pass
        raise
    finally:
        run.close()


def _begin(job: Job, world: World, control: RunControl) -> _TrainingLoop:
    """Makes this rank's part of the run; a replacement may see the next loss before it has begun."""
    while True:
        try:
            return _TrainingLoop(job, world, control)
        except MembershipChanged:
            world = world.rejoin()
            control.rejoined(world)


class _TrainingLoop:
    """One rank's part of a run."""

    def __init__(self, job: Job, world: World, control: RunControl) -> None:
        self.began = time.perf_counter()
        self.job, self.world, self.control = job, world, control
        self.workload: Workload = job.open()
        self.step: Step = job.strategy.build(self.workload, world)
        self.source = self.step.source
        self.proof = self._settled()
        self.directory: RunDirectory | None = None
        self.saver = Saver(None, job.policy.keep, str(job.strategy))
        self.best: float | None = None
        self._take_place()
        if world.generation == 0:
            self._restore()
        else:
            self._rejoin_step()
        self._regroup()
        self.coordinator = StepCoordinator(
            self.group,
            world.device,
            control,
            job.policy,
            steps_per_epoch=self.source.deal.batches,
            done=self.done,
        )
        if world.generation:
            self.coordinator.again(self.group, self.done)
        self.meter = ThroughputMeter(self.step)
        self.guarded = LossGuard(self.step, self.workload, job.policy, ranks=world.size)
        self.evaluation = self._open_evaluation()
        self.metrics: Mapping[str, float] = {}

        control.save_now = self.save_committed
        control.begun.set()

    def _settled(self) -> dict[str, Any] | None:
        """Returns what is known of the strategy before the first step; a run that is disproved does not come back from
        here."""
        if not self.job.prove or self.world.generation or self.world.size == 1:
            return None
        key = None
        if self.world.rank == 0:
            from apportion.runtime.proof.proof_key import proof_key  # it knows every kind of value

            key = proof_key(self.workload, self.step)
        asked = {"key": key, "steps": self.source.total, "parameters": self.step.parameters, "cuts": self.step.cuts}
        return self.control.settle(asked)

    @property
    def done(self) -> int:
        """The number of updates made so far."""
        return self.step.done

    def _take_place(self) -> None:
        """Opens the run directory on rank 0, which keeps it: now, or since the rank 0 before it has died."""
        if self.job.run_dir is None or self.world.rank != 0 or self.directory is not None:
            return
        self.directory = RunDirectory(self.job.run_dir)
        self.saver = Saver(self.directory, self.job.policy.keep, str(self.job.strategy))
        if self.world.generation:
            self.best = self.directory.best()

    def _regroup(self) -> None:
        """Sets the group that this rank agrees with: a rank that trains on its own asks no other."""
        self.group = self.world.group() if self.step.lockstep else Alone()
        self.evaluates = self.step.lockstep or self.world.rank == 0
        """True where this rank takes part in evaluations and checkpoints."""

    def _rejoin(self) -> None:
        """Goes on from the last update that is whole, after the membership has changed."""
        self.world = self.world.rejoin()
        self.control.rejoined(self.world)
        self._take_place()
        self._rejoin_step()
        self._regroup()
        self.coordinator.again(self.group, self.done)

    def _rejoin_step(self) -> None:
        assert isinstance(self.step, Recoverable), f"{type(self.step).__name__} does not survive the loss of a worker"
        self.step.rejoin(self.world)

    def save_committed(self) -> int:
        """Writes the state after the last update, and returns the step it is of. Called from another thread than the
        loop's."""
        if self.directory is None:
            raise CheckpointError("the run has no run_dir")
        state = self.step.committed()
        if state is None:
            self.saver.flush()  # what was on its way is what the run goes back to
            raise CheckpointError("it is spread over the ranks, or in the middle of an update")
        if (spoilt := self.guarded.may_keep(state)) is not None:
            raise CheckpointError(f"{spoilt} holds a NaN by then")
        state.settings["best"] = self.best
        self.saver.submit(state, state.step / self.source.deal.batches, best=False, seconds=0.0)
        self.saver.flush()
        self.saver.check()
        return state.step

    def _open_evaluation(self) -> BatchSource | None:
        if self.workload.evaluation is None:
            return None
        rank = 0 if self.step.whole else self.world.rank  # who loads the same batch draws the same numbers for it
        source = BatchSource.of_evaluation(self.workload, device=self.step.device, dtype=self.source.dtype, rank=rank)
        return source

    def _prepare_evaluation(self) -> None:
        """Tries the evaluation, before the first step of this attempt; then lets it load ahead."""
        if self.workload.evaluation is None or self.evaluation is None:
            return
        if self.world.generation == 0 and self.evaluates:
            try_evaluation(self.step, self.workload.evaluation, self.evaluation, self.group)
        self.evaluation.load_ahead(self.job.loaders)

    # Starting

    def _restore(self) -> None:
        """Starts the run directory, or goes on from it."""
        if self.job.run_dir is None:
            return
        state = None
        if self.directory is not None:
            mark = self.step.fingerprint(self.workload)
            if self.job.resume and (self.directory.steps() or not self._started(mark)):
                state = self.directory.resume(mark)
            elif not self.job.resume:
                self.directory.start(self._description(mark))
        if not self.job.resume:
            return
        state = broadcast_state(state, self.world.group(), device=self.world.device)
        if state is not None:
            self.step.load_state_dict(state)
            self.best = state.settings.get("best")

    def _started(self, mark: Mapping[str, Any]) -> bool:
        """Tells whether there is a run that was cut off before its first checkpoint, which begins again."""
        assert self.directory is not None
        check_fingerprint(self.directory.read_run().get("fingerprint", {}), mark)
        return True

    def _description(self, mark: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "address": self.job.address,
            **({} if isinstance(self.job.workload, str) else {"factory": factory_of(self.workload.model)}),
            "strategy": str(self.job.strategy),
            "launcher": self.job.launcher,
            "policy": str(self.job.policy),
            "changes": dict(self.job.changes),
            "fingerprint": dict(mark),
            "proof": self.proof,
        }

    def _start_event(self) -> Event:
        steps = self.source.total
        return self._event(
            "start",
            strategy=str(self.job.strategy),
            launcher=self.job.launcher,
            workers=self.world.size,
            threads=torch.get_num_threads(),
            device=str(self.step.device.type),
            parameters=self.step.parameters,
            examples=self.source.deal.examples,
            batch_size=self.workload.batch_size,
            steps=steps,
            steps_per_epoch=self.source.deal.batches,
            first_step=self.done,
            resumed=self.job.resume,
            proof=self.proof,
        )

    # The loop

    def events(self) -> Iterator[Event]:
        self.control.progress.begun = 1
        try:
            self._prepare_evaluation()
        except MembershipChanged:
            self._rejoin_until_it_holds()
            self._prepare_evaluation()
        if self.world.rank == 0 and not self.control.progress.started:
            self.control.progress.started = 1
            yield self._start_event()
            self._look_at_schedule()
            yield from self._warned()
        while True:
            try:
                reason = yield from self._train()
                yield from self._end(reason)
                return
            except NotFinite as error:
                raise NotFinite(f"{error}; {self._kept()}") from None
            except MembershipChanged:
                self.meter.pause()
                self._rejoin_until_it_holds()
                self.meter.go_on()

    def _kept(self) -> str:
        """Returns what is left of a run that ends with a loss that is not finite, and what can be done."""
        self.saver.flush()
        steps = [] if self.job.run_dir is None else RunDirectory(self.job.run_dir).steps()
        kept = f"the last finite checkpoint, step {steps[-1]}, is kept" if steps else "no checkpoint was saved before"
        return (
            f"{kept}; use a smaller learning rate, or clip_grad_norm=1.0, or mend the layer "
            '(Policy(on_nan="warn") goes on all the same)'
        )

    def _look_at_schedule(self) -> None:
        """Warn where the schedule ends the training within its first epoch."""
        schedule = self.workload.schedule
        for optimizer in self.step.optimizers.values() if schedule is not None and self.done == 0 else ():
            assert schedule is not None
            told = warning_of(schedule, optimizer, total=self.source.total, steps_per_epoch=self.source.deal.batches)
            self.guarded.news += [] if told is None or told in self.guarded.news else [told]

    def _rejoin_until_it_holds(self) -> None:
        while True:
            try:
                return self._rejoin()
            except MembershipChanged:  # another one was lost meanwhile
                pass

    def _train(self) -> Generator[Event, None, str]:
        """Makes steps until none is left or all ranks agree to stop; returns why it ended."""
        next_report = next_speed = time.perf_counter()
        progress = self.control.progress
        if self.world.generation:  # the change may have cut short what follows a step
            if (yield from self._agree()):
                return "stopped"
            if self._evaluation_due(self.done - 1):
                yield from self._evaluate(final=False)
        if self.step.data_shard is None:
            self.step.serve()
            return "served"
        for batch in batches(self.step, loaders=self.job.loaders):
            self.world.check()
            before = self.done
            values = self.guarded(batch)
            self.meter.take(values, batch.size, len(batch))
            progress.beats += 1
            progress.step = self.done
            now = time.perf_counter()
            yield from self._warned()
            if now >= next_report and self.world.rank == 0:
                yield self._step_event()
                next_report = now + REPORT_SECONDS
            if now >= next_speed:
                yield self._event("speed", rank=self.world.rank, **self.meter.speed())
                next_speed = now + SPEED_SECONDS
            if self._evaluation_due(before):
                self.meter.pause()
                yield from self._evaluate(final=False)
                self.meter.go_on()
            if self.done >= self.coordinator.next and (yield from self._agree()):
                return "stopped"
        return "finished"

    def _agree(self) -> Generator[Event, None, bool]:
        """Saves where the ranks agree to; returns whether they agree to stop."""
        stop, save = self.coordinator.poll(self.done, self.saver.seconds)
        if save or stop:
            self.meter.pause()
            self._save()
            self.meter.go_on()
        yield from self._saved()
        return stop

    def _step_event(self) -> Event:
        told = self.meter.flush()
        self.guarded.reported(self.done, told["values"])
        return self._event("step", **told, learning_rate=self._learning_rate())

    def _warned(self) -> Iterator[Event]:
        """Yields the faults that do not end the run."""
        while self.guarded.news:
            yield self._event(
                "fault", rank=self.world.rank, cause=self.guarded.news.pop(0), traceback=None, action="goes on"
            )

    def _learning_rate(self) -> float:
        for optimizer in self.step.optimizers.values():
            return float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else 0.0
        return 0.0

    def _evaluation_due(self, before: int) -> bool:
        """Tells whether an evaluation has come due since there were ``before`` updates."""
        evaluation = self.workload.evaluation
        if evaluation is None or evaluation.every is None or self.done >= self.source.total or not self.evaluates:
            return False
        every = evaluation.every * self.source.deal.batches
        return int(self.done / every) > int(before / every)

    def _evaluate(self, *, final: bool) -> Iterator[Event]:
        evaluation = self.workload.evaluation
        if evaluation is None or self.evaluation is None or not self.evaluates:
            return
        self.metrics = evaluate(self.step, evaluation, self.evaluation, self.group, self._beat)
        best = self._agree_on_best(self._is_best(evaluation.best))
        if best:
            self._save(best=True)
        if self.world.rank == 0:
            yield self._event("evaluation", metrics=dict(self.metrics), final=final, best=best)

    def _beat(self) -> None:
        """Notes that something got done, or is being written: this rank is not late."""
        self.control.progress.beats += 1
        self.world.check()

    def _agree_on_best(self, best: bool) -> bool:
        """Returns rank 0's answer: a replacement does not know how well the network did before it came."""
        told = torch.tensor([float(best), math.nan if self.best is None else self.best], dtype=torch.float64)
        told = told.to(self.step.device)
        self.group.broadcast(told)
        self.best = None if math.isnan(told[1].item()) else told[1].item()
        return bool(told[0].item())

    def _is_best(self, rule: str | None) -> bool:
        if rule is None:
            return False
        sense, _, name = rule.partition(" ")
        value = self.metrics[name] if sense == "max" else -self.metrics[name]
        if math.isnan(value) or (self.best is not None and not value > self.best):
            return False
        self.best = value
        return True

    def _save(self, *, best: bool = False) -> None:
        """Saves the state: every rank takes part in making it, where all hold it in the same way; one writes it, in the
        background."""
        if self.job.run_dir is None or not self.evaluates:
            return
        began = time.perf_counter()
        check_replicated(self.step.replicated(), rank=self.world.rank, step=self.done, device=self.world.device)
        state = self.step.state_dict()
        state.settings["best"] = self.best
        if self.directory is None:
            return
        if (spoilt := self.guarded.may_keep(state)) is not None:
            self.guarded.not_kept(state, spoilt)
        else:
            self.saver.submit(state, self._epoch(), best=best, seconds=time.perf_counter() - began)

    def _saved(self) -> Iterator[Event]:
        for saved in self.saver.news():
            if isinstance(saved, CheckpointError):
                yield self._event("fault", rank=0, cause=str(saved), traceback=None, action="goes on without it")
            else:
                data = {"path": str(saved.path), "seconds": saved.seconds, "bytes": saved.bytes}
                event = self._event("checkpoint", **data)
                yield replace(event, step=saved.step, epoch=saved.step / self.source.deal.batches)

    def _end(self, reason: str) -> Iterator[Event]:
        if self.world.rank == 0 and self.meter.pending:
            yield self._step_event()
        if self.meter.steps:
            yield self._event("speed", rank=self.world.rank, **self.meter.speed())
        yield from self._warned()
        if not self.step.lockstep:  # until everyone's last update has been made
            self.world.group().barrier()
        if reason == "finished":
            yield from self._evaluate(final=True)
            self._save()
        self.saver.finish(self._beat)
        yield from self._saved()
        if self.world.rank == 0 or self.world.channel is None:  # without a supervisor each rank is told
            yield self._event(
                "end",
                reason=reason,
                examples_per_second=self.meter.overall(),
                metrics=dict(self.metrics),
                run_dir=self.job.run_dir,
                resume=None,
            )
        self.saver.check()
        self.world.group().barrier()

    def _epoch(self) -> float:
        return self.done / self.source.deal.batches

    def _event(self, kind: Any, **data: Any) -> Event:
        return Event(
            kind=kind, step=self.done, epoch=self._epoch(), seconds=time.perf_counter() - self.began, data=data
        )

    def close(self) -> None:
        self.saver.finish()
        for source in (self.source, self.evaluation):
            if source is not None:
                source.close()
        self.step.close()
        self.world.close()
