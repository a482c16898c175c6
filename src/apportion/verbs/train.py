"""Train a workload: on this machine's processes, or as one of the ranks that are running already."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from apportion.address import check_place
from apportion.agreement import Wish
from apportion.checkpoint import RunDirectory
from apportion.errors import CheckpointError
from apportion.event import Event
from apportion.job import Job
from apportion.launch.env import Env
from apportion.launch.local import Local
from apportion.planner.decision import Decision, Planning
from apportion.planner.drift import Watch
from apportion.report import Journal
from apportion.strategy import Strategy
from apportion.supervise import Policy
from apportion.supervisor import Supervised
from apportion.trial import candidate
from apportion.values import parse
from apportion.worker import work
from apportion.workload import Workload
from apportion.world import World

Launcher = Local | Env


def run(  # noqa: PLR0913 (what a run may be told; all of it by name)
    workload: Workload | str,
    strategy: Strategy | str | None = None,
    *,
    launcher: Launcher | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    policy: Policy | None = None,
    steps: int | None = None,
    seed: int | None = None,
    trial: bool = True,
    remeasure: bool = False,
    allow_approximate: bool = False,
) -> Generator[Event, None, None]:
    """Train, and yield what happens: steps, evaluations, checkpoints, faults, and the end.

    ``workload``: itself, or its address (``path/to/file.py:name``). ``strategy``: None predicts what each
    would take here, tries the best for at most 10 s or 5 % of the run, and takes the fastest; the next run like it
    takes the same. ``run_dir``: None makes one under ``runs/``. ``steps`` and ``seed`` replace the workload's.

    Where no strategy is given: ``trial=False`` takes the one that is predicted to be the fastest; ``remeasure``
    forgets earlier runs; ``allow_approximate`` also takes an approximate one, if it learns more in the same time.

    ``break`` checkpoints and stops every rank at the same step. Raises WorkerFailed where a worker fails,
    CheckpointError where the state cannot be kept, ValueError for what was asked wrongly.
    """
    launcher = launcher or Local()
    address = workload if isinstance(workload, str) else _address(workload)
    if isinstance(workload, str):
        check_place(workload)
    if resume and run_dir is None:
        raise ValueError("resume=True needs run_dir: the directory of the run to go on with")
    if strategy is None and resume and run_dir is not None:
        strategy = str(RunDirectory(run_dir).read_run()["strategy"])
    asked = _Asked(
        workload=workload,
        address=address,
        run_dir=str(Path(run_dir) if run_dir is not None else fresh_run_dir(address)),
        resume=resume,
        policy=policy or Policy(),
        changes={name: value for name, value in (("steps", steps), ("seed", seed)) if value is not None},
    )
    chosen: Strategy | None = parse(strategy, "apportion.strategies") if isinstance(strategy, str) else strategy
    planning = Planning(trial=trial, remeasure=remeasure, approximate=allow_approximate)
    if chosen is not None and planning != Planning():
        raise ValueError(
            f"trial=, remeasure= and allow_approximate= say how a strategy is chosen, and {chosen} is given: leave "
            "either out"
        )
    if isinstance(launcher, Env):
        return _joined(asked, chosen, launcher)
    return _started(asked, chosen, launcher, planning)


def train(workload: Workload | str, strategy: Strategy | str | None = None, **options: Any) -> Event:
    """``run`` to its end, with its options; the ``end`` event: ``metrics``, ``run_dir``, ``examples_per_second``."""
    last = None
    for event in run(workload, strategy, **options):
        last = event
    assert last is not None, "a run ends with an event"
    return last


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A job of which the strategy is still open."""

    workload: Workload | str
    address: str | None
    run_dir: str
    resume: bool
    policy: Policy
    changes: dict[str, Any]

    def job(self, strategy: Strategy, launcher: Launcher, threads: int) -> Job:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return Job(
            **given,
            strategy=strategy,
            launcher=str(launcher),
            threads=threads,
            device=launcher.device,
            loaders=launcher.loaders,
        )


def _started(
    asked: _Asked, strategy: Strategy | None, launcher: Local, planning: Planning
) -> Generator[Event, None, None]:
    """On processes of this machine."""
    if strategy is None:
        from apportion.planner.deciding import decide  # a strategy that is given needs none of this

        decision = decide(asked.workload, asked.changes, launcher, planning)
    else:
        decision = Decision(chosen=candidate(strategy, launcher), told=None, expected=None)
    chosen, before = decision.chosen, list[Event]()
    if decision.told is not None:
        before.append(Event(kind="plan", step=0, epoch=0.0, seconds=0.0, data=decision.told))
        yield from before
    warning = chosen.launcher.overload(chosen.ranks)
    if warning is not None:
        warnings.warn(warning, stacklevel=3)
    from apportion.torch_private import unfamiliar  # torch is imported by now, or is about to be

    said = unfamiliar()
    if said is not None:
        warnings.warn(said, stacklevel=3)
    job = asked.job(chosen.strategy, chosen.launcher, chosen.launcher.threads_each(chosen.ranks))
    replaceable = chosen.strategy.survives and chosen.ranks > 1 and chosen.launcher.on_cpu()
    job = replace(job, replaceable=replaceable, workers=chosen.ranks)
    supervised = Supervised(job, chosen.launcher, chosen.ranks)
    watch = None if decision.expected is None else Watch(decision.expected)
    yield from _journaled(job, supervised.events(), before, supervised.rest, watch)


def _joined(asked: _Asked, strategy: Strategy | None, launcher: Env) -> Generator[Event, None, None]:
    """As one of the ranks that are running already."""
    if strategy is None:
        raise ValueError(
            "env() cannot try strategies: its processes are running already; give strategy=data_parallel()"
        )
    world = World.from_env(device=launcher.device)
    job = asked.job(strategy, launcher, torch.get_num_threads())
    events = work(job, world, Wish())
    yield from _journaled(job, events, [], []) if world.rank == 0 else events


def _journaled(
    job: Job,
    events: Generator[Event, None, None],
    before: Sequence[Event],
    rest: Sequence[Event],
    watch: Watch | None = None,
) -> Iterator[Event]:
    """The same events, each written into the run directory on its way; the report at the end. ``before``: what happened
    before the first; ``rest``: what happens after the loop was left; ``watch``: holds them against what was expected,
    and adds what there is to tell."""
    assert job.run_dir is not None
    journal: Journal | None = None
    try:
        for event in events:
            if journal is None and event.kind not in ("fault", "end"):  # what never started leaves no directory behind
                journal = Journal(job.run_dir)
                for earlier in before:
                    journal.write(earlier)
            if journal is not None:
                journal.write(event)
            yield event
            drifted = watch.take(event) if watch is not None else None
            if drifted is not None:
                if journal is not None:
                    journal.write(drifted)
                yield drifted
    except CheckpointError as error:
        events.throw(error)  # a run that cannot be written down is not to be saved either
    finally:
        events.close()
        if journal is not None:
            _close(journal, rest)
            _report(job.run_dir)


def _close(journal: Journal, rest: Sequence[Event]) -> None:
    try:
        for event in rest:
            journal.write(event)
    except CheckpointError as error:
        warnings.warn(str(error), stacklevel=2)
    finally:
        journal.close()


def _report(run_dir: str) -> None:
    try:
        from apportion.report_html import write_html  # at the end: it draws

        write_html(run_dir)
    except CheckpointError as error:  # the run itself is whole, or its own error is on its way
        warnings.warn(f"no report: {error}", stacklevel=2)


def fresh_run_dir(address: str | None) -> Path:
    """``runs/<name>-<date>-<time>``, not there yet."""
    name = "run" if address is None else Path(address.rpartition(":")[0]).stem.rpartition(".")[2]
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def _address(workload: Workload) -> str | None:
    """Where the running script has this workload, for loading and resuming the run later; None in a notebook."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    for name, value in vars(main).items():
        if value is workload and file is not None:
            return f"{file}:{name}"
    return None
