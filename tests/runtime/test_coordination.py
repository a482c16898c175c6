"""When ranks ask each other, stop and save: the decision of rank 0, which alone can be asked without any other."""

from __future__ import annotations

import itertools

import pytest
import torch

from apportion import Policy
from apportion.comm.group import Alone
from apportion.runtime.worker import coordination
from apportion.runtime.worker.coordination import RunControl, StepCoordinator


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(coordination, "time", clock)
    return clock


def agreeing(control: RunControl, every: str | None = None, *, done: int = 0) -> StepCoordinator:
    policy = Policy(checkpoint_every=every)
    return StepCoordinator(Alone(), torch.device("cpu"), control, policy, steps_per_epoch=10, done=done)


def asked(
    one: StepCoordinator, clock: Clock, steps: int, *, seconds: float, done: int = 0
) -> list[tuple[int, bool, bool]]:
    """(step, stop, save) of each question in so many steps."""
    found = []
    for step in range(done + 1, done + steps + 1):
        clock.now += seconds
        if step >= one.next:
            found.append((step, *one.poll(step, 0.0)))
    return found


def test_the_time_between_two_questions_comes_to_a_quarter_of_a_second(clock: Clock) -> None:
    steps = [step for step, _, _ in asked(agreeing(RunControl(), "9 s"), clock, 1000, seconds=0.01)]
    assert steps[:3] == [1, 3, 7]
    assert {b - a for a, b in itertools.pairwise(steps[5:])} == {25}


def test_long_steps_are_asked_after_each_of_them(clock: Clock) -> None:
    assert [step for step, _, _ in asked(agreeing(RunControl(), "9 s"), clock, 6, seconds=1.0)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("every", "saves"), [("20 steps", [20, 40, 60]), ("3 epochs", [30, 60]), ("7 steps", [7, 14])])
def test_a_number_of_steps_is_kept_to_the_step(every: str, saves: list[int], clock: Clock) -> None:
    found = asked(agreeing(RunControl(), every), clock, saves[-1], seconds=0.001)
    assert [step for step, _, save in found if save] == saves


def test_seconds_are_kept_to_a_quarter_of_one(clock: Clock) -> None:
    saves = [step for step, _, save in asked(agreeing(RunControl(), "3 s"), clock, 1000, seconds=0.01) if save]
    assert all(300 <= b - a <= 325 for a, b in itertools.pairwise([0, *saves])), saves


def test_saving_takes_no_more_than_its_share_of_the_time(clock: Clock) -> None:
    one = agreeing(RunControl())
    clock.now += 19.0
    assert one.poll(1, 1.0) == (False, False)
    clock.now += 1.0
    assert one.poll(2, 1.0) == (False, True)


def test_a_request_to_stop_is_answered_at_the_next_question(clock: Clock) -> None:
    control = RunControl()
    one = agreeing(control)
    assert one.poll(1, 0.0) == (False, False)
    control.stop = True
    assert one.poll(2, 0.0)[0]


def test_after_a_change_what_was_to_be_saved_after_the_last_step_is_saved(clock: Clock) -> None:
    one = agreeing(RunControl(), "20 steps")
    asked(one, clock, 20, seconds=0.01)
    one.rejoin(Alone(), 20)
    assert one.next == 20
    assert one.poll(20, 0.0) == (False, True)
    one.rejoin(Alone(), 21)
    assert one.poll(21, 0.0) == (False, False)
    one.rejoin(Alone(), 0)
    assert one.poll(0, 0.0) == (False, False), "nothing has been done"


def test_a_replacement_knows_when_the_one_before_it_saved(clock: Clock) -> None:
    """Its line of the progress outlives it: workers that are lost again and again hold up no checkpoint."""
    control = RunControl()
    asked(agreeing(control, "9 s"), clock, 5, seconds=1.0)
    replacement = agreeing(RunControl(progress=control.progress), "9 s", done=5)
    assert asked(replacement, clock, 4, seconds=1.0, done=5)[-1] == (9, False, True)


def test_a_run_that_begins_has_just_saved(clock: Clock) -> None:
    assert agreeing(RunControl(), "1 s").poll(1, 0.0) == (False, False)
