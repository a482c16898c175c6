"""What goes to every host of a run, or of another verb, on several hosts: the code, and the job that its ranks open."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from apportion.core.place_names import split_address
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.hosts.code_bundle import make_bundle, project_root, shipped_address, shipped_path
from apportion.runtime.hosts.started_hosts import Shipment

MOST_JOB_BYTES = 64 << 20
"""The most bytes of a pickled workload."""


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """What every rank of a run on several hosts is given."""

    asked: Any
    """The ``RunRequest``; where its workload is an address, it is one below the folder of the run's code."""
    strategy: Strategy | None
    """The strategy; None: the ranks choose one."""
    launcher: HostsLauncher
    planning: Any
    """The ``Planning`` by which they do."""
    replaceable: bool = False
    """True where other processes may take the places of ranks that are lost."""
    ranks: int = 2
    """About how many ranks there are: a spare gets ready for the share of one of them."""


@dataclass(frozen=True, kw_only=True)
class HostVerb:
    """What every rank is given of a verb that returns a value."""

    verb: Any
    """The ``api.verb.Verb``; where its workload is an address, it is one below the folder of the run's code."""
    launcher: HostsLauncher


def shipped_workload(workload: Workload | str) -> Workload | str:
    """Returns the workload as the hosts are given it: its address below the folder of its code."""
    return shipped_address(workload) if isinstance(workload, str) else workload


def shipment_of(workload: Workload | str, given: HostJob | HostVerb) -> Shipment:
    """Returns what goes to every host. Raises ValueError where it is too much."""
    root = project_root(workload if isinstance(workload, str) else None, sys.modules["__main__"])
    payload = cloudpickle.dumps(given)
    if len(payload) > MOST_JOB_BYTES:
        raise ValueError(
            f"the pickled workload has {len(payload):,} bytes, and {MOST_JOB_BYTES >> 20} MB go to the hosts at most: "
            "data are not sent; have data= open them on each host"
        )
    return Shipment(code=make_bundle(root), root=root, path=shipped_path(root), payload=payload)


def whole_address(address: str | None) -> str | None:
    """Returns an address that means the same file in whatever folder it is read."""
    if address is None or not (parts := split_address(address)).place.endswith(".py"):
        return address
    return parts.at(str(Path(parts.place).resolve()))
