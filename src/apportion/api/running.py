"""A run under way: on this machine's processes, or as one of the ranks that are running already."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from apportion.comm.channel import Channel
from apportion.comm.group import broadcast_message, collective
from apportion.comm.world import World
from apportion.core.event import Event
from apportion.core.launcher import Launcher
from apportion.core.own_frames import outside
from apportion.core.policy import Policy
from apportion.core.strategy import Strategy
from apportion.core.torch_private import import_compiler_late
from apportion.core.value import parse
from apportion.core.workload import Workload
from apportion.errors import Disproved, NotProved
from apportion.planner.decision import Decision, Planning, next_best
from apportion.reporting.recording import draw_report, journaled
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.checkpoint.durable_files import EVENTS
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.checkpoint.single_writer import single_writer
from apportion.runtime.checkpoint.validation import refuse_started, saved_steps
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local
from apportion.runtime.notice import requeue_job
from apportion.runtime.worker.agreement import RunAgreement, introduce
from apportion.runtime.worker.coordination import RunControl
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.training.loop import work

if TYPE_CHECKING:  # a run that is not proved needs none of this
    from apportion.api.run_proof import SelfProof
    from apportion.runtime.proof.proof import Settled


UNKNOWN = "data_parallel"
"""The strategy that stands in the driver's job where the ranks of other hosts choose one: they alone build it."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A request for a run whose strategy is still open."""

    workload: Workload | str
    address: str | None
    run_dir: str
    resume: bool | Literal["auto"]
    policy: Policy
    prove: bool
    require_proof: bool
    reprove: bool
    changes: dict[str, Any]

    def job(self, strategy: Strategy, launcher: Launcher, threads: int) -> Job:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "require_proof"}
        return Job(
            **given,
            strategy=strategy,
            launcher=str(launcher),
            threads=threads,
            device=launcher.device,
            loaders=launcher.loaders,
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run that is about to begin, on whichever ranks a launcher has."""

    asked: RunRequest
    strategy: Strategy | None
    """The strategy; None: one is chosen."""
    planning: Planning
    """The settings of that choice."""

    def __post_init__(self) -> None:
        if self.strategy is not None and self.planning != Planning():
            raise ValueError(
                f"trial=, remeasure= and allow_approximate= say how a strategy is chosen, and {self.strategy} is "
                "given: leave either out"
            )

    def on_processes(self, launcher: Local) -> Generator[Event, None, None]:
        """Runs on processes of this machine. A run that is gone on with keeps its strategy."""
        training = self
        if self.asked.resume == "auto":
            asked = replace(self.asked, resume=has_checkpoint(self.asked.run_dir))
            training = replace(training, asked=asked)
        if training.strategy is None and training.asked.resume is True:
            strategy: Strategy = parse(strategy_of(training.asked.run_dir), "apportion.strategies")
            training = replace(training, strategy=strategy)
        return _started(training.asked, training.strategy, launcher, training.planning)

    def on_running_ranks(self, launcher: Env) -> Generator[Event, None, None]:
        """Runs as one of the ranks that others have started, of which a signal tells some or all to end."""
        return _launched(self.asked, self.strategy, launcher, self.planning)

    def on_hosts(self, launcher: HostsLauncher) -> Generator[Event, None, None]:
        """Runs on ranks that are started on the launcher's hosts. Where no strategy is given, they choose one."""
        return _started_on_hosts(self.asked, self.strategy, launcher, self.planning)


def _started(
    asked: RunRequest, strategy: Strategy | None, launcher: Local, planning: Planning
) -> Generator[Event, None, None]:
    with single_writer(asked.run_dir):
        if not asked.resume:
            refuse_started(asked.run_dir)  # before anything is measured, tried or proved
        yield from _run_here(asked, strategy, launcher, planning)


def _started_on_hosts(
    asked: RunRequest, strategy: Strategy | None, launcher: HostsLauncher, planning: Planning
) -> Generator[Event, None, None]:
    from apportion.api.shipment import HostJob, shipment_of, shipped_workload, whole_address
    from apportion.runtime.hosts.hosts_run import HostsRun  # what goes to other hosts needs more

    if not asked.resume:
        refuse_started(asked.run_dir)  # the copy of the run would take its place
    shipped = replace(asked, address=whole_address(asked.address), workload=shipped_workload(asked.workload))
    replaceable = strategy is not None and not strategy.comes_and_goes
    given = HostJob(asked=shipped, strategy=strategy, launcher=launcher, planning=planning, replaceable=replaceable)
    shipment = shipment_of(asked.workload, given)
    job = asked.job(strategy or parse(UNKNOWN, "apportion.strategies"), launcher, 1)
    job = replace(job, replaceable=replaceable)
    run = HostsRun(job, launcher, shipment, chooses=strategy is None)
    try:
        yield from run.events()
    finally:
        if run.is_late and Path(asked.run_dir, EVENTS).exists():
            draw_report(asked.run_dir)


def _run_here(
    asked: RunRequest, strategy: Strategy | None, launcher: Local, planning: Planning
) -> Generator[Event, None, None]:
    if strategy is None:
        from apportion.planner.auto import decide  # a strategy that is given needs none of this

        decision = decide(asked.workload, asked.changes, launcher, planning)
    else:
        from apportion.planner.trials.trial import candidate

        decision = Decision(chosen=candidate(strategy, launcher), plan=None, expected=None)
    refused = set[str]()
    before = list[Event]()
    plain: tuple[str, ...] = ()
    while True:
        if decision.plan is not None and not plain:
            before.append(Event(kind="plan", step=0, epoch=0.0, seconds=0.0, data=decision.plan))
            yield before[-1]
        try:
            yield from _on_processes(asked, decision, before, plain)
            return
        except NotProved as error:
            if error.proved:  # with these fast paths switched off
                plain = error.plain
            elif decision.plan is None or not decision.chosen.strategy.exact:
                raise Disproved(f"{error}; {_CURE}") from None
            else:
                refused.add(str(decision.chosen))
                plain = ()
                decision = next_best(decision, refused, launcher, str(error))


_CURE = (
    "give another strategy, or none; or mend the workload (a loss that is a mean over tokens needs count=); "
    "check=False trains it all the same"
)


def _on_processes(
    asked: RunRequest, decision: Decision, before: list[Event], plain: tuple[str, ...]
) -> Generator[Event, None, None]:
    """Runs under one strategy. Raises NotProved before the first step, where the run must not go on."""
    from apportion.planner.performance_monitor import PerformanceMonitor
    from apportion.runtime.proof.limits import STARTED_SECONDS
    from apportion.runtime.supervisor.run import LocalRun

    chosen = decision.chosen
    warning = chosen.launcher.overload(chosen.ranks)
    if warning is not None:
        warnings.warn(warning, stacklevel=outside())
    from apportion.core.torch_private import unfamiliar  # torch is imported by now, or is about to be

    said = unfamiliar()
    if said is not None:
        warnings.warn(said, stacklevel=outside())
    job = asked.job(chosen.strategy, chosen.launcher, chosen.launcher.threads_each(chosen.ranks))
    replaceable = chosen.strategy.survives and chosen.ranks > 1 and chosen.launcher.on_cpu()
    job = replace(job, replaceable=replaceable, workers=chosen.ranks, prove=job.prove and chosen.ranks > 1, plain=plain)
    step_seconds = None if decision.expected is None else decision.expected.step_seconds
    spent = 0.0 if decision.plan is None else STARTED_SECONDS + float(decision.plan["seconds"])
    proof = None
    if job.prove:
        from apportion.api.run_proof import SelfProof  # a run that is not proved needs none of this

        proof = SelfProof(job, chosen, step_seconds=step_seconds, spent=spent, required=asked.require_proof)
    supervised = LocalRun(job, chosen.launcher, chosen.ranks, proof)
    watch = PerformanceMonitor(decision.expected)
    events = supervised.events()
    try:
        yield from journaled(job, events, before, supervised.rest, watch, draws=lambda: not supervised.told_to_end)
    except ValueError as error:
        if decision.plan is None or supervised.started or chosen.ranks == 1:
            raise
        # What an earlier run has chosen, or a prediction, cannot run this workload: others may.
        raise NotProved(str(error), proved=False, plain=()) from error
    finally:
        if supervised.told_to_end:
            requeue_job(job.policy)


def _launched(
    asked: RunRequest, strategy: Strategy | None, launcher: Env, planning: Planning
) -> Generator[Event, None, None]:
    from apportion.runtime.launched.rank_notice import RankNotice

    notice = RankNotice(RunControl())
    yield from notice.heed(joined(asked, strategy, launcher, planning, notice.control))


def joined(
    asked: RunRequest,
    strategy: Strategy | None,
    launcher: Env | HostsLauncher,
    planning: Planning,
    control: RunControl | None = None,
    *,
    channel: Channel | None = None,
) -> Generator[Event, None, None]:
    """Runs as one of the ranks that are running already. ``control``: how the run is stopped from outside; ``channel``:
    to the supervisor of the ranks of this host, which replaces those that are lost."""
    if strategy is None and planning.approximate:
        raise ValueError(
            "allow_approximate needs a pilot with processes of its own, and the ranks of env() are running already: "
            "leave it out, or give strategy=local_sgd()"
        )
    import_compiler_late()  # every rank has been started for this run, and would wait for it
    meets = strategy is None or not strategy.comes_and_goes
    world = World.from_env(device=launcher.device, insecure=launcher.insecure, channel=channel, meets=meets)
    control = control or RunControl()
    if channel is not None:
        from apportion.runtime.worker.entry import supervise  # what only supervised ranks need

        world = world.join()
        supervise(control, world)
    try:
        if world.generation:  # in the place of a rank that was lost: everything is decided
            assert strategy is not None
            job = asked.job(strategy, launcher, torch.get_num_threads())
            yield from _written_by_the_first(job, work(job, world, control), [], world, control)
        else:
            yield from _joined(asked, strategy, launcher, world, planning, control)
    finally:
        world.close()  # also where the ranks were refused: who catches that may start another run


def _joined(
    asked: RunRequest,
    strategy: Strategy | None,
    launcher: Env | HostsLauncher,
    world: World,
    planning: Planning,
    control: RunControl,
) -> Generator[Event, None, None]:
    if asked.resume == "auto":
        found = has_checkpoint(asked.run_dir) if world.rank == 0 else None
        asked = replace(asked, resume=broadcast_message(found, world.group(), device=world.device))
    before: list[Event] = []
    if strategy is None:
        strategy, plan = _chosen_together(asked, launcher, world, planning)
        if plan is not None and world.rank == 0:
            before.append(Event(kind="plan", step=0, epoch=0.0, seconds=0.0, data=plan))
            yield before[0]
    job = asked.job(strategy, launcher, torch.get_num_threads())
    if world.size > 1:
        agreement = RunAgreement(job, world)
        control.opened, control.built = agreement.on_workload, agreement.on_data
        control.settle = lambda facts: _settled_together(job, world, facts, agreement, required=asked.require_proof)
    elif world.unmet is not None:
        if asked.require_proof:
            raise ValueError(
                f"require_proof=True: the ranks of {strategy} come and go, and do not wait for each other to be "
                "proved: prove it before with apportion.check, and leave require_proof out"
            )
        control.built = lambda workload, step: introduce(job, workload, step, world)
    yield from _written_by_the_first(job, work(job, world, control), before, world, control)


def _written_by_the_first(
    job: Job, events: Generator[Event, None, None], before: list[Event], world: World, control: RunControl
) -> Iterator[Event]:
    """Yields the events of one rank, and writes them into the run directory for as long as it is rank 0, which it may
    become."""
    from apportion.planner.performance_monitor import PerformanceMonitor

    assert job.run_dir is not None
    control.known(job, world.rank)
    run_dir, rejoined = job.run_dir, control.rejoined
    with ExitStack() as stack:
        writes = False

        def take_place(now: World) -> None:
            nonlocal writes
            if now.rank or writes:
                return
            taken_over = now.generation > 0 and now.meeting is not None
            seconds = TAKEN_OVER_SECONDS if taken_over else TAKE_OVER_SECONDS if now.members else 0.0
            try:
                stack.enter_context(single_writer(run_dir, seconds=seconds))
            except ValueError:
                # Where hosts share a disk, rank 0 of a host that was given up may live on for long; the run directory
                # is claimed next, and what that rank writes later is refused.
                if not taken_over:
                    raise
            writes = True

        def take_place_again(changed: World) -> None:
            rejoined(changed)
            take_place(changed)

        control.rejoined = take_place_again
        take_place(world)
        yield from journaled(
            job,
            events,
            before,
            [],
            PerformanceMonitor(None),  # of this rank's own steps
            draws=lambda: not control.was_notified(),
            writes=lambda: writes,
            outside=control.outside,
        )


@collective
def _chosen_together(
    asked: RunRequest, launcher: Env | HostsLauncher, world: World, planning: Planning
) -> tuple[Strategy, dict[str, Any] | None]:
    """Returns the strategy that all ranks take, and the data of a ``plan`` event where it was chosen now: that of the
    run which is gone on with, or the best of those that use all ranks. Called by all ranks."""
    if world.size == 1:
        return parse("single_device", "apportion.strategies"), None
    if asked.resume is True:
        written = strategy_of(asked.run_dir) if world.rank == 0 else None
        written = broadcast_message(written, world.group(), device=world.device)
        return parse(written, "apportion.strategies"), None
    from apportion.planner.launched_choice import choose_launched  # with it come prices and trials
    from apportion.runtime.launched.driving import all_or_none, must_agree

    # Before anything is measured; the other ranks may not have the disk.
    all_or_none(lambda: refuse_started(asked.run_dir) if world.rank == 0 else None, world)
    job = asked.job(parse("data_parallel", "apportion.strategies"), launcher, torch.get_num_threads())
    workload = must_agree(job, world)
    if workload.parts is not None and (hosts := len({*world.hosts()})) > 1:
        raise ValueError(
            f"strategies are measured on whole batches, and {hosts} hosts have some of the {workload.parts} parts of "
            "the data set each: give strategy=data_parallel() or map_reduce()"
        )
    fresh = world.renew()  # what is built to be tried is none of the run's
    try:
        plan = choose_launched(asked.workload, fresh, launcher, trial=planning.trial, name=asked.address)
    finally:
        fresh.close()
    return parse(plan["strategy"], "apportion.strategies"), plan


TAKE_OVER_SECONDS, TAKEN_OVER_SECONDS = 10.0, 0.5
"""The seconds for which another rank that becomes rank 0 waits until no process writes the run directory any more: on
one host, where the former rank 0 has ended, and on several, where it may live on."""
PROCESSES = 16
"""The number of processes that rank 0 starts at most to prove a run of ranks that others have started: more would not
fit a host."""


def _settled_together(
    job: Job, world: World, facts: dict[str, Any], agreement: RunAgreement, *, required: bool
) -> dict[str, Any]:
    """Proves the run on its own ranks, where they are on several hosts or too many for processes beside them; else lets
    rank 0 prove it with as many processes of its own. Raises Disproved on all of them. On the CPU either way.
    ``agreement``: what the ranks have compared of the workload and the step of each."""
    from apportion.api.proof_rows import gather_proof_rows
    from apportion.api.run_proof import SelfProof
    from apportion.core.strategy import cut_at
    from apportion.planner.trials.trial import candidate
    from apportion.runtime.launched.driving import connections, driven, ranks_by_host

    hosts = ranks_by_host(world) if connections(world) is not None else []
    unreferenced = len(hosts) > 1 and not job.strategy.referenced_across_hosts
    on_these = bool(hosts) and (len(hosts) > 1 or world.size > PROCESSES) and not unreferenced
    workers = next(n for n in range(1, world.size + 1) if job.strategy.ranks(n) == world.size)
    alike = candidate(job.strategy, Local(workers=workers, threads=1, device="cpu"))
    proof = SelfProof(job, alike, required=required, hosts=hosts if on_these else ())
    known = None
    if world.rank == 0:
        known = proof.compressed() if unreferenced else proof.known(facts)
    needless = known is not None or (not on_these and world.size > PROCESSES)
    workload, step = agreement.built
    rows = gather_proof_rows(workload, step.source.dataset, world, known=needless)
    answer: dict[str, Any] | None = None
    if world.rank == 0:
        proof.take_rows(rows.sent)
        if known is None and rows.refused is not None:
            known = proof.unproved(rows.refused)
        elif known is None and not on_these:
            known = proof.settle(facts) if world.size <= PROCESSES else proof.too_many()
        answer = None if known is None else _answer(proof, known)
    answer = broadcast_message(answer, world.group(), device=world.device)
    if answer is None:
        alone = replace(job, loaders=0, lengths=tuple(facts["lengths"]))
        answer = driven([alone], world, lambda ranks: _answer(proof, proof.settle(facts, ranks)), cut_at)
    if "refused" in answer:
        raise Disproved(answer["refused"])
    return rows.noted_in(answer["proof"], agreement.rows_sent)


def _answer(proof: SelfProof, settled: Settled) -> dict[str, Any]:
    """Returns what all ranks are sent of the answer: what the run writes down, or why it must not go on."""
    try:
        return {"proof": proof.check(settled)}
    except NotProved as error:
        cure = f"it does with APPORTION_PLAIN={','.join(error.plain)}" if error.proved else _CURE
        return {"refused": f"{error}; {cure}"}


def has_checkpoint(run_dir: str | Path | None) -> bool:
    """Tells whether a run directory holds a run that can be gone on with."""
    return run_dir is not None and bool(saved_steps(Path(run_dir)))


def strategy_of(run_dir: str | Path) -> str:
    """Returns the strategy, as it is written, of a run that is gone on with."""
    return str(RunDirectory(run_dir).read_run()["strategy"])
