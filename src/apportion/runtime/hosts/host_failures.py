"""What happens to the ranks of several hosts, as the events that ``decisions`` decides about, and how a host is named
in what is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from apportion.runtime.supervisor.decisions import Stop
from apportion.runtime.supervisor.failures import WorkerEvent, WorkerExited, WorkerFinished, WorkerRaised

RESUME = "--resume goes on"
"""The advice that ends the cause of a loss."""
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


def rank_at_host(cause: str, rank: int, host: str, root: str) -> str:
    """Returns the cause of a failure with the host of its rank. ``root``: the folder whose modules were sent to the
    hosts."""
    name = f"rank {rank}"
    if not cause.startswith(name):
        cause = f"{name} on host {host}: {cause}"
    elif not cause.startswith(f"{name} on host "):
        cause = f"{name} on host {host}{cause.removeprefix(name)}"
    if "ModuleNotFoundError" in cause:
        cause = f"{cause}; {MODULES_HINT.format(root=root)}"
    return cause


def at_host(stop: Stop, host: str, root: str) -> Stop:
    """Returns a decision to stop whose cause names the host of the rank. What is wrong for all ranks alike names none.
    ``root``: the folder whose modules were sent to the hosts."""
    if stop.mistake or stop.differs:
        return stop
    cause = rank_at_host(stop.cause, stop.rank, host, root)
    if stop.traceback is None and "ModuleNotFoundError" not in cause and not cause.endswith(RESUME):
        cause = f"{cause}; {RESUME}"
    return replace(stop, cause=cause)


def unresumed(cause: str) -> str:
    """Returns the cause of a failure without the advice to go on from a checkpoint, for what leaves none."""
    return cause.removesuffix(RESUME).removesuffix("; ")
