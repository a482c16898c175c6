"""The decisions on when a request is answered, and from which members: pure functions of what has happened and what
time it is.

::

    members a b c, quorum 2                    deadline
    a  ---- answers                               |
    b  -------- answers                           |       from a, b and c as soon as all three are there;
    c  ------------------ answers                 |
    c  ------------------------------------------ | --    from a and b at the deadline; c is late
    b, c  -------------------------------------- -| --    DeadlineExceeded: a alone is not a quorum
    b, c  --- die                                         NoQuorum at once: no member is left to wait for

One absolute deadline (of the host's monotonic clock) travels with a request through every queue and process. Answers
that come after the outcome change nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from apportion.serving.errors import DeadlineExceeded, NoQuorum


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, as members in the order in which they were named: ``used`` are those whose outputs it is made of."""

    used: tuple[str, ...]
    late: tuple[str, ...]
    """The members that were waited for and had not answered when the time was up."""
    failed: tuple[str, ...]
    """The members that died over the request or refused it."""
    absent: tuple[str, ...]
    """The members that were not waited for: down, or left out for being late too often."""

    @property
    def degraded(self) -> bool:
        """Return whether a member is missing, so that the answer may differ from that of all members together."""
        return bool(self.late or self.failed or self.absent)


@dataclass(frozen=True, kw_only=True)
class QuorumState:
    """The members' answers to one request, as far as they have come."""

    members: tuple[str, ...]
    """The names of all members that the request is for."""
    awaited: frozenset[str]
    """The members that were asked and are waited for. Others may be asked as well (a probe), and count if they are in
    time."""
    quorum: int
    deadline: float
    answered: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    expired: frozenset[str] = frozenset()
    """The members that have said themselves that the deadline passed before they had an answer."""

    def __post_init__(self) -> None:
        check_quorum(self.quorum, self.members)
        # Asserted once for each selection of members, and not for every request: see ``until``.
        strangers = self.awaited - set(self.members)
        assert not strangers, f"awaited {sorted(strangers)} of {self.members}"

    def with_answer(self, member: str) -> QuorumState:
        """Return the state after a member has answered; one that had failed before may answer too."""
        return self._with(self.answered | {member}, self.failed - {member}, self.expired - {member})

    def with_failure(self, member: str) -> QuorumState:
        """Return the state after a member has failed; an answer that it gave before stays."""
        return self if member in self.answered else self._with(self.answered, self.failed | {member}, self.expired)

    def with_expired(self, member: str) -> QuorumState:
        """Return the state after a member has said that its time is up; an answer that it gave before stays."""
        return self if member in self.answered else self._with(self.answered, self.failed, self.expired | {member})

    def until(self, deadline: float) -> QuorumState:
        """Return the state with another deadline, without checking again what has not changed."""
        made = object.__new__(QuorumState)
        made.__dict__.update(self.__dict__, deadline=deadline)
        return made

    def _with(self, answered: frozenset[str], failed: frozenset[str], expired: frozenset[str]) -> QuorumState:
        """Do what ``dataclasses.replace`` does, without checking again what has not changed."""
        made = object.__new__(QuorumState)
        made.__dict__.update(self.__dict__, answered=answered, failed=failed, expired=expired)
        return made

    @property
    def open(self) -> frozenset[str]:
        """The members that are still waited for."""
        return self.awaited - self.answered - self.failed - self.expired

    def outcome(self, now: float) -> Answer | DeadlineExceeded | NoQuorum | None:
        """Return the outcome of the request; None where it is still to wait, at most until the deadline."""
        waited_for, reached = self.open, len(self.answered) >= self.quorum
        if reached and (not waited_for or now >= self.deadline):
            return self._answer()
        # Those that are still open could all answer: only if even that would not reach the quorum is waiting pointless.
        unreachable = len(self.answered) + len(waited_for) < self.quorum or (not waited_for and not self.awaited)
        # What a client is to do next depends on the time alone, also where members have failed as well: a member's
        # word that its time is up may come before this process's own timer.
        if now >= self.deadline or (self.expired and unreachable):
            late = waited_for | self.expired
            return DeadlineExceeded(f"the deadline passed before {self._names(late)} answered: {self._needs}")
        if not self.awaited and unreachable and not self.answered:
            return NoQuorum(f"none of the members {', '.join(self.members)} is up: {self._needs}")
        if unreachable:
            return NoQuorum(f"{self._names(self.failed)} failed: {self._needs}")
        return None

    @property
    def _needs(self) -> str:
        return f"{len(self.answered)} answered of the {self.quorum} that the quorum needs"

    def _names(self, some: Collection[str]) -> str:
        return ", ".join(self._in_order(some)) or "no member"

    def _answer(self) -> Answer:
        if len(self.answered) == len(self.members):
            return Answer(used=self.members, late=(), failed=(), absent=())
        return Answer(
            used=self._in_order(self.answered),
            late=self._in_order(self.open | self.expired),
            failed=self._in_order(self.failed),
            absent=self._in_order(set(self.members) - self.answered - self.failed - self.expired - self.awaited),
        )

    def _in_order(self, some: Collection[str]) -> tuple[str, ...]:
        return tuple(member for member in self.members if member in some)


def check_quorum(quorum: int, members: Collection[str]) -> None:
    """Raise ValueError where the quorum can never be reached, or is less than one member."""
    if not 1 <= quorum <= len(members):
        raise ValueError(f"quorum={quorum} of {len(members)} members: it is one member at least and all at most")


def absolute_deadline(now: float, seconds: float | None, default: float) -> float:
    """Return the absolute deadline of a request that asks for ``seconds``; None takes the server's own."""
    return now + (default if seconds is None else seconds)
