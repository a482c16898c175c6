"""Train a workload: on this machine's processes, or as one of the ranks that are running already."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
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
from apportion.report import Journal
from apportion.report_html import write_html
from apportion.strategy import Strategy
from apportion.supervise import Policy
from apportion.supervisor import Supervised
from apportion.trial import candidate, choose
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
) -> Iterator[Event]:
    """Train, and yield what happens: steps, evaluations, checkpoints, faults, and the end.

    ``workload``: itself, or its address (``path/to/file.py:name``). ``strategy``: None measures a few for some seconds
    and takes the fastest. ``run_dir``: None makes one under ``runs/``. ``steps`` replaces the workload's.

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
        run_dir=str(Path(run_dir) if run_dir is not None else _fresh_run_dir(address)),
        resume=resume,
        policy=policy or Policy(),
        changes={} if steps is None else {"steps": steps},
    )
    chosen: Strategy | None = parse(strategy, "apportion.strategies") if isinstance(strategy, str) else strategy
    return _joined(asked, chosen, launcher) if isinstance(launcher, Env) else _started(asked, chosen, launcher)


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


def _started(asked: _Asked, strategy: Strategy | None, launcher: Local) -> Iterator[Event]:
    """On processes of this machine."""
    if strategy is None:
        ranking = choose(asked.workload, launcher, asked.changes)
        strategy, launcher = ranking[0].candidate.strategy, ranking[0].candidate.launcher
    chosen = candidate(strategy, launcher)
    warning = launcher.overload(chosen.ranks)
    if warning is not None:
        warnings.warn(warning, stacklevel=3)
    job = asked.job(strategy, chosen.launcher, chosen.launcher.threads_each(chosen.ranks))
    yield from _journaled(job, Supervised(job, chosen.launcher, chosen.ranks).events())


def _joined(asked: _Asked, strategy: Strategy | None, launcher: Env) -> Iterator[Event]:
    """As one of the ranks that are running already."""
    if strategy is None:
        raise ValueError(
            "env() cannot try strategies: its processes are running already; give strategy=data_parallel()"
        )
    world = World.from_env(device=launcher.device)
    job = asked.job(strategy, launcher, torch.get_num_threads())
    events = work(job, world, Wish())
    yield from _journaled(job, events) if world.rank == 0 else events


def _journaled(job: Job, events: Iterator[Event]) -> Iterator[Event]:
    """The same events, each written into the run directory on its way; the report at the end."""
    assert job.run_dir is not None
    journal: Journal | None = None
    try:
        for event in events:
            if journal is None and event.kind != "fault":  # a run that never started leaves no directory behind
                journal = Journal(job.run_dir)
            if journal is not None:
                journal.write(event)
            yield event
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
        if journal is not None:
            journal.close()
            _report(job.run_dir)


def _report(run_dir: str) -> None:
    try:
        write_html(run_dir)
    except CheckpointError as error:  # the run itself is whole, or its own error is on its way
        warnings.warn(f"no report: {error}", stacklevel=2)


def _fresh_run_dir(address: str | None) -> Path:
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
