"""What a worker process is given to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from apportion.address import load_workload
from apportion.strategy import Strategy
from apportion.supervise import Policy
from apportion.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Job:
    """A workload under a strategy, and what to do with it."""

    workload: Workload | str
    """Itself, or its address: then each process imports it anew."""
    strategy: Strategy
    launcher: str = "local"
    """As it is written."""
    threads: int = 1
    device: str | None = None
    loaders: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the workload to replace, for example ``{"steps": 100}``."""
    run_dir: str | None = None
    """None: nothing is written."""
    resume: bool = False
    policy: Policy = field(default_factory=Policy)
    address: str | None = None
    """Where the workload can be found again."""

    def open(self) -> Workload:
        """The workload, imported where it is an address, with the changes."""
        workload = load_workload(self.workload) if isinstance(self.workload, str) else self.workload
        return replace(workload, **self.changes)
