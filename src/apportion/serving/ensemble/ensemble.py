"""An ensemble of several members as one model: which members are asked, which are waited for, and what their answers
come to.

The decisions are pure (deadline.py, circuit_breaker.py, aggregation.py); here they meet the clock, the queues and the
callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from apportion.serving.ensemble.aggregation import Aggregation, combined
from apportion.serving.ensemble.deadline import Answer, QuorumState
from apportion.serving.errors import DeadlineExceeded, NoQuorum, Overloaded
from apportion.serving.pool.dynamic_batcher import Lost, MemberTask, Outcome, Refused
from apportion.serving.pool.frames import Lease, Placed
from apportion.serving.pool.member import Member
from apportion.serving.protocol.datatypes import Array
from apportion.serving.runtimes.runtime import Expired, Spec

MOST_STATES = 1000
"""The number of states without an answer that are remembered, one for each selection of members that are waited for."""
SLOW = 4.0
"""The factor by which a member's slowdown (``ServiceTimes.slowdown``) may exceed the median of the others' where it
answers last: beyond it the answer holds all others up, and counts as late, though it is used."""


@dataclass(frozen=True)
class EnsembleResult:
    """The answer of the members, and the outputs that they were combined to."""

    answer: Answer
    outputs: list[Array]


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request for these members, until this deadline. ``held``: the memory in which the tensors lie."""

    tensors: Sequence[Placed]
    rows: int
    deadline: float
    names: tuple[str, ...]
    held: Sequence[Lease] = ()
    combined: bool = True
    """Tells whether the outputs are those of the ensemble, or a member's own."""


@dataclass(eq=False)
class Ensemble:
    """The members that answer as one model. ``members``: by name; a ``Member`` that has several names gives their
    outputs one after the other."""

    members: dict[str, Member]
    quorum: int
    aggregation: Aggregation = "mean"
    weights: dict[str, float] | None = None
    specs: Mapping[str, tuple[tuple[Spec, ...], tuple[Spec, ...]]] = field(default_factory=dict)
    """The inputs and outputs of each member by its name, in the order of the first one's, which are the ensemble's."""
    reserve: float = 0.001
    """The seconds before the deadline in which an answer is put together and sent."""
    missed: Callable[[str], None] = lambda member: None
    """Called with the name of a member that was waited for, for each deadline that it has missed."""

    _unanswered: dict[tuple[tuple[str, ...], tuple[str, ...]], QuorumState] = field(default_factory=dict)

    @property
    def distinct_members(self) -> list[Member]:
        """The ``Member`` objects, each of them once."""
        return list(dict.fromkeys(self.members.values()))

    def ask(self, question: InferenceRequest, report: Callable[[EnsembleResult | Exception], None]) -> PendingRequest:
        """Ask the members, and take what they answer by the deadline. ``report`` is called once, perhaps at once: with
        the result, or with DeadlineExceeded, NoQuorum, Overloaded, or Refused where the models do not take these
        inputs."""
        asking = PendingRequest(self, question, report)
        asking.begin()
        return asking

    async def infer(self, question: InferenceRequest) -> EnsembleResult:
        """Ask the members as ``ask`` does, and wait for the result; raises the error where there is none."""
        future: asyncio.Future[EnsembleResult] = asyncio.get_running_loop().create_future()

        def report(found: EnsembleResult | Exception) -> None:
            if future.done():
                return
            if isinstance(found, EnsembleResult):
                future.set_result(found)
            else:
                future.set_exception(found)

        asking = self.ask(question, report)
        try:
            return await future
        finally:
            asking.abandon()

    def unanswered(self, names: tuple[str, ...], awaited: tuple[str, ...], quorum: int) -> QuorumState:
        """Return the state of a request before the first answer, which most requests have in common."""
        if (known := self._unanswered.get((names, awaited))) is None:
            known = QuorumState(members=names, awaited=frozenset(awaited), quorum=quorum, deadline=0.0)
            if len(self._unanswered) < MOST_STATES:
                self._unanswered[names, awaited] = known
        return known

    def waited_for(self, names: Sequence[str], quorum: int, now: float) -> tuple[list[str], list[str]]:
        """Return (the members to wait for, the members to probe). A member that is down or left out is waited for only
        where the quorum needs it, those that are up first."""
        if all(self.members[name].healthy for name in names):
            return list(names), []
        up = [name for name in names if self.members[name].state == "up"]
        awaited = [name for name in up if self.members[name].breaker.state(now) == "closed"]
        probed = [name for name in up if name not in awaited and self.members[name].breaker.probe_due(now)]
        others = [name for name in up if name not in awaited]
        others += [name for name in names if name not in up and self.members[name].refusal is None]
        for name in others[: max(0, quorum - len(awaited))]:
            awaited.append(name)
            if name in probed:
                probed.remove(name)
        asked = {self.members[name] for name in awaited}  # a member with several names computes all of them at once
        awaited += [name for name in names if name not in awaited and self.members[name] in asked]
        return awaited, [name for name in probed if name not in awaited]


class PendingRequest:
    """A request to the ensemble, from the first queue to its outcome."""

    def __init__(
        self, ensemble: Ensemble, question: InferenceRequest, report: Callable[[EnsembleResult | Exception], None]
    ) -> None:
        self.ensemble, self.question, self._report = ensemble, question, report
        self.names, self.deadline = question.names, question.deadline
        self.over = False
        self.outputs: dict[str, list[Array]] = {}
        self.works: dict[Member, MemberTask] = {}
        self.refused: list[Refused] = []
        self.full: list[Overloaded] = []
        self.again: set[Member] = set()

    def begin(self) -> None:
        """Ask the members that are waited for, and those that are probed."""
        loop = asyncio.get_running_loop()
        self.began = now = loop.time()
        quorum = min(self.ensemble.quorum, len(self.names))
        awaited, probed = self.ensemble.waited_for(self.names, quorum, now)
        # Members get the client's deadline, the decision is taken a little before it: combining the outputs and sending
        # the response must fit into the rest.
        ends = self.deadline - self.ensemble.reserve
        self.gathering = self.ensemble.unanswered(self.names, tuple(awaited), quorum).until(ends)
        self.timer = loop.call_at(ends, self._decide, ends)
        if now >= ends:  # the request came too late: no member is asked, and none counts as late
            self._decide()
            return
        names_of: dict[Member, list[str]] = {}
        for name in [*awaited, *probed]:
            names_of.setdefault(self.ensemble.members[name], []).append(name)
        for member, names in names_of.items():
            if self.over:
                return
            if names[0] in probed:
                member.breaker = member.breaker.probed()
            self._ask(member, names)
        if self.full or not awaited:  # else there is nothing to decide before a member has answered
            self._decide()

    def abandon(self) -> None:
        """Give the request up, because the caller has gone away: no other member is waited for."""
        if not self.over:
            self.over = True
            self.timer.cancel()
            self._give_up_on_the_rest(0.0, timed_out=False)
            self._let_go()

    def _let_go(self) -> None:
        """Drop all that refers back to this request, so that its memory is free as soon as the last member is done with
        it, and not only at Python's next garbage collection."""
        self.works, self.full, self.refused = {}, [], []

    def _ask(self, member: Member, names: list[str], *, first: bool = False) -> None:
        asked = self.question
        work = MemberTask(
            asked.tensors,
            asked.rows,
            asked.deadline,
            lambda outcome: self._settled(member, names, outcome),
            held=asked.held,
        )
        self.works[member] = work
        try:
            member.batcher.submit(work, first=first)
        except Overloaded as error:
            self.full.append(error)
            member.breaker = member.breaker.refused()
            for name in names:
                self.gathering = self.gathering.with_failure(name)

    def _settled(self, member: Member, names: list[str], outcome: Outcome) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(outcome, list):
            self._answered(member, names, outcome, now)
            return
        if isinstance(outcome, Lost) and self._ask_again(member, names, now):
            return
        if isinstance(outcome, Refused):
            self.refused.append(outcome)
            member.breaker = member.breaker.in_time(now)
        elif not isinstance(outcome, Lost):
            self._late(member, names, now)
        expired = isinstance(outcome, Expired)
        for name in names:
            state = self.gathering
            self.gathering = state.with_expired(name) if expired else state.with_failure(name)
        self._decide()

    def _answered(self, member: Member, names: list[str], outputs: list[Array], now: float) -> None:
        every = [name for name, other in self.ensemble.members.items() if other is member]
        # A member of several names (in_graph) returns all their outputs in the order of the names; each has as many as
        # the others.
        each = len(outputs) // len(every)
        last = not self.gathering.open - {*names}
        if now > self.deadline or (last and self._holds_up(member)):
            self._late(member, names, now)
        else:
            member.breaker = member.breaker.in_time(now)
        if self.over:
            return
        for name in names:
            at = each * every.index(name)
            self.outputs[name] = outputs[at : at + each]
            self.gathering = self.gathering.with_answer(name)
        self._decide()

    def _holds_up(self, member: Member) -> bool:
        """Return whether the member is slower than usual by far more than the others of this request are."""
        others = [other.batcher.times.slowdown for other in self.works if other is not member]
        return bool(others) and member.batcher.times.slowdown > SLOW * max(1.0, median(others))

    def _ask_again(self, member: Member, names: list[str], now: float) -> bool:
        """Ask the member's next process once more where the last one died with the request and the quorum cannot be
        reached without it. Returns whether it was asked."""
        without = self.gathering
        for name in names:
            without = without.with_failure(name)
        if self.over or member in self.again or not isinstance(without.outcome(now), NoQuorum):
            return False
        if now >= self.gathering.deadline:
            return False
        self.again.add(member)
        self._ask(member, names, first=True)
        self._decide()
        return True

    def _late(self, member: Member, names: Sequence[str], now: float) -> None:
        if (
            self.deadline - self.began
            < 2 * member.batcher.times.pace.expected(self.question.rows) + 2 * self.ensemble.reserve
        ):
            member.breaker = member.breaker.refused()  # no member could have been in time
            return
        if self.began >= member.missed_at:  # of those that waited at the same time one counts
            member.breaker, member.missed_at = member.breaker.late(now), now
        for name in names:
            self.ensemble.missed(name)

    def _decide(self, at: float = 0.0) -> None:
        """Settle the request if its outcome is known. ``at``: the least time that it is taken to be, since a timer may
        ring a little early."""
        if self.over:
            return
        now = max(at, asyncio.get_running_loop().time())
        outcome = self.gathering.outcome(now)
        if outcome is None:
            return
        self.over = True
        self.timer.cancel()
        self._give_up_on_the_rest(now, timed_out=now >= self.gathering.deadline)
        found = self._found(outcome)
        self._let_go()
        self._report(found)

    def _found(self, outcome: Answer | DeadlineExceeded | NoQuorum) -> EnsembleResult | Exception:
        if isinstance(outcome, Answer):
            try:
                return EnsembleResult(outcome, self._combined(outcome))
            except Exception as error:  # the caller must get an outcome in any case
                return NoQuorum(f"the members' outputs do not fit together: {error}")
        if isinstance(outcome, NoQuorum) and (self.refused or self.full):
            return self.refused[0] if self.refused else self.full[0]
        return outcome

    def _give_up_on_the_rest(self, now: float, *, timed_out: bool) -> None:
        for member, work in self.works.items():
            names = [name for name in self.names if self.ensemble.members[name] is member]
            if work.over or not self.gathering.awaited & {*names}:
                continue  # a probe goes on until its own deadline
            work.over = True
            if timed_out:
                self._late(member, names, now)

    def _combined(self, answer: Answer) -> list[Array]:
        weights = self.ensemble.weights
        used = None if weights is None else [weights[name] for name in answer.used]
        columns = zip(*(self.outputs[name] for name in answer.used), strict=True)
        if not self.question.combined:
            return self.outputs[answer.used[0]]
        return [combined(self.ensemble.aggregation, column, used) for column in columns]
