"""What to do about what happened: the decision alone, for every order in which things can happen."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.core.policy import Policy
from apportion.core.value import parse_as
from apportion.runtime.supervisor.failures import (
    CAUSE_SECONDS,
    REPEATS,
    Action,
    Finish,
    GoOn,
    HostLost,
    Replace,
    Restart,
    Shrink,
    Stop,
    WorkerBegan,
    WorkerEvent,
    WorkerExited,
    WorkerFinished,
    WorkerRaised,
    WorkersChanged,
    WorkerStalled,
    next_action,
)
from apportion.runtime.supervisor.watchdog import LOOK_SECONDS, Watchdog

WORKERS = 3
ranks = st.integers(0, WORKERS - 1)
causes = st.builds(WorkerRaised, ranks, st.just("RuntimeError: boom"), st.just("Traceback ..."), symptom=st.just(False))
symptoms = st.builds(WorkerRaised, ranks, st.just("lost another rank"), st.none(), symptom=st.just(True))
deaths = st.builds(WorkerExited, ranks, st.sampled_from([-9, -11, -15]))
exits = st.builds(WorkerExited, ranks, st.sampled_from([0, 1, 7]))
late = st.builds(WorkerStalled, st.just((1,)), st.integers(0, 9), st.floats(1, 99))
happenings = st.lists(st.one_of(causes, symptoms, deaths, exits, late, st.builds(WorkerFinished, ranks)), max_size=8)


def decided(happened: list[WorkerEvent]) -> object:
    """After so long that nothing more will come."""
    return next_action(happened, WORKERS, 2 * CAUSE_SECONDS)


@given(happenings)
def test_the_first_exception_is_the_cause_whatever_else_happened_before_or_after(happened: list[WorkerEvent]) -> None:
    raised = [h for h in happened if isinstance(h, WorkerRaised) and not h.symptom]
    if raised:
        action = next_action(happened, WORKERS, 0.0)
        assert isinstance(action, Stop)
        assert (action.rank, action.traceback) == (raised[0].rank, raised[0].traceback)
        assert "boom" in action.cause


@given(happenings, st.floats(0, 10))
def test_a_run_is_finished_only_when_every_rank_said_so_and_none_failed(
    happened: list[WorkerEvent], seconds: float
) -> None:
    action = next_action(happened, WORKERS, seconds)
    if isinstance(action, Finish):
        finished = {h.rank for h in happened if isinstance(h, WorkerFinished)}
        assert finished == set(range(WORKERS))
        assert not any(isinstance(h, WorkerRaised | WorkerStalled) for h in happened)


@given(happenings, st.floats(0, 10))
def test_to_go_on_forever_takes_that_nothing_went_wrong(happened: list[WorkerEvent], seconds: float) -> None:
    action = next_action(happened, WORKERS, seconds)
    if isinstance(action, GoOn):
        finished = {h.rank for h in happened if isinstance(h, WorkerFinished)}
        wrong = [h for h in happened if not isinstance(h, WorkerFinished) and getattr(h, "rank", None) not in finished]
        assert action.seconds is not None or not wrong
        assert action.seconds is None or 0 < action.seconds <= CAUSE_SECONDS


@given(happenings, happenings)
def test_a_cause_once_found_stays_the_cause(happened: list[WorkerEvent], more: list[WorkerEvent]) -> None:
    raised = [h for h in happened if isinstance(h, WorkerRaised) and not h.symptom]
    if raised:
        assert next_action(happened, WORKERS, 0.0) == next_action([*happened, *more], WORKERS, 0.0)


@given(happenings)
def test_a_rank_that_finished_cannot_fail_by_ending(happened: list[WorkerEvent]) -> None:
    done: list[WorkerEvent] = [WorkerFinished(rank) for rank in range(WORKERS)]
    ended = [h for h in happened if isinstance(h, WorkerExited)]
    assert decided([*done, *ended]) == Finish()


def test_a_lost_peer_waits_for_its_cause_and_is_told_where_none_comes() -> None:
    symptom = WorkerRaised(0, "rank 0 lost another rank", None, symptom=True)
    assert next_action([symptom], 2, 0.25) == GoOn(CAUSE_SECONDS - 0.25)
    assert next_action([symptom, WorkerExited(1, -9)], 2, 0.0) == Stop(1, _cause(decided([WorkerExited(1, -9)])))
    assert _cause(decided([symptom])) == "rank 0 lost another rank"


def test_an_exit_beside_a_loss_is_told() -> None:
    action = next_action([WorkerBegan(), WorkerExited(2, 7), WorkerExited(1, -9)], WORKERS, 0.0, survives=True)
    assert isinstance(action, Stop)
    assert action.rank == 2
    assert "exit status 7" in action.cause


def test_an_exit_status_waits_for_the_exception_that_may_be_on_its_way() -> None:
    assert isinstance(next_action([WorkerExited(1, 1)], 2, 0.0), GoOn)
    assert "exit status 7 before it was done" in _cause(decided([WorkerExited(1, 7)]))
    assert _cause(next_action([WorkerExited(1, 1), WorkerRaised(1, "boom", "Traceback")], 2, 0.0)) == "rank 1: boom"


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (WorkerExited(1, -signal.SIGKILL), ("rank 1", "SIGKILL", "want of memory", "fewer workers")),
        (WorkerExited(1, -signal.SIGKILL, out_of_memory=True), ("killed for want of memory", "smaller batch_size")),
        (
            WorkerExited(1, -signal.SIGSEGV, out_of_memory=True),
            ("crashed in native code (SIGSEGV)", "PYTHONFAULTHANDLER"),
        ),
        (WorkerExited(2, -signal.SIGTERM), ("rank 2 was ended by SIGTERM", "resume=True")),
        (WorkerExited(0, -40), ("signal 40",)),
        (WorkerStalled((1, 2), 7, 31.0), ("ranks 1, 2 have not moved", "31 s at step 7", "deadlock")),
        (WorkerStalled((1,), 7, 31.0, stopped=True), ("rank 1 has been stopped (SIGSTOP", "31 s at step 7")),
    ],
)
def test_every_cause_is_named_with_its_cure(death: WorkerEvent, words: tuple[str, ...]) -> None:
    cause = _cause(decided([death]))
    assert all(word in cause for word in words), cause


def test_a_mistake_and_a_checkpoint_are_told_without_the_rank_that_found_them() -> None:
    assert decided([WorkerRaised(2, "batch_size=2 cannot feed 3 workers", None, mistake=True)]) == Stop(
        2, "batch_size=2 cannot feed 3 workers", mistake=True
    )
    assert decided([WorkerRaised(0, "no space left", None, checkpoint=True)]) == Stop(
        0, "no space left", checkpoint=True
    )


def _cause(action: object) -> str:
    assert isinstance(action, Stop)
    return action.cause


# Where the strategy survives the loss of a worker


class History:
    """A run as the supervisor leads it: what happens is noted, what is decided is done, and that is noted too."""

    def __init__(self, policy: Policy, *, began: bool = True) -> None:
        self.policy, self.workers = policy, WORKERS
        self.happened: list[WorkerEvent] = [WorkerBegan()] if began else []
        self.done: list[Action] = []

    def decide(self) -> Action:
        return next_action(self.happened, WORKERS, 2 * CAUSE_SECONDS, policy=self.policy, survives=True)

    def happens(self, *happenings: WorkerEvent) -> Action:
        """The decision, carried out."""
        self.happened += happenings
        action = self.decide()
        if isinstance(action, Replace | Restart | Shrink):
            self.workers -= len(action.losses) if isinstance(action, Shrink) else 0
            self.happened.append(WorkersChanged(action.losses, self.workers, isinstance(action, Restart)))
        self.done.append(action)
        return action

    def lost(self) -> int:
        return sum(len(a.losses) for a in self.done if isinstance(a, Replace | Restart | Shrink))


policies = st.builds(Policy, max_restarts=st.integers(0, 4), on_loss=st.sampled_from(["replace", "shrink"]))
killed = st.builds(WorkerExited, ranks, st.sampled_from([-9, -11, -15]), st.booleans(), st.integers(0, 3))
frozen = st.builds(lambda rank, step: WorkerStalled((rank,), step, 2.0, stopped=True), ranks, st.integers(0, 3))
silent = st.builds(lambda rank, step: WorkerStalled((rank,), step, 2.0, silent=True), ranks, st.integers(0, 3))
losses = st.lists(st.lists(st.one_of(killed, frozen, silent), min_size=1, max_size=2), max_size=8)
anything = st.lists(
    st.one_of(causes, symptoms, killed, exits, late, frozen, silent, st.builds(WorkerFinished, ranks)), max_size=8
)


def lead(policy: Policy, batches: list[list[WorkerEvent]], *, began: bool = True) -> History:
    """All these losses, of ranks that there are, until the run stops."""
    history = History(policy, began=began)
    for batch in batches:
        there = [h for h in batch if _rank(h) < history.workers]
        if there and isinstance(history.happens(*there), Stop):
            break
    return history


def _rank(happening: WorkerEvent) -> int:
    return happening.ranks[0] if isinstance(happening, WorkerStalled) else happening.rank  # type: ignore[union-attr]


@given(policies, losses)
def test_no_more_workers_are_lost_than_the_policy_says(policy: Policy, batches: list[list[WorkerEvent]]) -> None:
    assert lead(policy, batches).lost() <= policy.max_restarts


@given(policies, losses)
def test_every_loss_is_answered_at_once_and_once(policy: Policy, batches: list[list[WorkerEvent]]) -> None:
    history = lead(policy, batches)
    assert not any(isinstance(action, GoOn | Finish) for action in history.done)
    if not history.done or not isinstance(history.done[-1], Stop):
        assert history.decide() == GoOn()


@given(policies, losses)
def test_a_run_shrinks_only_as_the_policy_says_and_never_to_nobody(
    policy: Policy, batches: list[list[WorkerEvent]]
) -> None:
    history = lead(policy, batches)
    assert history.workers >= 1
    assert policy.on_loss == "shrink" or not any(isinstance(action, Shrink) for action in history.done)


@given(policies, losses)
def test_before_all_have_begun_nobody_is_replaced_alone(policy: Policy, batches: list[list[WorkerEvent]]) -> None:
    assert all(isinstance(action, Restart | Stop) for action in lead(policy, batches, began=False).done)


@given(policies, anything, st.floats(0, 10))
def test_a_strategy_that_does_not_survive_stops_whatever_the_policy_says(
    policy: Policy, happened: list[WorkerEvent], seconds: float
) -> None:
    action = next_action(happened, WORKERS, seconds, policy=policy)
    assert isinstance(action, GoOn | Finish | Stop)
    lost = [h for h in happened if isinstance(h, WorkerStalled) or (isinstance(h, WorkerExited) and h.returncode < 0)]
    done = {h.rank for h in happened if isinstance(h, WorkerFinished | WorkerRaised)}
    if any(set(h.ranks if isinstance(h, WorkerStalled) else [h.rank]) - done for h in lost):
        assert isinstance(action, Stop)


@given(policies, losses)
def test_where_a_strategy_does_not_survive_all_may_begin_again_as_often_as_the_policy_says(
    policy: Policy, batches: list[list[WorkerEvent]]
) -> None:
    happened: list[WorkerEvent] = [WorkerBegan()]
    lost = 0
    for batch in batches:
        happened += batch
        action = next_action(happened, WORKERS, 2 * CAUSE_SECONDS, policy=policy, restarts=True)
        if isinstance(action, Stop):
            assert not action.lost, "nobody is left who could save anything"
            assert "max_restarts=" in action.cause or "times at step" in action.cause
            return
        assert isinstance(action, Restart)
        lost += len(action.losses)
        assert lost <= policy.max_restarts
        happened.append(WorkersChanged(action.losses, WORKERS, restarted=True))


@given(policies, anything, st.floats(0, 10))
def test_an_exception_stops_the_run_whoever_is_lost_beside_it(
    policy: Policy, happened: list[WorkerEvent], seconds: float
) -> None:
    raised = [h for h in happened if isinstance(h, WorkerRaised) and not h.symptom]
    action = next_action([WorkerBegan(), *happened], WORKERS, seconds, policy=policy, survives=True)
    if raised:
        assert isinstance(action, Stop)
        assert (action.rank, action.traceback) == (raised[0].rank, raised[0].traceback)


@given(st.permutations([WorkerFinished(0), WorkerExited(1, -9), WorkerFinished(2)]))
def test_whoever_is_lost_after_another_has_finished_had_nothing_more_to_do(happened: list[WorkerEvent]) -> None:
    assert History(Policy(max_restarts=9)).happens(*happened) == Finish()


HOST = HostLost((1, 2), "b", "the connection was lost", 7)


def test_a_host_that_is_lost_is_the_loss_of_each_of_its_ranks_for_one_cause() -> None:
    action = next_action([WorkerBegan(), HOST], WORKERS, 0.0, survives=True)
    assert isinstance(action, Replace)
    assert [(loss.rank, loss.step) for loss in action.losses] == [(1, 7), (2, 7)]
    assert {loss.cause for loss in action.losses} == {"host b is lost with ranks 1, 2: the connection was lost"}


def test_ranks_of_a_lost_host_that_had_died_before_are_lost_once() -> None:
    action = next_action([WorkerBegan(), WorkerExited(2, -9, step=7, host="b"), HOST], WORKERS, 0.0, survives=True)
    assert isinstance(action, Replace)
    assert [loss.rank for loss in action.losses] == [2, 1]
    assert action.losses[0].cause.startswith("rank 2 on host b was killed by SIGKILL")


def test_a_run_that_cannot_go_on_without_a_host_stops_and_says_how_to_go_on() -> None:
    action = next_action([WorkerBegan(), HOST], WORKERS, 0.0)
    assert isinstance(action, Stop)
    assert action.cause == "host b is lost with ranks 1, 2: the connection was lost; resume=True goes on"


def test_whoever_is_left_saves_when_a_host_is_one_loss_too_many() -> None:
    action = next_action([WorkerBegan(), HOST], WORKERS, 0.0, policy=Policy(max_restarts=1), survives=True)
    assert isinstance(action, Stop)
    assert action.lost == (1, 2)


@pytest.mark.parametrize(("written", "seconds"), [("4 s", 4.0), ("0.5s", 0.5), (" 12 s ", 12.0)])
def test_the_time_that_a_silent_host_is_given_is_written_in_seconds(written: str, seconds: float) -> None:
    assert Policy(host_grace=written).grace_seconds() == seconds


@pytest.mark.parametrize("wrong", ["4", "soon", "-1 s", "4 min", ""])
def test_a_time_for_silent_hosts_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match='must be a number of seconds, like "4 s"'):
        Policy(host_grace=wrong)
    with pytest.raises(ValueError, match=r'host_wait=.* must be a number of seconds, like "600 s"'):
        Policy(host_wait=wrong)


def test_a_lost_host_is_gone_on_without_or_waited_for() -> None:
    assert Policy().on_host_loss == "shrink"
    assert Policy(on_host_loss="wait", host_wait="90 s").wait_seconds() == 90.0
    with pytest.raises(ValueError, match="on_host_loss='stop' must be"):
        Policy(on_host_loss="stop")  # type: ignore[arg-type]


def test_a_rank_that_is_lost_again_and_again_at_one_step_is_no_accident() -> None:
    history = History(Policy(max_restarts=99))
    for _ in range(REPEATS - 1):
        assert isinstance(history.happens(WorkerExited(1, -11, step=7)), Replace)
    assert "it has happened 3 times at step 7" in _cause(history.happens(WorkerExited(1, -11, step=7)))
    history = History(Policy(max_restarts=99))
    for step in range(20):  # an update was made in between
        assert isinstance(history.happens(WorkerExited(1, -11, step=step)), Replace)
    history = History(Policy(max_restarts=99))
    for rank in range(WORKERS):  # several at one step
        assert isinstance(history.happens(WorkerExited(rank, -9, step=7)), Replace)


def test_a_run_shrinks_to_one_worker_which_is_replaced_and_ends_with_the_last_restart() -> None:
    history = History(Policy(max_restarts=3, on_loss="shrink"))
    shrunk = history.happens(WorkerExited(0, -9, step=2))
    assert isinstance(shrunk, Shrink)
    assert [loss.rank for loss in shrunk.losses] == [0]
    assert isinstance(history.happens(WorkerExited(1, -9, step=3)), Shrink)
    assert isinstance(history.happens(WorkerExited(0, -9, step=4)), Replace)
    assert "the run may lose no more workers (max_restarts=3); resume=True goes on" in _cause(
        history.happens(WorkerExited(0, -9, step=5))
    )


@given(policies, anything, st.floats(0, 10))
def test_a_run_is_stopped_with_a_checkpoint_where_somebody_is_left_who_has_the_state(
    policy: Policy, happened: list[WorkerEvent], seconds: float
) -> None:
    action = next_action([WorkerBegan(), *happened], WORKERS, seconds, policy=policy, survives=True)
    if isinstance(action, Stop):
        gone = {r for h in happened if isinstance(h, WorkerStalled) for r in h.ranks}
        gone |= {h.rank for h in happened if isinstance(h, WorkerRaised | WorkerExited)}
        finished = any(isinstance(h, WorkerFinished) for h in happened)
        assert set(action.lost) == (gone if len(gone) < WORKERS and not finished else set())
        before = next_action(happened, WORKERS, seconds, policy=policy, survives=True)
        assert not (isinstance(before, Stop) and before.lost), "not all had begun"


def test_who_was_stopped_and_then_ended_was_stopped() -> None:
    history = History(Policy())
    action = history.happens(WorkerStalled((1,), 7, 1.2, stopped=True), WorkerExited(1, -9, step=7))
    assert isinstance(action, Replace)
    (loss,) = action.losses
    assert "has been stopped (SIGSTOP, or a debugger)" in loss.cause


def test_where_nobody_has_the_state_all_begin_again_and_that_counts_once() -> None:
    lost = [WorkerRaised(rank, "it died with rank 0", None, state_lost=True, step=7) for rank in range(WORKERS)]
    history = History(Policy(max_restarts=2))
    assert isinstance(history.happens(WorkerExited(0, -9, step=7)), Replace)
    action = history.happens(*lost)
    assert isinstance(action, Restart)
    assert [loss.cause for loss in action.losses] == ["it died with rank 0"]
    assert history.decide() == GoOn()
    assert _cause(history.happens(lost[0])).startswith("it died with rank 0")
    assert _cause(next_action(lost, WORKERS, 9.0)) == "it died with rank 0"


def test_ranks_that_only_do_not_move_stop_the_run_as_ever() -> None:
    assert "a deadlock in the model or the data" in _cause(History(Policy()).happens(WorkerStalled((1,), 7, 31.0)))
    assert "called exit" in _cause(History(Policy()).happens(WorkerExited(1, 7)))


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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_restarts": -1}, "max_restarts=-1 must be a whole number of workers"),
        ({"max_restarts": 1.5}, "max_restarts=1.5 must be"),
        ({"on_loss": "panic"}, 'must be "replace" or "shrink"'),
        ({"copies": 0}, "copies=0 must be a whole number of at least 1 host"),
    ],
)
def test_a_policy_says_what_to_do_about_losses_or_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Policy(**wrong)


@given(
    st.sampled_from([None, "3 s", "20 steps", "2 epochs"]),
    st.integers(1, 9),
    st.integers(0, 99),
    st.sampled_from(["replace", "shrink"]),
)
def test_a_policy_is_read_as_it_is_written(every: str | None, keep: int, restarts: int, loss: Any) -> None:
    policy = Policy(checkpoint_every=every, keep=keep, max_restarts=restarts, on_loss=loss)
    assert parse_as(str(policy), Policy) == policy


# Who is late


class Ranks:
    """The progress that ranks show, and a clock."""

    def __init__(self, n: int) -> None:
        self.lines = np.zeros((n, 8), dtype=np.int64)
        self.lines[:, 3] = 1
        self.watch = Watchdog(self.lines)
        self.stopped: list[int] = []
        self.excused: list[int] = []
        self.now = self.watch._clock._looked

    def wait(self, seconds: float) -> WorkerStalled | None:
        """Let the time pass, looking as the supervisor does, until someone is late."""
        until = self.now + seconds
        while self.now < until:
            self.now += LOOK_SECONDS
            if (late := self.watch.late(self.now, self.stopped, self.excused)) is not None:
                return late
        return None

    def fast(self) -> None:
        """Some hundred steps, of 5 ms each."""
        for _ in range(5):
            assert self.wait(LOOK_SECONDS) is None
            self.lines[:, [0, 2]] += 100

    def step(self, seconds: float) -> WorkerStalled | None:
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


def test_a_rank_whose_process_is_stopped_is_late_within_two_seconds_or_ten_steps() -> None:
    for pace, within in [(0.0, 2.0), (3.0, 30.0)]:
        ranks = Ranks(3)
        if pace:
            assert not any(ranks.step(pace) for _ in range(5))
        else:
            ranks.fast()
        ranks.stopped = [1]
        late = ranks.wait(within)
        assert late is not None
        assert (late.ranks, late.stopped) == ((1,), True)
        assert late.seconds > max(0.9, 5 * pace)


def test_ranks_that_are_all_stopped_are_not_late_and_neither_is_one_that_goes_on_soon() -> None:
    ranks = Ranks(2)
    assert ranks.step(1.0) is None
    ranks.stopped = [0, 1]
    assert ranks.wait(600.0) is None
    for _ in range(9):
        ranks.stopped = [1]
        assert ranks.wait(LOOK_SECONDS) is None
        ranks.stopped = []
        assert ranks.wait(LOOK_SECONDS) is None


class Apart(Ranks):
    """Ranks that wait for nobody, of which some go on: a step of each of them at every look."""

    def go(self, seconds: float, *others: int) -> list[tuple[int, str]]:
        """Let the time pass while these ranks go on, and return who was named."""
        told: list[tuple[int, str]] = []
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.lines[list(others), 0] += 1
            self.lines[list(others), 2] += 1
            assert self.wait(LOOK_SECONDS) is None
            told += [(notice.rank, notice.cause) for notice in self.watch.notices()]
        return told


def test_a_rank_that_stands_still_while_others_go_on_is_named_once_each_time() -> None:
    ranks = Apart(3)
    assert not ranks.go(5.0, 0, 1, 2)
    assert not ranks.go(29.0, 0, 2)
    ((rank, cause),) = ranks.go(100.0, 0, 2)
    assert rank == 1
    assert "rank 1 has not moved for 30 s at step 10, while others went on" in cause
    assert not ranks.go(5.0, 0, 1, 2)
    assert [rank for rank, _ in ranks.go(100.0, 2)] == [0], "the other has come back after longer than that"
    assert [rank for rank, _ in ranks.go(3_000.0, 2)] == [1], "each time"


def test_a_rank_may_take_twenty_of_its_own_slowest_steps_though_others_are_fast() -> None:
    ranks = Apart(2)
    for _ in range(3):
        assert not ranks.go(10.0, 0)
        assert not ranks.go(LOOK_SECONDS, 0, 1)
    assert not ranks.go(199.0, 0)
    assert [rank for rank, _ in ranks.go(20.0, 0)] == [1]


def test_who_waits_makes_no_steps_or_has_not_begun_is_not_named() -> None:
    ranks = Apart(4)
    assert not ranks.go(5.0, 0, 1, 2)  # rank 3 is a server
    ranks.lines[1, 1] = 1
    ranks.lines[2, 3] = 0
    for _ in range(2_000):
        ranks.lines[0, 0] += 1
        ranks.now += LOOK_SECONDS
        ranks.watch.late(ranks.now)
    assert not ranks.watch.notices()


def test_a_rank_that_hangs_after_its_first_step_is_named_once_a_network_would_be_compiled() -> None:
    ranks = Apart(2)
    assert not ranks.go(LOOK_SECONDS, 0, 1)
    assert not ranks.go(899.0, 0)
    assert [rank for rank, _ in ranks.go(5.0, 0)] == [1]


def test_who_is_done_may_stand_still_while_another_evaluates() -> None:
    ranks = Apart(3)
    assert not ranks.go(5.0, 0, 1, 2)
    ranks.excused = [1]
    assert [rank for rank, _ in ranks.go(300.0, 0)] == [2]


def test_what_was_found_while_workers_were_replaced_is_told_after_it() -> None:
    ranks = Apart(2)
    assert not ranks.go(5.0, 0, 1)
    for _ in range(100):
        ranks.lines[0, 0] += 1
        assert ranks.wait(LOOK_SECONDS) is None
    ranks.watch.assign_slots([0, 1])
    assert [notice.rank for notice in ranks.watch.notices()] == [1]


def test_ranks_in_step_are_late_where_one_hangs_and_none_is_named_besides() -> None:
    ranks = Apart(2)
    assert not any(ranks.step(1.0) for _ in range(5))
    ranks.lines[0, 1] = 1
    assert ranks.wait(60.0) is not None
    assert not ranks.watch.notices()


def test_a_driver_that_did_not_look_and_a_rank_that_is_alone_name_nobody() -> None:
    ranks = Apart(2)
    assert not ranks.go(5.0, 0, 1)
    ranks.now += 3600.0
    assert not ranks.go(1.0, 0)
    alone = Apart(1)
    assert not alone.go(5.0, 0)
    assert not alone.go(500.0)


def test_who_neither_answers_nor_gets_anything_done_is_silent() -> None:
    ranks = Ranks(3)
    ranks.fast()
    silence = ranks.watch.silence()
    now = silence._clock._looked
    for _ in range(100):  # rank 2 is in a long evaluation
        now += 0.5
        ranks.lines[2, 0] += 1
        late = silence.broken_by([1, 2], now)
        if late is not None:
            break
    assert late is not None
    assert (late.ranks, late.silent) == ((1,), True)
    assert 2.0 < late.seconds < 3.0


def test_nobody_is_silent_while_the_first_step_may_still_be_compiled() -> None:
    ranks = Ranks(2)
    silence = ranks.watch.silence()
    now = silence._clock._looked
    assert all(silence.broken_by([1], now := now + 0.5) is None for _ in range(600))


def test_who_still_opens_the_workload_is_silent_only_after_as_long_as_a_deadlock_takes() -> None:
    ranks = Ranks(2)
    ranks.fast()
    ranks.watch.reset(1)  # another process takes the slot
    silence = ranks.watch.silence()
    now = silence._clock._looked
    for _ in range(100):
        late = silence.broken_by([1], now := now + 0.5)
        if late is not None:
            break
    assert late is not None
    assert 30.0 < late.seconds < 31.0
    silence = ranks.watch.silence()
    for begun, seconds in ((0, 25.0), (1, 2.0)):  # it begins, and has as long as anybody from there on
        ranks.lines[1, 3] = begun
        until = now + seconds
        while now < until:
            assert silence.broken_by([1], now := now + 0.5) is None  # noqa: RUF018
    assert silence.broken_by([1], now + 1.0) is not None
