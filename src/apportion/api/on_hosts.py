"""A run on several hosts that this process starts: what goes to each of them, and the run itself."""

from __future__ import annotations

import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import cloudpickle

from apportion.api.host_rank import HostJob
from apportion.api.running import RunRequest
from apportion.core.event import Event
from apportion.core.strategy import Strategy
from apportion.core.value import parse
from apportion.planner.auto import Planning
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.checkpoint.validation import refuse_started
from apportion.runtime.hosts.code_bundle import make_bundle, project_root, shipped_address, shipped_path
from apportion.runtime.hosts.hosts_run import HostsRun, Shipment

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
    given = asked.workload if isinstance(asked.workload, str) else None
    root = project_root(given, sys.modules["__main__"])
    shipped = replace(asked, address=_whole(asked.address))
    if given is not None:
        shipped = replace(shipped, workload=shipped_address(given))
    payload = cloudpickle.dumps(HostJob(asked=shipped, strategy=strategy, launcher=launcher, planning=planning))
    if len(payload) > MOST_JOB_BYTES:
        raise ValueError(
            f"the pickled workload has {len(payload):,} bytes, and {MOST_JOB_BYTES >> 20} MB go to the hosts at most: "
            "data are not sent; have data= open them on each host"
        )
    shipment = Shipment(code=make_bundle(root), root=root, path=shipped_path(root), payload=payload)
    job = asked.job(strategy or parse(UNKNOWN, "apportion.strategies"), launcher, 1)
    yield from HostsRun(job, launcher, shipment, chooses=strategy is None).events()


def _whole(address: str | None) -> str | None:
    """Returns an address that means the same file in whatever folder it is read."""
    place, _, name = (address or "").rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else address
