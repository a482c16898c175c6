"""Runs and other verbs on several hosts that this process starts: what goes to each of them, and what comes of it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from apportion.api.host_rank import HostJob, HostVerb
from apportion.api.running import RunRequest
from apportion.api.verb import Verb
from apportion.core.event import Event
from apportion.core.strategy import Strategy
from apportion.core.value import parse
from apportion.core.workload import Workload
from apportion.planner.decision import Planning
from apportion.reporting.recording import draw_report
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.checkpoint.event_lines import EVENTS
from apportion.runtime.checkpoint.validation import refuse_started
from apportion.runtime.hosts.code_bundle import make_bundle, project_root, shipped_address, shipped_path
from apportion.runtime.hosts.hosts_run import HostsRun
from apportion.runtime.hosts.hosts_verb import HostsVerb
from apportion.runtime.hosts.started_hosts import Shipment

UNKNOWN = "data_parallel"
"""The strategy that stands in the driver's job where the ranks choose one: they alone build it."""
MOST_JOB_BYTES = 64 << 20
"""The most bytes of a pickled workload."""


def started_on_hosts(
    asked: RunRequest, strategy: Strategy | None, launcher: HostsLauncher, planning: Planning
) -> Generator[Event, None, None]:
    """Runs on the hosts of the launcher. Where no strategy is given their ranks choose one."""
    if not asked.resume:
        refuse_started(asked.run_dir)  # the copy of the run would take its place
    shipped = replace(asked, address=_whole(asked.address), workload=_shipped(asked.workload))
    replaceable = strategy is not None and not strategy.comes_and_goes
    given = HostJob(asked=shipped, strategy=strategy, launcher=launcher, planning=planning, replaceable=replaceable)
    shipment = _shipment(asked.workload, given)
    job = asked.job(strategy or parse(UNKNOWN, "apportion.strategies"), launcher, 1)
    job = replace(job, replaceable=replaceable)
    run = HostsRun(job, launcher, shipment, chooses=strategy is None)
    try:
        yield from run.events()
    finally:
        if run.is_late and Path(asked.run_dir, EVENTS).exists():
            draw_report(asked.run_dir)


def answered_on_hosts(verb: Verb[Any], launcher: HostsLauncher) -> Any:
    """Carries out a verb on the hosts of the launcher, and returns its answer, which is plain JSON. Raises what it
    raises there."""
    shipped = replace(verb, workload=_shipped(verb.workload))
    return HostsVerb(launcher, _shipment(verb.workload, HostVerb(verb=shipped, launcher=launcher))).value()


def _shipped(workload: Workload | str) -> Workload | str:
    """Returns the workload as the hosts are given it: its address below the folder of its code."""
    return shipped_address(workload) if isinstance(workload, str) else workload


def _shipment(workload: Workload | str, given: HostJob | HostVerb) -> Shipment:
    """Returns what goes to every host. Raises ValueError where it is too much."""
    root = project_root(workload if isinstance(workload, str) else None, sys.modules["__main__"])
    payload = cloudpickle.dumps(given)
    if len(payload) > MOST_JOB_BYTES:
        raise ValueError(
            f"the pickled workload has {len(payload):,} bytes, and {MOST_JOB_BYTES >> 20} MB go to the hosts at most: "
            "data are not sent; have data= open them on each host"
        )
    return Shipment(code=make_bundle(root), root=root, path=shipped_path(root), payload=payload)


def _whole(address: str | None) -> str | None:
    """Returns an address that means the same file in whatever folder it is read."""
    place, _, name = (address or "").rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else address
