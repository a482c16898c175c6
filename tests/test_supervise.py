"""What to do about what happened: the decision alone, for every order in which things can happen."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.crew import LOOK_SECONDS, Watch
from apportion.supervise import (
    CAUSE_SECONDS,
    Exited,
    Finish,
    Finished,
    GoOn,
    Happening,
    Late,
    Policy,
    Raised,
    Stop,
    next_action,
)
from apportion.values import parse_as

WORKERS = 3
ranks = st.integers(0, WORKERS - 1)
causes = st.builds(Raised, ranks, st.just("RuntimeError: boom"), st.just("Traceback ..."), symptom=st.just(False))
symptoms = st.builds(Raised, ranks, st.just("lost another rank"), st.none(), symptom=st.just(True))
deaths = st.builds(Exited, ranks, st.sampled_from([-9, -11, -15]))
exits = st.builds(Exited, ranks, st.sampled_from([0, 1, 7]))
late = st.builds(Late, st.just((1,)), st.integers(0, 9), st.floats(1, 99))
happenings = st.lists(st.one_of(causes, symptoms, deaths, exits, late, st.builds(Finished, ranks)), max_size=8)


def decided(happened: list[Happening]) -> object:
    """After so long that nothing more will come."""
    return next_action(happened, WORKERS, 2 * CAUSE_SECONDS)


@given(happenings)
def test_the_first_exception_is_the_cause_whatever_else_happened_before_or_after(happened: list[Happening]) -> None:
    raised = [h for h in happened if isinstance(h, Raised) and not h.symptom]
    if raised:
        action = next_action(happened, WORKERS, 0.0)
        assert isinstance(action, Stop)
        assert (action.rank, action.traceback) == (raised[0].rank, raised[0].traceback)
        assert "boom" in action.cause


@given(happenings, st.floats(0, 10))
def test_a_run_is_finished_only_when_every_rank_said_so_and_none_failed(
    happened: list[Happening], seconds: float
) -> None:
    action = next_action(happened, WORKERS, seconds)
    if isinstance(action, Finish):
        finished = {h.rank for h in happened if isinstance(h, Finished)}
        assert finished == set(range(WORKERS))
        assert not any(isinstance(h, Raised | Late) for h in happened)


@given(happenings, st.floats(0, 10))
def test_to_go_on_forever_takes_that_nothing_went_wrong(happened: list[Happening], seconds: float) -> None:
    action = next_action(happened, WORKERS, seconds)
    if isinstance(action, GoOn):
        finished = {h.rank for h in happened if isinstance(h, Finished)}
        wrong = [h for h in happened if not isinstance(h, Finished) and getattr(h, "rank", None) not in finished]
        assert action.seconds is not None or not wrong
        assert action.seconds is None or 0 < action.seconds <= CAUSE_SECONDS


@given(happenings, happenings)
def test_a_cause_once_found_stays_the_cause(happened: list[Happening], more: list[Happening]) -> None:
    raised = [h for h in happened if isinstance(h, Raised) and not h.symptom]
    if raised:
        assert next_action(happened, WORKERS, 0.0) == next_action([*happened, *more], WORKERS, 0.0)


@given(happenings)
def test_a_rank_that_finished_cannot_fail_by_ending(happened: list[Happening]) -> None:
    done: list[Happening] = [Finished(rank) for rank in range(WORKERS)]
    ended = [h for h in happened if isinstance(h, Exited)]
    assert decided([*done, *ended]) == Finish()


def test_a_lost_peer_waits_for_its_cause_and_is_told_where_none_comes() -> None:
    symptom = Raised(0, "rank 0 lost another rank", None, symptom=True)
    assert next_action([symptom], 2, 0.25) == GoOn(CAUSE_SECONDS - 0.25)
    assert next_action([symptom, Exited(1, -9)], 2, 0.0) == Stop(1, _cause(decided([Exited(1, -9)])))
    assert _cause(decided([symptom])) == "rank 0 lost another rank"


def test_an_exit_status_waits_for_the_exception_that_may_be_on_its_way() -> None:
    assert isinstance(next_action([Exited(1, 1)], 2, 0.0), GoOn)
    assert "exit status 7 before it was done" in _cause(decided([Exited(1, 7)]))
    assert _cause(next_action([Exited(1, 1), Raised(1, "boom", "Traceback")], 2, 0.0)) == "rank 1: boom"


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (Exited(1, -signal.SIGKILL), ("rank 1", "SIGKILL", "want of memory", "fewer workers")),
        (Exited(1, -signal.SIGKILL, out_of_memory=True), ("killed for want of memory", "smaller batch_size")),
        (Exited(1, -signal.SIGSEGV, out_of_memory=True), ("crashed in native code (SIGSEGV)", "PYTHONFAULTHANDLER")),
        (Exited(2, -signal.SIGTERM), ("rank 2 was ended by SIGTERM", "--resume")),
        (Exited(0, -40), ("signal 40",)),
        (Late((1, 2), 7, 31.0), ("ranks 1, 2 have not moved", "31 s at step 7", "deadlock")),
        (Late((1,), 7, 31.0, stopped=True), ("rank 1 has been stopped (SIGSTOP", "31 s at step 7")),
    ],
)
def test_every_cause_is_named_with_its_cure(death: Happening, words: tuple[str, ...]) -> None:
    cause = _cause(decided([death]))
    assert all(word in cause for word in words), cause


def test_a_mistake_and_a_checkpoint_are_told_without_the_rank_that_found_them() -> None:
    assert decided([Raised(2, "batch_size=2 cannot feed 3 workers", None, mistake=True)]) == Stop(
        2, "batch_size=2 cannot feed 3 workers", mistake=True
    )
    assert decided([Raised(0, "no space left", None, checkpoint=True)]) == Stop(0, "no space left", checkpoint=True)


def _cause(action: object) -> str:
    assert isinstance(action, Stop)
    return action.cause


# Policy


@pytest.mark.parametrize(
    ("text", "interval"),
    [("30 s", (30.0, "s")), ("0.5s", (0.5, "s")), ("20 steps", (20.0, "steps")), ("1 epoch", (1.0, "epochs"))],
)
def test_a_policy_reads_its_interval(text: str, interval: tuple[float, str]) -> None:
    assert Policy(checkpoint_every=text).interval() == interval


@pytest.mark.parametrize("text", ["", "often", "0 s", "-1 s", "3", "3 weeks", "1 s 2 s"])
def test_a_policy_that_means_nothing_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(ValueError, match=r'must be like "30 s", "20 steps" or "1 epoch"'):
        Policy(checkpoint_every=text)


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2"])
def test_a_policy_keeps_at_least_one_checkpoint(keep: object) -> None:
    with pytest.raises(ValueError, match="at least 1 checkpoint"):
        Policy(keep=keep)  # type: ignore[arg-type]


@given(st.sampled_from([None, "3 s", "20 steps", "2 epochs"]), st.integers(1, 9))
def test_a_policy_is_read_as_it_is_written(every: str | None, keep: int) -> None:
    policy = Policy(checkpoint_every=every, keep=keep)
    assert parse_as(str(policy), Policy) == policy


# Who is late


class Ranks:
    """The progress that ranks show, and a clock."""

    def __init__(self, n: int) -> None:
        self.lines = np.zeros((n, 8), dtype=np.int64)
        self.watch = Watch(self.lines)
        self.now = self.watch._looked

    def wait(self, seconds: float) -> Late | None:
        """Let the time pass, looking as the supervisor does, until someone is late."""
        until = self.now + seconds
        while self.now < until:
            self.now += LOOK_SECONDS
            if (late := self.watch.late(self.now)) is not None:
                return late
        return None

    def step(self, seconds: float) -> Late | None:
        late = self.wait(seconds)
        self.lines[:, 0] += 1
        self.lines[:, 2] += 1
        return late or self.wait(LOOK_SECONDS)


def test_the_rank_that_others_wait_for_is_late_after_twenty_of_the_slowest_steps() -> None:
    ranks = Ranks(3)
    assert not any(ranks.step(3.0) for _ in range(5))
    ranks.lines[[0, 2], 1] = 1
    assert ranks.wait(59.0) is None
    late = ranks.wait(20.0)
    assert late is not None
    assert (late.ranks, late.step) == ((1,), 5)


def test_nobody_is_late_while_nobody_waits() -> None:
    ranks = Ranks(1)
    assert ranks.step(1.0) is None
    assert ranks.wait(10_000.0) is None  # one rank's long evaluation, checkpoint or step


def test_a_first_step_may_take_as_long_as_compiling_does() -> None:
    ranks = Ranks(2)
    ranks.lines[0, 1] = 1
    assert ranks.step(600.0) is None
    ranks.lines[0, 1] = 1
    assert ranks.wait(1100.0) is None  # compiled anew
    assert ranks.wait(200.0) is not None


def test_ranks_that_all_wait_for_each_other_are_all_late() -> None:
    ranks = Ranks(2)
    assert ranks.step(1.0) is None
    ranks.lines[:, 1] = 1
    late = ranks.wait(60.0)
    assert late is not None
    assert late.ranks == (0, 1)


def test_time_in_which_the_driver_did_not_look_makes_nobody_late() -> None:
    ranks = Ranks(2)
    assert ranks.step(1.0) is None
    ranks.lines[0, 1] = 1
    ranks.now += 3600.0  # stopped by Ctrl-Z, or long in the body of the user's loop
    assert ranks.watch.late(ranks.now) is None
