"""When an ensemble answers, and from whom: every order in which answers, failures and the deadline can come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from apportion.serving.ensemble.deadline import Answer, QuorumState, check_quorum
from apportion.serving.errors import DeadlineExceeded, NoQuorum

MEMBERS = ("a", "b", "c")
AT = 10.0


def gathering(quorum: int = 1, awaited: Sequence[str] = MEMBERS) -> QuorumState:
    return QuorumState(members=MEMBERS, awaited=frozenset(awaited), quorum=quorum, deadline=AT)


def first_outcome(start: QuorumState, events: Sequence[tuple[str, str]]) -> tuple[int, object]:
    """(after how many events, what) of the first outcome; ("time", "") is the deadline."""
    now, state = 0.0, start
    for at, (what, member) in enumerate([("start", ""), *events]):
        if what == "answer":
            state = state.with_answer(member)
        elif what == "fail":
            state = state.with_failure(member)
        elif what == "time":
            now = AT
        outcome = state.outcome(now)
        if outcome is not None:
            return at, outcome
    raise AssertionError(f"no outcome of {events}")


def orders() -> list[list[tuple[str, str]]]:
    """Each member answers or fails, or neither; the deadline comes somewhere between; in every order."""
    found = []
    for fates in itertools.product(("answer", "fail", None), repeat=3):
        events = [(fate, member) for fate, member in zip(fates, MEMBERS, strict=True) if fate is not None]
        found += [list(order) for order in itertools.permutations([*events, ("time", "")])]
    return found


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_in_every_order_of_events_the_first_outcome_is_the_one_that_is_meant(quorum: int) -> None:
    """Held against the words themselves: answered by all, time up, or hopeless, whichever comes first."""
    assert len(orders()) == 277
    for events in orders():
        answered: list[str] = []
        failed: list[str] = []
        expected: object = None
        for at, (what, member) in enumerate(events, start=1):
            {"answer": answered, "fail": failed, "time": []}[what].append(member)
            rest = [m for m in MEMBERS if m not in answered + failed]
            if len(answered) + len(rest) < quorum:
                expected = at, NoQuorum
            elif not rest or (what == "time" and len(answered) >= quorum):
                expected = (
                    at,
                    Answer(
                        used=tuple(m for m in MEMBERS if m in answered),
                        late=tuple(rest),
                        failed=tuple(m for m in MEMBERS if m in failed),
                        absent=(),
                    ),
                )
            elif what == "time":
                expected = at, DeadlineExceeded
            if expected is not None:
                break
        at, outcome = first_outcome(gathering(quorum), events)
        found = outcome if isinstance(outcome, Answer) else type(outcome)
        assert (at, found) == expected, events


def test_an_answer_after_the_deadline_is_none_of_it() -> None:
    state = gathering().with_answer("a")
    at_the_deadline = state.outcome(AT)
    assert at_the_deadline == Answer(used=("a",), late=("b", "c"), failed=(), absent=())
    assert at_the_deadline.degraded


def test_who_is_out_of_the_wait_is_not_waited_for_and_counts_where_it_answers_all_the_same() -> None:
    state = gathering(awaited=["a", "b"]).with_answer("a")
    assert state.outcome(1.0) is None
    assert state.with_answer("b").outcome(1.0) == Answer(used=("a", "b"), late=(), failed=(), absent=("c",))
    whole = state.with_answer("c").with_answer("b").outcome(1.0)
    assert whole == Answer(used=MEMBERS, late=(), failed=(), absent=())
    assert not whole.degraded


def test_with_nobody_to_wait_for_there_is_no_quorum_at_once() -> None:
    outcome = gathering(awaited=[]).outcome(0.0)
    assert isinstance(outcome, NoQuorum)
    assert "none of the members a, b, c is up" in str(outcome)


def test_an_answer_outlives_the_death_of_whoever_gave_it() -> None:
    state = gathering(quorum=3).with_answer("a").with_failure("a").with_answer("b").with_answer("c")
    assert isinstance(state.outcome(1.0), Answer)


def test_who_has_failed_and_is_asked_again_may_answer() -> None:
    state = gathering(quorum=3).with_answer("b").with_answer("c").with_failure("a").with_answer("a")
    assert state.outcome(1.0) == Answer(used=MEMBERS, late=(), failed=(), absent=())


def test_what_is_missed_names_who_was_waited_for_and_what_the_quorum_needs() -> None:
    late = gathering(quorum=2).with_answer("a").outcome(AT)
    assert str(late) == "the deadline passed before b, c answered: 1 answered of the 2 that the quorum needs"
    hopeless = gathering(quorum=2).with_failure("a").with_failure("c").outcome(0.0)
    assert str(hopeless) == "a, c failed: 0 answered of the 2 that the quorum needs"


@pytest.mark.parametrize("quorum", [0, 4, -1])
def test_a_quorum_that_cannot_be_is_refused(quorum: int) -> None:
    with pytest.raises(ValueError, match=f"quorum={quorum} of 3 members"):
        check_quorum(quorum, MEMBERS)
