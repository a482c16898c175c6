"""The verbs that return a value, as ranks carry them out together for a driver that is none of them: each returns plain
JSON, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from apportion.api.launched.comparison import compare_launched
from apportion.api.launched.planning import plan_by_ranks
from apportion.api.launched.proof import check_launched
from apportion.comm.group import collective
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.runtime.agents.hosts_launcher import HostsLauncher


@collective
def _check(workload: Workload | str, launcher: HostsLauncher, *, strategy: Strategy, steps: int) -> dict[str, Any]:
    return check_launched(workload, strategy, launcher, steps=steps).to_json()


@collective
def _compare(
    workload: Workload | str, launcher: HostsLauncher, *, strategies: Sequence[Strategy], steps: int, every: bool
) -> list[dict[str, Any]]:
    rows = compare_launched(workload, strategies, launcher, steps=steps, path=None, every=every)
    return [asdict(row) for row in rows]


ANSWERS: Mapping[str, Callable[..., Any]] = {"check": _check, "compare": _compare, "plan": plan_by_ranks}
"""The verbs by name. Each is given the workload, the launcher, and its own options."""
