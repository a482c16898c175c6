"""The loop that every rank runs.

Its heart is three lines, which anyone can copy into a script under torchrun::

    step = strategy.build(workload, World.from_env())
    for batch in batches(step):
        values = step(batch)

``work`` adds what a run needs around them: events, evaluations, checkpoints, and stopping every rank at one step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from apportion.comm.group import Alone, gather_messages
from apportion.comm.world import World
from apportion.core.event import Event
from apportion.core.parts import PartedDataset
from apportion.core.strategy import Recoverable, State, Step, batches
from apportion.core.workload import Workload
from apportion.errors import CheckpointError, MembershipChanged, NotFinite, PeerLost, StateLost
from apportion.parallel.replica.resync import lose_what_differs
from apportion.runtime.cached_proof.read_recorder import ReadRecorder, recorder
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.spawn.imports import Imports, imported
from apportion.runtime.worker.coordination import RunControl, StepCoordinator
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.nonfinite_loss import LossGuard
from apportion.runtime.worker.training.checkpoints import RunCheckpoints
from apportion.runtime.worker.training.evaluations import EvaluationFailed, RunEvaluations
from apportion.runtime.worker.training.reporter import RunReporter
from apportion.runtime.worker.training.restore import cuts_of, open_copy, open_directory, restore, strategy_of

REPORT_SECONDS = 0.2
"""The seconds between two events of a kind: a person sees no more, and a step loses nothing to it."""
SPEED_SECONDS = 0.5
CHANGE_SECONDS = 120.0
"""The seconds in which the supervisor of several hosts announces which ranks are left, after a connection between them
was lost."""


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
        # The others are in a collective or about to enter one: leaving here at once would make them wait for this rank.
        for _ in events:  # on to the step where all ranks stop
            pass
        raise
    finally:
        run.close()


def _begin(job: Job, world: World, control: RunControl) -> _TrainingLoop:
    """Makes this rank's part of the run; a replacement may see the next loss before it has begun."""
    again = False
    while True:
        try:
            if again:
                world = world.rejoin()
                control.rejoined(world)
            return _TrainingLoop(job, world, control)
        except (MembershipChanged, PeerLost) as change:
            _expected(change, world)
            again = True


def _expected(change: MembershipChanged | PeerLost, world: World) -> None:
    """Returns once the membership has changed, of which the loss of a connection to another host is a sign. Raises
    PeerLost where it does not change."""
    if isinstance(change, PeerLost):
        world.tell_torn()
        if not world.is_over(CHANGE_SECONDS):
            raise change


class _TrainingLoop:
    """One rank's part of a run."""

    def __init__(self, job: Job, world: World, control: RunControl) -> None:
        began = time.perf_counter()
        self.job, self.world, self.control = job, world, control
        if job.prove and world.rank == 0 and recorder() is None:  # a rank that others have started
            ReadRecorder.started()
        self.workload: Workload = job.open()
        control.opened(self.workload)
        self.step: Step = strategy_of(job, world).build(self.workload, world)
        control.built(self.workload, self.step)
        self.source = self.step.source
        self.proof = self._settled()
        directory = open_directory(job, world, self.workload, self.step, self.proof)
        best = None
        if not world.under_way:
            best = restore(job, directory, self.workload, self.step, world, self.proof)
            directory = open_copy(job, directory, self.workload, self.step, world, self.proof)
        else:
            directory = open_copy(job, directory, self.workload, self.step, world, self.proof)
            best = None if directory is None else directory.best()
            self._rejoin_step()
        self._regroup()
        if self.workload.schedule_on is not None and (self.step.schedules is None or not self.step.lockstep):
            raise ValueError(
                f"schedule_on={self.workload.schedule_on!r} needs ranks that evaluate together, and those of "
                f"{type(self.step).__name__} train on their own: use data_parallel or single_device"
            )
        self.coordinator = StepCoordinator(
            self.group,
            world.device,
            control,
            job.policy,
            steps_per_epoch=self.source.deal.batches,
            done=self.done,
        )
        if world.under_way:
            self.coordinator.rejoin(self.group, self.done)
            self._share_rates(known=False)
        self.guarded = LossGuard(self.step, self.workload, job.policy, ranks=world.size)
        self.checkpoints = RunCheckpoints(job, self.step, self.guarded, directory, best)
        self.checkpoints.cut(cuts_of(self.step, world))
        self.reporter = RunReporter(job, self.workload, self.step, self.guarded, rank=world.rank, began=began)
        self.meter = self.reporter.meter
        alone = world.size == 1 or not self.step.lockstep
        self.evaluations = RunEvaluations(self.workload, self.step, rank=world.rank, alone=alone)

        control.save_now = self.checkpoints.save_committed
        control.begun.set()

    def _settled(self) -> dict[str, Any] | None:
        """Returns what is known of the strategy before the first step; this call does not return in a run that is
        disproved."""
        reads = recorder()
        if not self.job.prove or self.world.generation or self.world.size == 1:
            if reads is not None:
                reads.stop()
            return None
        key, imports = None, Imports()
        if self.world.rank == 0:
            from apportion.runtime.cached_proof.proof_key import proof_key  # it knows every kind of value

            made = proof_key(
                self.workload, self.source.dataset, reads, parameters=self.step.parameters, reprove=self.job.reprove
            )
            key, imports = made.to_json(), imported()
        lengths = self.source.dataset.lengths if isinstance(self.source.dataset, PartedDataset) else ()
        return self.control.settle(
            {
                "key": key,
                "steps": self.source.total,
                "parameters": self.step.parameters,
                "lengths": lengths,
                "cuts": self.step.cuts,
                "imports": imports.modules,
                "environment": imports.environment,
            }
        )

    @property
    def done(self) -> int:
        """The number of updates made so far."""
        return self.step.done

    def _regroup(self) -> None:
        """Sets the group that this rank agrees with: a rank that trains on its own asks no other."""
        self.group = self.world.group() if self.step.lockstep else Alone()
        self.evaluates = self.step.lockstep or self.world.rank == 0
        """True where this rank takes part in evaluations and checkpoints."""

    def _rejoin_step(self) -> None:
        assert isinstance(self.step, Recoverable), f"{type(self.step).__name__} does not survive the loss of a worker"
        for name, reason in (self.step.python.lost if self.step.python is not None else {}).items():
            raise StateLost(f"{name}, which training changes, has died with a rank: it is {reason}")
        self.step.rejoin(self.world)

    def _rejoin(self) -> None:
        """Goes on from the last update that is whole, after the membership has changed."""
        self.world = self.world.rejoin()
        self.control.rejoined(self.world)
        self.checkpoints.take_over(self._opened_again())
        self._rejoin_step()
        self.checkpoints.cut(cuts_of(self.step, self.world))
        self._regroup()
        self.coordinator.rejoin(self.group, self.done)
        self._share_rates(known=True)

    def _share_rates(self, *, known: bool) -> None:
        """Has ranks that were not there learn what the evaluations have made of the learning rates. ``known``: this
        rank was there."""
        if self.workload.schedule_on is None or self.step.schedules is None:
            return
        own = self.step.schedules.by_metric() if known else None
        states = gather_messages(own, self.group, device=self.world.device)
        if not known and (state := next((s for s in states if s is not None), None)) is not None:
            self.step.schedules.follow(state)

    def _opened_again(self) -> RunDirectory | None:
        """Returns the run directory that this rank writes from now on: the one that it has written, or another."""
        given = self.job, self.world, self.workload, self.step
        directory = self.checkpoints.directory or open_directory(*given, self.proof)
        return open_copy(self.job, directory, self.workload, self.step, self.world, self.proof)

    def _prepare_evaluation(self) -> None:
        """Tries the evaluation, before the first step of this attempt; then lets it load ahead."""
        if not self.world.under_way and self.evaluates:
            self.evaluations.attempt(self.group)
        self.evaluations.load_ahead(self.job.loaders)

    def events(self) -> Iterator[Event]:
        self.control.progress.begun = 1
        try:
            self._prepare_evaluation()
        except (MembershipChanged, PeerLost) as change:
            self._rejoin_until_it_holds(change)
            self._prepare_evaluation()
        if self.step.python is not None and self.job.loaders:
            self.step.python.try_loading(lambda: self.source.first_rows(2))
        yield from self.reporter.lost(self.step.python)
        if self.world.rank == 0 and not self.control.progress.started:
            self.control.progress.started = 1
            yield self.reporter.start((self.world.unmet or self.world).size, self.proof)
            self.reporter.look_at_batch()
            self.reporter.look_at_schedule()
            yield from self.reporter.warnings(self.world.rank)
        while True:
            try:
                reason = yield from self._train()
                yield from self._end(reason)
                return
            except NotFinite as error:
                raise NotFinite(f"{error}; {self.checkpoints.summary_of_saved()}") from None
            except (MembershipChanged, PeerLost) as change:
                self.meter.pause()
                self._rejoin_until_it_holds(change)
                self.meter.go_on()

    def _rejoin_until_it_holds(self, change: MembershipChanged | PeerLost) -> None:
        while True:
            _expected(change, self.world)
            try:
                return self._rejoin()
            except (MembershipChanged, PeerLost) as another:  # who was lost meanwhile
                change = another

    def _train(self) -> Generator[Event, None, str]:
        """Makes steps until none is left or all ranks agree to stop; returns why it ended."""
        next_report = next_speed = time.perf_counter()
        progress = self.control.progress
        if self.world.under_way:  # the change may have cut short what follows a step
            if (yield from self._agree()):
                return self._why_stopped()
            if self._evaluation_due(self.done - 1):
                yield from self._evaluate(final=False)
        if self.step.data_shard is None:
            self.step.serve()
            return "served"
        for batch in batches(self.step, loaders=self.job.loaders):
            self.world.check()
            before = self.done
            # The membership is looked at once a step, before anything is computed with ranks that are gone.
            values = self.guarded(batch)
            self.meter.record_step(values, batch.size, len(batch))
            progress.beats += 1
            progress.step = self.done
            now = time.perf_counter()
            yield from self.reporter.warnings(self.world.rank)
            if now >= next_report and self.world.rank == 0:
                yield self.reporter.step()
                next_report = now + REPORT_SECONDS
            if now >= next_speed:
                yield from self.reporter.speed(self.world.rank)
                next_speed = now + SPEED_SECONDS
            yield from self._evaluate_if_due(before)
            # With the last batch the ranks need not be at one point any more: some may have none of the last round.
            if self.coordinator.next <= self.done < self.source.total and (yield from self._agree()):
                return self._why_stopped()
        return self._why_no_batch_is_left()

    def _why_stopped(self) -> str:
        """Returns why the ranks have agreed to stop."""
        return "interrupted" if self.control.notice else "stopped"

    def _why_no_batch_is_left(self) -> str:
        """Returns why the run ends here. Where ranks join and leave, rank 0 may have ended it."""
        return "stopped" if self.world.unmet is not None and self.done < self.source.total else "finished"

    def _agree(self) -> Generator[Event, None, bool]:
        """Saves where the ranks agree to; returns whether they agree to stop."""
        python = self.step.python
        mark = python.quick_digest() if python is not None and not self.step.whole else 0
        stop, save = self.coordinator.poll(self.done, self.checkpoints.saver.seconds, mark)
        # Every rank has the same flag from the same collective, so that all of them enter the next one.
        if self.coordinator.differ and python is not None:
            lose_what_differs(python, self.group, self.world.device)
        if save or stop:
            self.meter.pause()
            self._save()
            self.meter.go_on()
        yield from self._tell_checkpoints()
        yield from self.reporter.lost(python)
        return stop and self.step.stop()

    def _compare_python(self) -> None:
        """Finds what the training keeps in Python and ranks do not have alike, before a checkpoint has one rank's."""
        python = self.step.python
        if python is not None and not self.step.whole and self.group.size > 1:
            # The marks are compared before rank 0 writes: a value that differs between ranks must not be restored on
            # all of them.
            python.settle()
            marks = self.group.all_gather(torch.tensor([python.digest()], device=self.world.device))
            if bool((marks != marks[0]).any()):
                lose_what_differs(python, self.group, self.world.device)

    def _tell_checkpoints(self) -> Iterator[Event]:
        """Tells what was saved; of the copies on other hosts, what could not be."""
        news = self.checkpoints.saver.news()
        if self.world.rank == 0:
            yield from self.reporter.checkpoints(news)
        for failed in news if self.world.rank else ():
            if isinstance(failed, CheckpointError):
                warnings.warn(f"the copy of the checkpoint: {failed} (goes on without it)", stacklevel=2)

    def _evaluation_due(self, before: int) -> bool:
        """Tells whether an evaluation has come due since there were ``before`` updates."""
        return self.evaluates and self.evaluations.is_due(before)

    def _evaluate_if_due(self, before: int) -> Iterator[Event]:
        """Evaluates where that has come due, and tells what has been evaluated meanwhile."""
        if self._evaluation_due(before):
            self.meter.pause()
            yield from self._evaluate(final=False)
            self.meter.go_on()
        if self.evaluations.beside is not None:
            yield from self._evaluated(self.evaluations.beside.finished)

    def _evaluate(self, *, final: bool) -> Iterator[Event]:
        if not self.evaluates:
            return
        if not final and (beside := self.evaluations.beside) is not None:
            state = self.step.state_dict()
            yield from self._evaluated(lambda: beside.submit(state, self._beat))
            return
        best = self.evaluations.run(self.group, self.checkpoints.best, self._beat)
        if self.workload.schedule_on is not None and best is not None and self.step.schedules is not None:
            self.step.schedules.evaluated(self.evaluations.metrics)
        if best:
            self._save(best=True)
        if best is not None and self.world.rank == 0:
            yield self.reporter.event("evaluation", metrics=dict(self.evaluations.metrics), final=final, best=best)
        yield from self._evaluation_news()

    def _evaluated(self, take: Callable[[], Sequence[tuple[State, Mapping[str, float]]]]) -> Iterator[Event]:
        """Tells what has come from the process that evaluates, and keeps the best."""
        try:
            taken = take()
        except EvaluationFailed:
            self.evaluations.run(self.group, self.checkpoints.best, self._beat)  # raises the same, at its own line
            raise
        for state, metrics in taken:
            best = self.evaluations.record_metrics(state, metrics, self.checkpoints.best)
            if best:
                self.checkpoints.write_state(state, best=True)
            event = self.reporter.event("evaluation", metrics=dict(metrics), final=False, best=best)
            yield replace(event, step=state.step, epoch=state.step / self.source.deal.batches)
        yield from self._evaluation_news()

    def _evaluation_news(self) -> Iterator[Event]:
        """Reports what evaluations did not do as they were asked."""
        for cause in self.evaluations.news():
            yield self.reporter.event("fault", rank=self.world.rank, cause=cause, traceback=None, action="goes on")

    def _beat(self) -> None:
        """Notes that something got done, or is being written: this rank is not late."""
        self.control.progress.beats += 1
        self.world.check()

    def _save(self, *, best: bool = False) -> None:
        if self.evaluates:
            self._compare_python()
            self.checkpoints.save(self.world, best=best)

    def _end(self, reason: str) -> Iterator[Event]:
        if self.world.rank == 0 and self.meter.pending:
            yield self.reporter.step()
        if self.meter.steps:
            yield from self.reporter.speed(self.world.rank)
        yield from self.reporter.warnings(self.world.rank)
        if not self.step.lockstep and self.step.ends_together:  # until everyone's last update has been made
            self.world.group().barrier()
        if reason == "finished":
            if (beside := self.evaluations.beside) is not None:
                yield from self._evaluated(lambda: beside.wait_for_all(self._beat))
            yield from self._evaluate(final=True)
            self._save()
            if self.world.rank == 0:
                self.evaluations.record(self.job.run_dir)
        # Before the event of the end: a reader of it may load the last checkpoint at once.
        self.checkpoints.saver.finish(self._beat)
        yield from self._tell_checkpoints()
        if self.world.rank == 0 or self.world.channel is None:  # without a supervisor each rank reports its own end
            yield self.reporter.event(
                "end",
                reason=reason,
                examples_per_second=self.meter.overall(),
                metrics=dict(self.evaluations.metrics),
                run_dir=self.job.run_dir,
                resume=self.control.resume if reason == "interrupted" else None,
                **({"why": None} if reason == "interrupted" else {}),
            )
        if self.world.rank == 0:
            self.checkpoints.saver.check()
        if self.step.ends_together:
            self.world.group().barrier()

    def close(self) -> None:
        self.checkpoints.saver.finish()
        self.source.close()
        self.evaluations.close()
        self.step.close()
        self.world.close()
