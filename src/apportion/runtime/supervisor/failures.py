"""The events that can happen to the workers of a run, and the texts that report them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerRaised:
    """A worker reported an exception of its own."""

    rank: int
    summary: str
    """The type and the message of the exception in one line."""
    traceback: str | None
    """The traceback of the exception; None where the message alone says it all."""
    mistake: bool = False
    """True for a ValueError of this package: the user's mistake."""
    symptom: bool = False
    """True where the worker lost another rank, so that the cause is to be found there."""
    where: str | None = None
    """The line of the user's own code, such as "file.py:12 in forward: return 1 / 0"."""
    checkpoint: bool = False
    """True where the worker could not save the state, or cannot trust what was saved."""
    not_finite: bool = False
    """True where the loss or a weight is not finite: nothing worth keeping has come after the last checkpoint."""
    state_lost: bool = False
    """True where none of the workers that are left has the state."""
    differs: bool = False
    """True where the ranks no longer hold the same values where they must."""
    step: int = 0
    """The number of updates that the worker had seen made."""


@dataclass(frozen=True)
class WorkerExited:
    """A worker process ended."""

    rank: int
    returncode: int
    """The exit status of the process; negative for a signal."""
    out_of_memory: bool = False
    """True where the kernel says that it killed processes of this host or container for memory meanwhile."""
    step: int = 0
    """The number of updates that the worker had seen made."""
    host: str = ""
    """The name of the worker's host, where there are several."""


@dataclass(frozen=True)
class HostLost:
    """A host takes part in nothing more: its agent has ended, or it could not be heard for too long."""

    ranks: tuple[int, ...]
    host: str
    why: str
    step: int


@dataclass(frozen=True)
class WorkerFinished:
    """A worker reported that it is done."""

    rank: int


@dataclass(frozen=True)
class WorkerStalled:
    """Ranks that have not moved for longer than they may, while others wait for them."""

    ranks: tuple[int, ...]
    step: int
    seconds: float
    stopped: bool = False
    """True where the processes of the ranks are stopped, as by SIGSTOP."""
    silent: bool = False
    """True where the ranks did not answer when another one was lost."""
    hosts: tuple[str, ...] = ()
    """The name of the host of each rank of the run, in their order, where there are several hosts."""


@dataclass(frozen=True)
class WorkerBegan:
    """Every worker has built its step: there is a state to go on from."""


@dataclass(frozen=True)
class WorkerLost:
    """The loss of a worker."""

    rank: int
    cause: str
    step: int
    """The number of updates that the worker had seen made."""


@dataclass(frozen=True)
class Notice:
    """Something that the user is to know, and that is not a loss, or not one any longer."""

    rank: int
    cause: str
    action: str


@dataclass(frozen=True)
class WorkersChanged:
    """The supervisor has taken the lost workers out of the run, and put others in their places or not. What happens
    from here on happens to the ranks of the new world."""

    losses: tuple[WorkerLost, ...]
    workers: int
    """The number of workers in the run now."""
    restarted: bool = False
    """True where all workers are new ones, which have to begin."""


WorkerEvent = WorkerRaised | WorkerExited | HostLost | WorkerFinished | WorkerStalled | WorkerBegan | WorkersChanged


# In words

_ENDED_BY = ("SIGTERM", "SIGINT", "SIGHUP")


def was_ended(death: WorkerExited) -> bool:
    """Tells whether the signal that ended the worker is one by which a person or the system asks a process to end."""
    return _signal_name(-death.returncode) in _ENDED_BY


def death_text(death: WorkerExited) -> str:
    """Returns why a worker ended, and the cure."""
    who = f"rank {death.rank} on host {death.host}" if death.host else f"rank {death.rank}"
    if death.returncode >= 0:
        return (
            f"{who} ended with exit status {death.returncode} before it was done: "
            "something in the model or the data called exit, or a library ended the process"
        )
    name = _signal_name(-death.returncode)
    if name == "SIGKILL" and death.out_of_memory:
        return f"{who} was killed for want of memory ({name}): use fewer workers or a smaller batch_size"
    if name == "SIGKILL":
        return (
            f"{who} was killed by SIGKILL: by hand, or by the system for want of memory (then use fewer "
            "workers or a smaller batch_size)"
        )
    if name in _ENDED_BY:
        return f"{who} was ended by {name}: someone, or the system, stopped it"
    return (
        f"{who} crashed in native code ({name}): in an extension, or in a library that does not fit this "
        "machine; PYTHONFAULTHANDLER=1 shows where"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns some ranks in words: "rank 1", "ranks 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def host_text(lost: HostLost) -> str:
    """Returns why a host is lost, and which ranks were on it; ``decisions`` adds how to go on, where that is
    the advice."""
    why = lost.why.removeprefix(f"host {lost.host}: ").removesuffix("; resume=True goes on")
    return f"host {lost.host} is lost with {ranks_text(lost.ranks)}: {why}"


def late_text(late: WorkerStalled) -> str:
    """Returns how long the ranks kept the others waiting, and why."""
    by_host: dict[str, list[int]] = {}
    for rank in late.ranks if late.hosts else ():
        by_host.setdefault(late.hosts[rank], []).append(rank)
    ranks = " and ".join(f"{ranks_text(r)} on host {h}" for h, r in by_host.items()) or ranks_text(late.ranks)
    has, waited = "have" if len(late.ranks) > 1 else "has", f"others waited {late.seconds:.0f} s at step {late.step}"
    if late.stopped:
        return f"{ranks} {has} been stopped (SIGSTOP, or a debugger) for {late.seconds:.0f} s at step {late.step}"
    if late.silent:
        return f"{ranks} {has} not answered for {late.seconds:.1f} s at step {late.step}, when another was lost"
    return (
        f"{ranks} {has} not moved, and {waited}: a deadlock in the model or the data, a device or file system that "
        "does not answer, or too little memory; the Python stacks of all ranks are on standard error"
    )
