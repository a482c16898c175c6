"""The decisions of rounds that close at their deadline: who is waited for, and whose each batch is. No process, no
clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.parallel.averaging.round_state import (
    GATHER_SECONDS,
    GRACE_SECONDS,
    OpenedRound,
    ReplicaState,
    RoundState,
)
from apportion.strategies.local_sgd import seconds_of

EVERY, DEADLINE = 3, 2.0


def rounds_of(ranks: int, total: int = 100, size: int | None = None) -> RoundState:
    made = RoundState(every=EVERY, total=total, deadline=DEADLINE, size=ranks if size is None else size)
    made.start(0, (), 0.0)
    for rank in range(ranks):
        made.add_replica(rank)
    return made


def opened(rounds: RoundState, now: float) -> OpenedRound:
    found = rounds.open_round(now)
    assert found is not None
    return found


def batches(found: OpenedRound) -> dict[int, tuple[int, ...]]:
    return {rank: assignment.batches for rank, assignment in found.assignments.items()}


def give(rounds: RoundState, rank: int, now: float) -> bool:
    return rounds.record_part(rank, rounds.number, len(rounds.slots[rank].batches), now)


def test_batches_are_assigned_in_turn_and_a_round_is_over_when_all_have_come() -> None:
    rounds = rounds_of(2)
    assert batches(opened(rounds, 0.0)) == {0: (0, 2, 4), 1: (1, 3, 5)}
    assert give(rounds, 1, 0.5)
    assert not rounds.is_over(0.5)
    assert give(rounds, 0, 0.6)
    assert rounds.is_over(0.6)
    assert rounds.close_round(0.6) == ([0, 1], [], 0.6)


def test_the_batches_of_who_is_late_are_assigned_again_and_it_is_not_waited_for_until_it_comes() -> None:
    rounds = rounds_of(3)
    opened(rounds, 0.0)
    give(rounds, 0, 0.5)
    give(rounds, 2, 0.5)
    assert not rounds.is_over(DEADLINE - 0.01)
    assert rounds.seconds_until_due(1.5) == pytest.approx(0.5 - GRACE_SECONDS)
    assert rounds.ranks_to_ask(1.5) == []
    assert rounds.ranks_to_ask(1.9) == [1]
    assert rounds.ranks_to_ask(1.95) == [], "once"
    assert rounds.seconds_until_due(1.95) == pytest.approx(0.05)
    assert rounds.is_over(DEADLINE)
    assert rounds.close_round(DEADLINE) == ([0, 2], [1], DEADLINE)
    rounds.add_batches(6)
    second = opened(rounds, 2.0)
    assert second.unpushed == (1, 4, 7)
    assert batches(second) == {0: (1, 7, 10), 2: (4, 9, 11)}
    give(rounds, 0, 2.5)
    give(rounds, 2, 2.5)
    assert rounds.is_over(2.5), "nobody waits for rank 1"
    assert not rounds.record_part(1, 0, 3, 2.6), "what it has learnt is a round too old"
    rounds.close_round(2.6)
    rounds.add_batches(6)
    assert set(batches(opened(rounds, 2.6))) == {0, 1, 2}, "who returns is in the next round"


def test_a_round_that_nobody_ends_by_the_deadline_is_over_with_the_first_who_does() -> None:
    rounds = rounds_of(2)
    opened(rounds, 0.0)
    assert not rounds.is_over(10.0)
    assert rounds.ranks_to_ask(10.0) == [0, 1]
    assert rounds.seconds_until_due(10.0) is None
    give(rounds, 1, 11.0)
    assert rounds.is_over(11.0)


def test_what_a_replica_has_made_by_the_deadline_counts_and_the_rest_is_assigned_again() -> None:
    rounds = rounds_of(2)
    opened(rounds, 0.0)
    give(rounds, 0, 0.5)
    assert rounds.ranks_to_ask(1.9) == [1]
    assert rounds.record_part(1, 0, 2, 1.95)
    assert rounds.close_round(1.95) == ([0, 1], [], 1.95)
    rounds.add_batches(5)
    second = opened(rounds, 1.95)
    assert second.unpushed == (5,)
    assert batches(second) == {0: (5, 7, 8), 1: (6,)}, "rank 1 is assigned no more than it makes"


def test_a_slow_replica_is_assigned_what_it_makes_by_the_deadline() -> None:
    rounds = rounds_of(2)
    opened(rounds, 0.0)
    give(rounds, 0, 0.1)
    rounds.close_round(DEADLINE)
    rounds.record_part(1, 0, 2, 2.1)
    assert {rank: len(of) for rank, of in batches(opened(rounds, 2.1)).items()} == {0: 3, 1: 1}
    give(rounds, 1, 2.2)
    give(rounds, 0, 2.2)
    rounds.close_round(2.2)
    assert {rank: len(of) for rank, of in batches(opened(rounds, 2.2)).items()} == {0: 3, 1: 3}, "it has become fast"


def test_the_first_round_waits_for_all_ranks_but_not_for_ever() -> None:
    rounds = rounds_of(1, size=2)
    assert rounds.open_round(0.0) is None
    assert rounds.seconds_until_due(1.0) == GATHER_SECONDS - 1.0
    assert set(opened(rounds, GATHER_SECONDS).assignments) == {0}


def test_who_comes_with_a_rank_that_is_there_takes_its_place() -> None:
    rounds = rounds_of(2)
    opened(rounds, 0.0)
    incarnation = rounds.add_replica(1)
    assert incarnation == 3
    assert rounds.slots[1].state is ReplicaState.IDLE
    give(rounds, 0, 0.5)
    assert rounds.is_over(0.5)
    rounds.close_round(0.5)
    rounds.add_batches(3)
    assert batches(opened(rounds, 0.5)) == {0: (1, 5, 7), 1: (3, 6, 8)}


def test_a_part_that_was_given_stays_in_its_round_when_its_replica_dies() -> None:
    rounds = rounds_of(2)
    opened(rounds, 0.0)
    give(rounds, 1, 0.5)
    rounds.remove_replica(1)
    give(rounds, 0, 0.6)
    assert rounds.close_round(0.6)[0] == [0, 1]


def test_what_a_state_lacks_is_assigned_first() -> None:
    rounds = RoundState(every=2, total=20, deadline=DEADLINE, size=1)
    rounds.start(5, (3, 6), 0.0)
    rounds.add_replica(0)
    rounds.add_replica(1)
    assert batches(opened(rounds, 0.0)) == {0: (3, 7), 1: (6, 8)}


happenings = st.lists(st.tuples(st.sampled_from(["come", "go", "give", "wait"]), st.integers(0, 3)), max_size=200)


class Played:
    """Rounds to which something happens."""

    def __init__(self, total: int) -> None:
        self.rounds = RoundState(every=EVERY, total=total, deadline=DEADLINE, size=2)
        self.rounds.start(0, (), 0.0)
        self.now = 0.0
        self.averaged: list[int] = []
        self.given: dict[int, tuple[int, ...]] = {}

    def come(self, rank: int) -> None:
        self.rounds.add_replica(rank)

    def go(self, rank: int) -> None:
        self.rounds.remove_replica(rank)

    def wait(self, rank: int) -> None:
        self.now += DEADLINE / 2

    def give(self, rank: int) -> None:
        slot = self.rounds.slots.get(rank)
        if slot is None or slot.state is ReplicaState.IDLE:
            return
        number = self.rounds.number if slot.state is ReplicaState.WORKING else -1
        if self.rounds.record_part(rank, number, len(slot.batches), self.now):
            self.given[rank] = slot.batches

    def turn(self) -> None:
        """Closes and opens rounds as the time has come."""
        if self.rounds.is_over(self.now):
            came, _, _ = self.rounds.close_round(self.now)
            batches = [batch for rank in came for batch in self.given[rank]]
            self.averaged += batches
            self.rounds.add_batches(len(batches))
        self.rounds.open_round(self.now)


@given(happenings)
def test_whatever_happens_every_batch_is_in_an_average_once(happened: list[tuple[str, int]]) -> None:
    total = 40
    played = Played(total)
    played.turn()
    for what, rank in happened:
        getattr(played, what)(rank)
        played.turn()
    assert len(set(played.averaged)) == len(played.averaged) == played.rounds.done
    played.come(0)  # and then one goes on alone
    for _ in range(4 * total):
        played.give(0)
        played.wait(0)
        played.turn()
    assert sorted(played.averaged) == list(range(total))
    assert played.rounds.is_finished


@pytest.mark.parametrize(("written", "seconds"), [("2 s", 2.0), ("500ms", 0.5), ("1.5 min", 90.0)])
def test_a_deadline_is_written_with_its_unit(written: str, seconds: float) -> None:
    assert seconds_of(written) == seconds


@pytest.mark.parametrize("wrong", ["2", "0 s", "-1 s", "s", "2 h"])
def test_a_deadline_that_is_none_is_refused_with_the_cure(wrong: str) -> None:
    with pytest.raises(ValueError, match=r'must be a time above 0, like "2 s"'):
        seconds_of(wrong)
