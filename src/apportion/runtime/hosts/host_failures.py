"""What happens to the ranks of several hosts, as the events that ``decisions`` decides about, and how a host is named
in the reports of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from apportion.runtime.supervisor.failures import Stop, WorkerRaised

RESUME = "resume=True goes on"
"""The advice that ends the cause of a loss."""
MODULES_HINT = "only the Python files below {root} were sent to the hosts: install other modules on each of them"


def raised_event(message: Mapping[str, Any], rank: int, step: int) -> WorkerRaised:
    """Returns the exception that a rank has reported. ``step``: the number of updates that it has seen made."""
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


def rank_at_host(cause: str, rank: int, host: str, root: str = "") -> str:
    """Returns the cause of a failure with the host of its rank. ``root``: the folder whose modules were sent to the
    hosts."""
    name = f"rank {rank}"
    if cause.startswith(("host ", "ranks ")):  # a host that is lost with its ranks, or several ranks and their hosts
        return cause
    if not cause.startswith(name):
        cause = f"{name} on host {host}: {cause}"
    elif not cause.startswith(f"{name} on host "):
        cause = f"{name} on host {host}{cause.removeprefix(name)}"
    if "ModuleNotFoundError" in cause:
        cause = f"{cause}; {MODULES_HINT.format(root=root)}"
    return cause


def at_host(stop: Stop, host: str, root: str, *, is_saved: bool = True) -> Stop:
    """Returns a decision to stop whose cause names the host of the rank. What is wrong for all ranks alike names none.
    ``root``: the folder whose modules were sent to the hosts; ``is_saved``: there is a checkpoint to go on from."""
    if stop.mistake or stop.differs:
        return stop
    cause = rank_at_host(stop.cause, stop.rank, host, root)
    if not is_saved:
        cause = unresumed(cause)
    elif stop.traceback is None and "ModuleNotFoundError" not in cause and not cause.endswith(RESUME):
        cause = f"{cause}; {RESUME}"
    return replace(stop, cause=cause)


def unresumed(cause: str) -> str:
    """Returns the cause of a failure without the advice to go on from a checkpoint, for what leaves none."""
    return cause.removesuffix(RESUME).removesuffix("; ")
