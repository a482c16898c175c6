"""The state machines of the membership of several hosts, one by one: leader, follower, liveness, terms."""

from __future__ import annotations

from typing import Any

import pytest

from apportion.errors import ApportionError, WorkerFailed
from apportion.parallel.replica.resync import furthest
from apportion.runtime.checkpoint.terms import RunTerm, RunWriter, is_refused, may_write, next_term
from apportion.runtime.hosts.protocol.follower import Follower, TakenTable
from apportion.runtime.hosts.protocol.leader import HostSlot, Leader
from apportion.runtime.hosts.protocol.liveness import (
    LATE_FACTOR,
    START_SECONDS,
    SUSPECT_SECONDS,
    SUSPECT_STEPS,
    Liveness,
    TornLinks,
)

A0, A1, B0, B1 = HostSlot(0, 0), HostSlot(0, 1), HostSlot(1, 0), HostSlot(1, 1)


def opened(lost: list[int] = [3]) -> Leader:  # noqa: B006 (not changed)
    """A leader of two hosts with two workers each, with a change open."""
    leader = Leader([2, 2])
    leader.kill(lost)
    leader.open()
    for host in (0, 1):
        leader.reserved(host, 1, f"host-{host}", 5000 + host)
    return leader


# The leader


def test_a_change_is_opened_on_every_host_with_an_odd_generation_that_grows() -> None:
    leader = Leader([1, 2])
    assert [(told.host, told.message["generation"]) for told in leader.open()] == [(0, 1), (1, 1)]
    assert [told.message["generation"] for told in leader.open()] == [3, 3]


def test_the_lost_are_killed_once_by_their_hosts() -> None:
    leader = Leader([2, 2])
    assert [(told.host, told.message) for told in leader.kill([1, 2])] == [
        (0, {"kind": "kill", "slots": [1]}),
        (1, {"kind": "kill", "slots": [0]}),
    ]
    assert leader.kill([1, 2]) == []


def test_a_table_waits_until_all_have_answered_the_newest_change_or_have_ended() -> None:
    leader = opened()
    leader.exited(B1)
    for slot in (A0, A1):
        leader.answered(slot, 1)
    leader.answered(B0, -1)
    assert leader.asked() == [2]
    assert not leader.can_close
    leader.answered(B0, 1)
    assert leader.can_close


def test_a_table_waits_for_the_end_of_who_was_killed_after_it_had_answered() -> None:
    leader = opened()
    for slot in (A0, A1, B0, B1):
        leader.answered(slot, 1)
    assert not leader.can_close
    leader.exited(B1)
    assert leader.can_close


def test_answers_and_places_of_a_change_do_not_count_for_the_next() -> None:
    leader = opened()
    leader.answered(A0, 1)
    leader.open()
    leader.answered(A0, 1)
    leader.reserved(0, 1, "host-0", 5000)
    assert leader.asked() == [0, 1, 2, 3]
    assert not leader.can_close


def test_a_table_gives_a_replacement_the_place_of_the_lost() -> None:
    leader = opened([1])
    leader.exited(A1)
    for slot in (A0, B0, B1):
        leader.answered(slot, 1)
    first, second = leader.close(leader.table, [A1])
    assert leader.generation == 2
    assert (first.message["first"], first.message["slots"], first.message["fresh"]) == (0, [0, 1], [1])
    assert (second.message["first"], second.message["slots"], second.message["fresh"]) == (2, [0, 1], [])
    assert {told.message["address"] for told in (first, second)} == {"host-0"}
    assert leader.lives(A1)


def test_a_dropped_host_is_in_no_table_and_is_waited_for_no_more() -> None:
    leader = opened([0, 1])
    leader.drop(0)
    for slot in (B0, B1):
        leader.answered(slot, 1)
    (told,) = leader.close(leader.table)
    assert told.host == 1
    assert (told.message["first"], told.message["size"], told.message["address"]) == (0, 2, "host-1")
    assert [each.host for each in leader.open()] == [1]


def test_a_host_that_is_taken_is_in_the_next_change() -> None:
    leader = Leader([1])
    leader.add_host(1)
    assert [told.host for told in leader.open()] == [0, 1]


def test_who_begins_again_has_new_processes_alone_and_everybody_later_knows_since_when() -> None:
    leader = opened([0, 1, 2, 3])
    for slot in (A0, A1, B0, B1):
        leader.exited(slot)
    told = leader.close(leader.table, leader.table, begins=True)
    assert [(each.message["began"], each.message["generation"]) for each in told] == [(2, 2), (2, 2)]
    assert not any(each.message["saved"] for each in told)
    leader.saved = True
    leader.kill([3])
    leader.open()
    for slot in (A0, A1, B0):
        leader.answered(slot, 3)
    leader.exited(B1)
    for host in (0, 1):
        leader.reserved(host, 3, "", 0)
    told = leader.close(leader.table, [B1])
    assert [(each.message["began"], each.message["generation"]) for each in told] == [(2, 4), (2, 4)]
    assert all(each.message["saved"] for each in told)


def test_nobody_who_begins_again_may_have_anything_of_before() -> None:
    leader = opened()
    leader.exited(B1)
    for slot in (A0, A1, B0):
        leader.answered(slot, 1)
    with pytest.raises(AssertionError, match="begins again"):
        leader.close(leader.table, [B1], begins=True)


def test_no_table_is_empty() -> None:
    leader = Leader([1])
    leader.open()
    leader.drop(0)
    with pytest.raises(ApportionError, match="no worker is left on any host"):
        leader.close(leader.table)


# The follower


def table(generation: int, slots: list[int], fresh: list[int]) -> dict[str, Any]:
    return {"kind": "table", "generation": generation, "slots": slots, "fresh": fresh}


def test_a_follower_obeys_newer_changes_alone() -> None:
    follower = Follower(2)
    assert follower.open(1, [0, 1])
    assert not follower.open(1, [0, 1])
    assert follower.open(5, [0, 1])
    assert not follower.open(3, [0, 1])
    assert not follower.open(6, [0, 1])
    assert follower.generation == 5


def test_an_answer_is_told_once_and_for_the_open_change_alone() -> None:
    follower = Follower(2)
    follower.open(1, [0])
    assert follower.asked == [0]
    assert not follower.note_answer(1, 1)
    assert follower.note_answer(0, 1)
    assert not follower.note_answer(0, 1)
    follower.open(3, [0, 1])
    assert not follower.note_answer(0, 1)
    assert follower.note_answer(0, 3)


def test_a_follower_takes_the_table_of_the_open_change_alone() -> None:
    follower = Follower(2)
    assert follower.close(table(2, [0], []), [0, 1]) is None
    follower.open(3, [0, 1])
    assert follower.close(table(2, [0], []), [0, 1]) is None
    assert follower.close(table(6, [0], []), [0, 1]) is None
    assert follower.close(table(4, [1], []), [1]) == TakenTable([], [])
    assert (follower.generation, follower.slots, follower.asked) == (4, [1], [])
    assert follower.close(table(4, [0], []), [1]) is None


def test_who_is_left_out_of_a_table_ends_and_no_slot_gets_a_second_process() -> None:
    follower = Follower(3)
    follower.open(1, [0, 1])
    assert follower.close(table(2, [0, 2], [0, 2]), [0, 1]) == TakenTable(fresh=[2], left_out=[1])


# Liveness


def thoughts(liveness: Liveness, seconds: float, step: float | None = 0.0) -> list[tuple[int, str]]:
    return [(silence.host, silence.thought) for silence in liveness.pass_time(seconds, step)]


def test_a_silent_host_is_suspected_and_given_up_after_the_grace() -> None:
    liveness = Liveness([0, 1], 4.0)
    assert thoughts(liveness, SUSPECT_SECONDS) == []
    liveness.note_heard(1)
    assert thoughts(liveness, 0.1) == [(0, "suspected")]
    assert thoughts(liveness, 3.9) == [(1, "suspected")]
    assert thoughts(liveness, 0.1) == [(0, "given up")]
    assert liveness.note_heard(0) == []
    assert [silence.thought for silence in liveness.note_heard(1)] == ["back"]


def test_a_host_with_long_steps_or_late_words_is_suspected_later() -> None:
    liveness = Liveness([0], 4.0)
    assert thoughts(liveness, 0.9 * SUSPECT_STEPS, step=1.0) == []
    for _ in range(100):
        liveness.note_heard(0)
        assert thoughts(liveness, 1.5) == []
    liveness.note_heard(0)
    assert thoughts(liveness, 0.9 * LATE_FACTOR * 1.5) == []
    assert thoughts(liveness, 0.2 * LATE_FACTOR * 1.5) == [(0, "suspected")]


def test_a_host_whose_cores_are_busy_before_the_first_step_is_not_suspected_as_soon() -> None:
    liveness = Liveness([0], 4.0)
    assert thoughts(liveness, START_SECONDS, step=None) == []
    assert thoughts(liveness, 0.1, step=None) == [(0, "suspected")]
    assert thoughts(liveness, 4.0, step=None) == [(0, "given up")]


def test_nothing_is_expected_of_a_host_that_is_forgotten() -> None:
    liveness = Liveness([0], 1.0)
    liveness.forget(0)
    assert thoughts(liveness, 100.0) == []
    liveness.expect(0)
    assert thoughts(liveness, 100.0) == [(0, "suspected"), (0, "given up")]


# Who goes on from whom, and who may write


def test_all_go_on_from_the_first_of_those_that_are_furthest() -> None:
    assert furthest([4, 5, 0, 5]) == 1
    assert furthest([0, 0]) is None


def test_a_start_takes_a_higher_term_than_all_that_are_known() -> None:
    assert next_term([], "a") == RunTerm(1, "a")
    assert next_term([None, RunTerm(3, "a"), RunTerm(2, "b")], "c") == RunTerm(4, "c")


@pytest.mark.parametrize(
    ("asked", "known", "refused"),
    [
        (RunTerm(1, "a"), None, False),
        (RunTerm(2, "b"), RunTerm(1, "a"), False),
        (RunTerm(2, "b"), RunTerm(2, "b"), False),
        (RunTerm(2, "c"), RunTerm(2, "b"), True),
        (RunTerm(1, "a"), RunTerm(2, "b"), True),
    ],
)
def test_a_lower_term_is_refused_and_the_second_of_two_equal_ones(
    asked: RunTerm, known: RunTerm | None, refused: bool
) -> None:
    assert is_refused(asked, known) == refused
    writer = None if known is None else RunWriter(known, 7)
    assert may_write(RunWriter(asked, 7), writer) != refused


def test_rank_0_of_an_older_generation_writes_no_more() -> None:
    term = RunTerm(1, "a")
    assert may_write(RunWriter(term, 4), RunWriter(term, 2))
    assert not may_write(RunWriter(term, 2), RunWriter(term, 4))
    assert may_write(RunWriter(RunTerm(2, "b"), 0), RunWriter(term, 4))


# Connections that are lost though nobody was


def test_ranks_that_have_lost_a_connection_meet_again_unless_a_loss_turns_out_to_be_the_cause() -> None:
    torn = TornLinks()
    assert not torn.is_old(100.0)
    torn.note_torn(True, 10.0)
    torn.note_torn(True, 10.9)  # the first counts
    assert not torn.is_old(10.9)
    assert torn.is_old(11.1)
    torn.forget()
    assert not torn.is_old(20.0)
    torn.note_torn(False, 20.0)  # of a generation that is over
    assert not torn.is_old(30.0)


def test_connections_that_are_lost_again_and_again_at_one_step_end_the_run() -> None:
    torn = TornLinks()
    for step in (3, 3, 3, 3, 3, 4, 4):
        torn.note_torn(True, 0.0)
        torn.note_reconnected(step)
    torn.note_reconnected(4)  # nothing was lost: a host is taken in
    for _ in range(3):
        torn.note_torn(True, 0.0)
        torn.note_reconnected(4)
    torn.note_torn(True, 0.0)
    with pytest.raises(WorkerFailed, match="were lost 5 times at step 4"):
        torn.note_reconnected(4)
