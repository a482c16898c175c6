"""What to do about what happened to the workers: pure decisions. The supervisor does the I/O around them."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from apportion.values import Value

CAUSE_SECONDS = 1.0
"""After a symptom (a lost peer), how long the cause has to arrive."""


@final
@dataclass(frozen=True, repr=False)
class Policy(Value):
    """How a run is kept safe."""

    checkpoint_every: str | None = None
    """"30 s", "20 steps" or "1 epoch"; None: every 2 s, or less often where that would cost over 5 % of the time."""
    keep: int = 2
    """Checkpoints kept, besides the best."""

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None:
            self.interval()
        if not isinstance(self.keep, int) or self.keep < 1:
            raise ValueError(f"keep={self.keep!r} must be a whole number of at least 1 checkpoint")

    def interval(self) -> tuple[float, str] | None:
        """(number, "s" | "steps" | "epochs"), None for automatic."""
        if self.checkpoint_every is None:
            return None
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(s|steps?|epochs?)\s*", str(self.checkpoint_every))
        if match is None or float(match[1]) <= 0:
            raise ValueError(f'checkpoint_every={self.checkpoint_every!r} must be like "30 s", "20 steps" or "1 epoch"')
        unit = match[2] if match[2] == "s" else match[2].rstrip("s") + "s"
        return float(match[1]), unit


# What can happen


@dataclass(frozen=True)
class Raised:
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


@dataclass(frozen=True)
class Exited:
    """A worker process ended."""

    rank: int
    returncode: int
    """Negative for a signal."""
    out_of_memory: bool = False
    """The kernel says that it killed processes of this host or container for memory meanwhile."""


@dataclass(frozen=True)
class Finished:
    """A worker reported that it is done."""

    rank: int


@dataclass(frozen=True)
class Late:
    """Ranks that have not moved for longer than they may, while others wait for them."""

    ranks: tuple[int, ...]
    step: int
    seconds: float
    stopped: bool = False
    """Their processes are stopped, as by SIGSTOP."""


Happening = Raised | Exited | Finished | Late


# What to do about it


@dataclass(frozen=True)
class GoOn:
    """Nothing to do yet; look again after so many seconds, or when something happens."""

    seconds: float | None = None


@dataclass(frozen=True)
class Finish:
    """Every rank is done."""


@dataclass(frozen=True)
class Stop:
    """The run cannot go on: end every process and tell why."""

    rank: int
    cause: str
    """In one line, where it can be said in one."""
    traceback: str | None = None
    where: str | None = None
    """The user's own line that raised."""
    mistake: bool = False
    checkpoint: bool = False


Action = GoOn | Finish | Stop


def next_action(happened: Sequence[Happening], workers: int, seconds: float) -> Action:
    """The decision after these happenings, in the order they arrived, ``seconds`` after the last of them.

    The first real cause wins: an exception, then a death by a signal, then a rank that does not move. A lost peer or
    a closed connection is a symptom, and waits a little for its cause.
    """
    finished = {h.rank for h in happened if isinstance(h, Finished)}
    raised = [h for h in happened if isinstance(h, Raised)]
    for r in raised:
        if not r.symptom:
            return _stop(r)
    told = {r.rank for r in raised}
    deaths = [h for h in happened if isinstance(h, Exited) and h.rank not in finished and h.rank not in told]
    for death in deaths:
        if death.returncode < 0:
            return Stop(death.rank, _death(death))
    for h in happened:
        if isinstance(h, Late):
            return Stop(h.ranks[0], _late(h))
    if deaths or raised:
        if seconds < CAUSE_SECONDS:
            return GoOn(CAUSE_SECONDS - seconds)
        if deaths:
            return Stop(deaths[0].rank, _death(deaths[0]))
        return _stop(raised[0])
    return Finish() if len(finished) == workers else GoOn()


def _stop(raised: Raised) -> Stop:
    # What went wrong on behalf of the whole run is not about the rank that happened to find it.
    whose = "" if raised.traceback is None else f"rank {raised.rank}: "
    return Stop(
        raised.rank,
        f"{whose}{raised.summary}",
        raised.traceback,
        raised.where,
        mistake=raised.mistake,
        checkpoint=raised.checkpoint,
    )


def _death(death: Exited) -> str:
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
    if name in ("SIGTERM", "SIGINT", "SIGHUP"):
        return f"rank {death.rank} was ended by {name}: someone, or the system, stopped it; --resume goes on"
    return (
        f"rank {death.rank} crashed in native code ({name}): in an extension, or in a library that does not fit this "
        "machine; PYTHONFAULTHANDLER=1 shows where"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _late(late: Late) -> str:
    ranks = f"rank{'s' if len(late.ranks) > 1 else ''} {', '.join(map(str, late.ranks))}"
    has, waited = "have" if len(late.ranks) > 1 else "has", f"others waited {late.seconds:.0f} s at step {late.step}"
    if late.stopped:
        return f"{ranks} {has} been stopped (SIGSTOP, or a debugger), and {waited}: --resume goes on"
    return (
        f"{ranks} {has} not moved, and {waited}: a deadlock in the model or the data, a device or file system that "
        "does not answer, or too little memory"
    )
