"""What happens to the ranks of several hosts, as the events that ``decisions`` decides about, and how a host is named
in what is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from apportion.runtime.supervisor.decisions import Stop
from apportion.runtime.supervisor.failures import WorkerRaised

MODULES_HINT = "only the Python files below {root} were sent to the hosts: install other modules on each of them"


def raised_event(message: Mapping[str, Any], rank: int, step: int) -> WorkerRaised:
    """Returns what a rank has told of its exception. ``step``: the number of updates that it has seen made."""
    return WorkerRaised(
        rank=rank,
        summary=message["summary"],
        traceback=message["traceback"],
        mistake=message["mistake"],
        symptom=message["symptom"],
        where=message["where"],
        checkpoint=message["checkpoint"],
        not_finite=message["not_finite"],
        state_lost=message["state_lost"],
        differs=message["differs"],
        step=step,
    )


def at_host(stop: Stop, host: str, root: str) -> Stop:
    """Returns a decision to stop whose cause names the host of the rank. What is wrong for all ranks alike names none.
    ``root``: the folder whose modules were sent to the hosts."""
    if stop.mistake or stop.differs:
        return stop
    cause, rank = stop.cause, f"rank {stop.rank}"
    if cause.startswith(rank) and not cause.startswith(f"{rank} on host"):
        cause = f"{rank} on host {host}{cause.removeprefix(rank)}"
    elif not cause.startswith((f"{rank} on host", "host ")):
        cause = f"{rank} on host {host}: {cause}"
    if "ModuleNotFoundError" in cause:
        cause = f"{cause}; {MODULES_HINT.format(root=root)}"
    elif stop.traceback is None and not stop.cause.endswith("--resume goes on"):
        cause = f"{cause}; --resume goes on"
    return replace(stop, cause=cause)
