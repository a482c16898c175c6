"""The events that can happen to the workers of a run, and the texts that report them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from apportion.core.policy import Policy
from apportion.errors import CheckpointError, NotFinite, RanksDiffer, WorkerFailed


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


# Decides what to do about what happened to the workers, by pure functions. The supervisor does the I/O around them.
#
# A worker that is lost (killed, crashed, stopped) is replaced, or the others go on without it, as the policy says and
# where the strategy survives that: ``max_restarts`` times in a run; the next loss stops it. What the program itself
# does (an exception, an exit) stops the run at once: a replacement would do the same. The workers that are left then
# save the last update.


CAUSE_SECONDS = 1.0
"""The seconds that the cause has to arrive after a symptom (a lost peer)."""
REPEATS = 3
"""A rank that is lost this many times at one step, with no update in between, will be lost there again."""


# What to do about it


@dataclass(frozen=True)
class GoOn:
    """Nothing is to be done yet; look again after ``seconds``, or when something happens."""

    seconds: float | None = None


@dataclass(frozen=True)
class Finish:
    """Every rank is done."""


@dataclass(frozen=True)
class Stop:
    """The run cannot go on: end every process and tell why."""

    rank: int
    cause: str
    """The cause of the stop, in one line where it can be said in one."""
    traceback: str | None = None
    where: str | None = None
    """The line of the user's own code that raised the exception."""
    mistake: bool = False
    checkpoint: bool = False
    not_finite: bool = False
    differs: bool = False
    """True where the ranks no longer hold one state, so there is none to be saved."""
    lost: tuple[int, ...] = ()
    """The ranks without which the others can save the last update first; empty: no rank can save it."""
    host: str = ""
    """The host of the rank when this was decided, where there are several: those that are left are numbered anew."""


@dataclass(frozen=True)
class Replace:
    """Slot new workers in place of the lost ones; the others go on from the last update."""

    losses: tuple[WorkerLost, ...]


@dataclass(frozen=True)
class Shrink:
    """Go on without the lost workers."""

    losses: tuple[WorkerLost, ...]


@dataclass(frozen=True)
class Restart:
    """End every worker and begin again, from the last checkpoint where there is one: no worker has a state to go on
    from."""

    losses: tuple[WorkerLost, ...]


Action = GoOn | Finish | Stop | Replace | Shrink | Restart


def next_action(
    happened: Sequence[WorkerEvent],
    workers: int,
    seconds: float,
    *,
    policy: Policy | None = None,
    survives: bool = False,
    restarts: bool = False,
) -> Action:
    """Decides after all of these events, in the order in which they arrived, ``seconds`` after the last of them.

    ``workers``: the number that the run began with. ``survives``: the strategy can lose a worker; ``restarts``: where
    it cannot, all begin again from the last checkpoint. The first real cause wins: an exception, then a death by a
    signal, then a rank that does not move. A lost peer or a closed connection is a symptom, and waits a little for its
    cause.
    """
    seen = _Evidence(happened, workers)
    action = _decide(seen, seconds, policy or Policy(), survives=survives, restarts=restarts)
    final = isinstance(action, Stop) and (action.mistake or action.checkpoint or action.not_finite or action.differs)
    if isinstance(action, Stop) and survives and not final:
        return replace(action, lost=seen.gone if seen.can_save else ())
    return action


def _decide(seen: _Evidence, seconds: float, policy: Policy, *, survives: bool, restarts: bool) -> Action:
    for raised in seen.raised:
        if not raised.symptom and not (raised.state_lost and survives):
            return _stop(raised)
    if seen.losses:
        if not survives and not restarts:
            return Stop(seen.losses[0].rank, seen.losses[0].cause + seen.cure)
        if seen.exits:
            return Stop(seen.exits[0].rank, death_text(seen.exits[0]))
        if not seen.finished:
            return _with_losses(seen, policy, survives)
    # After the losses: ranks that wait for one that was lost are not late by themselves.
    if seen.late is not None:
        return Stop(seen.late.ranks[0], late_text(seen.late))
    if seen.exits or seen.symptoms:
        # A rank that lost its peer often reports that before the peer's own exit is seen, and would be blamed for it.
        if seconds < CAUSE_SECONDS:
            return GoOn(CAUSE_SECONDS - seconds)
        return Stop(seen.exits[0].rank, death_text(seen.exits[0])) if seen.exits else _stop(seen.symptoms[0])
    # A rank is done when all have arrived at the end: one that is lost after that had nothing more to do.
    return Finish() if len(seen.finished | {loss.rank for loss in seen.losses}) >= seen.workers else GoOn()


class _Evidence:
    """Sorts what happened: what happened to the world as it is now, and the losses before."""

    def __init__(self, happened: Sequence[WorkerEvent], workers: int) -> None:
        changes = [(at, h) for at, h in enumerate(happened, 1) if isinstance(h, WorkersChanged)]
        self.workers = changes[-1][1].workers if changes else workers
        """The number of workers in the run now."""
        self.before = [loss for _, change in changes for loss in change.losses]
        started = max((at for at, change in changes if change.restarted), default=0)
        # Ranks are numbered anew by each change: what was reported of rank 1 before it is about another worker.
        now = happened[changes[-1][0] :] if changes else happened
        self.raised = [h for h in now if isinstance(h, WorkerRaised)]
        self.finished = {h.rank for h in now if isinstance(h, WorkerFinished)}
        self.symptoms = [h for h in self.raised if not h.state_lost]
        self.state_lost = next((h for h in self.raised if h.state_lost), None)
        self.has_state = self.state_lost is None and any(isinstance(h, WorkerBegan) for h in happened[started:])
        """True where every worker has begun and the state is still there."""
        ended = [h for h in now if isinstance(h, WorkerExited) and h.rank not in self.finished]
        raised = {h.rank for h in self.raised}
        self.exits = [h for h in ended if h.returncode >= 0 and h.rank not in raised]
        """The exits by the program itself, not by a signal."""
        late = [h for h in now if isinstance(h, WorkerStalled)]
        self.late = next((h for h in late if not (h.stopped or h.silent)), None)
        hosts = [h for h in now if isinstance(h, HostLost)]
        together = {rank for h in late for rank in h.ranks} | {rank for h in hosts for rank in h.ranks}
        self.gone = tuple(sorted(raised | {h.rank for h in ended} | together))
        """The ranks that take part in nothing more."""
        self.cure = ""
        """The advice to resume, where it was not the run's fault that the first of the ranks was lost; else empty."""
        self.losses = self._losses([h for h in now if h in late or h in hosts or (h in ended and h.rank not in raised)])

    @property
    def can_save(self) -> bool:
        """True where the others have a last update that is not saved yet."""
        return self.has_state and not self.finished and len(self.gone) < self.workers

    def _losses(self, troubles: Sequence[WorkerEvent]) -> tuple[WorkerLost, ...]:
        """Returns one loss for each lost rank, in the order in which they were noticed."""
        lost: dict[int, WorkerLost] = {}
        for h in troubles:
            if isinstance(h, WorkerExited) and h.returncode < 0:
                self.cure = self.cure or _RESUME * (not lost and was_ended(h))
                lost.setdefault(h.rank, WorkerLost(h.rank, death_text(h), h.step))
            elif isinstance(h, HostLost):
                self.cure = self.cure or _RESUME * (not lost)
                for rank in set(h.ranks) - self.finished:
                    lost.setdefault(rank, WorkerLost(rank, host_text(h), h.step))
            elif isinstance(h, WorkerStalled) and (h.stopped or h.silent):
                self.cure = self.cure or _RESUME * (not lost)
                for rank in set(h.ranks) - self.finished:
                    lost.setdefault(rank, WorkerLost(rank, late_text(replace(h, ranks=(rank,))), h.step))
        if self.state_lost is not None:  # every rank reports it; it counts once
            h = self.state_lost
            lost.setdefault(h.rank, WorkerLost(h.rank, _stop(h).cause, h.step))
        return tuple(lost.values())


def _with_losses(seen: _Evidence, policy: Policy, survives: bool) -> Action:
    for loss in seen.losses:
        if sum((before.rank, before.step) == (loss.rank, loss.step) for before in seen.before) + 1 >= REPEATS:
            often = f"it has happened {REPEATS} times at step {loss.step}, which is not an accident"
            return Stop(loss.rank, f"{loss.cause}; {often}")
    if len(seen.before) + len(seen.losses) > policy.max_restarts:
        first, most = seen.losses[0], policy.max_restarts
        return Stop(first.rank, f"{first.cause}; the run may lose no more workers (max_restarts={most}){_RESUME}")
    if not survives or not seen.has_state:
        return Restart(seen.losses)
    shrinks = policy.on_loss == "shrink" and len(seen.losses) < seen.workers
    return Shrink(seen.losses) if shrinks else Replace(seen.losses)


_RESUME = "; resume=True goes on"


def _stop(raised: WorkerRaised) -> Stop:
    # What went wrong on behalf of the whole run is not about the rank that happened to find it.
    whose = "" if raised.traceback is None else f"rank {raised.rank}: "
    return Stop(
        raised.rank,
        f"{whose}{raised.summary}",
        raised.traceback,
        raised.where,
        mistake=raised.mistake,
        checkpoint=raised.checkpoint,
        not_finite=raised.not_finite,
        differs=raised.differs,
    )


def failure(stop: Stop) -> Exception:
    """Returns the exception that a decision to stop is raised as: the user's mistake, or what could not be done."""
    if stop.mistake:
        return ValueError(stop.cause)
    if stop.checkpoint:
        return CheckpointError(stop.cause)
    if stop.not_finite:
        return NotFinite(stop.cause, rank=stop.rank)
    if stop.differs:
        return RanksDiffer(stop.cause)
    return WorkerFailed(stop.cause, rank=stop.rank, traceback=stop.traceback, where=stop.where)
