"""What happens to the ranks of several hosts, as the events that ``decisions`` decides about, and how a host is named
in what is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from apportion.runtime.supervisor.decisions import Stop
from apportion.runtime.supervisor.failures import WorkerEvent, WorkerExited, WorkerFinished, WorkerRaised

MODULES_HINT = "only the Python files below {root} were sent to the hosts: install other modules on each of them"


def worker_event(message: Mapping[str, Any], step: int) -> WorkerEvent | None:
    """Returns what an agent tells of a rank as an event of a worker; None where it is none. ``step``: the number of
    updates that were seen made."""
    kind, rank = message["kind"], message.get("rank", 0)
    if kind == "finished":
        return WorkerFinished(rank)
    if kind == "exited":
        status = message["status"]
        return WorkerExited(rank, 1 if status is None else status, out_of_memory=message["out_of_memory"], step=step)
    if kind == "raised":
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
    return None


def host_of(rank: int, counts: Sequence[int]) -> int:
    """Returns the number of the host that a rank runs on. ``counts``: the ranks of each host."""
    first = 0
    for number, count in enumerate(counts):
        first += count
        if rank < first:
            return number
    raise ValueError(f"there is no rank {rank} among {first}")


def at_host(stop: Stop, host: str, root: str) -> Stop:
    """Returns a decision to stop whose cause names the host of the rank. What is wrong for all ranks alike names none.
    ``root``: the folder whose modules were sent to the hosts."""
    if stop.mistake or stop.differs:
        return stop
    cause, rank = stop.cause, f"rank {stop.rank}"
    if cause.startswith(rank):
        cause = f"{rank} on host {host}{cause.removeprefix(rank)}"
    else:
        cause = f"{rank} on host {host}: {cause}"
    if "ModuleNotFoundError" in cause:
        cause = f"{cause}; {MODULES_HINT.format(root=root)}"
    elif stop.traceback is None and not stop.cause.endswith("--resume goes on"):
        cause = f"{cause}; --resume goes on"
    return replace(stop, cause=cause)
