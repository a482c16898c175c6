"""What can happen to the workers of a run, and how it is told."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerRaised:
    """A worker reported an exception of its own."""

    rank: int
    summary: str
    """One line: the type and the message."""
    traceback: str | None
    """None where the message alone says it all."""
    mistake: bool = False
    """A ValueError of ours: the user's mistake."""
    symptom: bool = False
    """It lost another rank: look for the cause there."""
    where: str | None = None
    """The user's own line, "file.py:12 in forward: return 1 / 0"."""
    checkpoint: bool = False
    """It could not keep the state, or cannot trust what was kept."""
    not_finite: bool = False
    """The loss, or a weight, is not finite: nothing that is worth keeping has come after the last checkpoint."""
    state_lost: bool = False
    """Nobody who is left has the state."""
    differs: bool = False
    """The ranks no longer hold alike what they must."""
    step: int = 0
    """Updates that it had seen made."""


@dataclass(frozen=True)
class WorkerExited:
    """A worker process ended."""

    rank: int
    returncode: int
    """Negative for a signal."""
    out_of_memory: bool = False
    """The kernel says that it killed processes of this host or container for memory meanwhile."""
    step: int = 0
    """Updates that it had seen made."""


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
    """Their processes are stopped, as by SIGSTOP."""
    silent: bool = False
    """They did not answer when another one was lost."""


@dataclass(frozen=True)
class WorkerBegan:
    """Every worker has built its step: there is a state to go on from."""


@dataclass(frozen=True)
class WorkerLost:
    """Of a worker."""

    rank: int
    cause: str
    step: int
    """Updates that it had seen made."""


@dataclass(frozen=True)
class WorkersChanged:
    """The supervisor has taken these workers out of the run, and put others in their places or not. What happens from
    here on happens to the ranks of the new world."""

    losses: tuple[WorkerLost, ...]
    workers: int
    """In the run now."""
    restarted: bool = False
    """All workers are others, and have to begin."""


WorkerEvent = WorkerRaised | WorkerExited | WorkerFinished | WorkerStalled | WorkerBegan | WorkersChanged


# In words

_ENDED_BY = ("SIGTERM", "SIGINT", "SIGHUP")


def was_ended(death: WorkerExited) -> bool:
    """By someone, or the system, who wanted it to end."""
    return _signal_name(-death.returncode) in _ENDED_BY


def death_text(death: WorkerExited) -> str:
    """Why it ended, and the cure."""
    if death.returncode >= 0:
        return (
            f"rank {death.rank} ended with exit status {death.returncode} before it was done: "
            "something in the model or the data called exit, or a library ended the process"
        )
    name = _signal_name(-death.returncode)
    if name == "SIGKILL" and death.out_of_memory:
        return f"rank {death.rank} was killed for want of memory ({name}): use fewer workers or a smaller batch_size"
    if name == "SIGKILL":
        return (
            f"rank {death.rank} was killed by SIGKILL: by hand, or by the system for want of memory (then use fewer "
            "workers or a smaller batch_size)"
        )
    if name in _ENDED_BY:
        return f"rank {death.rank} was ended by {name}: someone, or the system, stopped it"
    return (
        f"rank {death.rank} crashed in native code ({name}): in an extension, or in a library that does not fit this "
        "machine; PYTHONFAULTHANDLER=1 shows where"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def late_text(late: WorkerStalled) -> str:
    """How long they kept the others waiting, and why."""
    ranks = f"rank{'s' if len(late.ranks) > 1 else ''} {', '.join(map(str, late.ranks))}"
    has, waited = "have" if len(late.ranks) > 1 else "has", f"others waited {late.seconds:.0f} s at step {late.step}"
    if late.stopped:
        return f"{ranks} {has} been stopped (SIGSTOP, or a debugger), and {waited}"
    if late.silent:
        return f"{ranks} {has} not answered for {late.seconds:.1f} s at step {late.step}, when another was lost"
    return (
        f"{ranks} {has} not moved, and {waited}: a deadlock in the model or the data, a device or file system that "
        "does not answer, or too little memory"
    )
