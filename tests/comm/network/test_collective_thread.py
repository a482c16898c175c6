"""Waits for collectives that another thread makes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from apportion.comm.group import WaitClock
from apportion.comm.network.collective_thread import CollectiveThread


@pytest.fixture
def thread() -> Iterator[CollectiveThread]:
    made = CollectiveThread()
    yield made
    made.close()


def waiting_group() -> Any:
    """What a wait needs of a group: its clock, with a word that an observer sees, and the list of its waits."""
    clock = WaitClock()
    clock.word = [0]
    return SimpleNamespace(all_waits=clock, waits=deque())


@pytest.mark.parametrize("how", ["work", "idle"])
def test_messages_go_on_while_a_collective_is_waited_for_that_needs_them(thread: CollectiveThread, how: str) -> None:
    """Another rank, which the collective waits for, waits for a message that only this rank's own thread moves on."""
    group, came, seen = waiting_group(), threading.Event(), []
    work = thread.run(lambda clock: seen.append(came.wait(10.0)), group)

    def move() -> bool:
        seen.append(group.all_waits.word[0] == 1)
        came.set()
        return False

    group.all_waits.moving[0] = move
    work.wait() if how == "work" else thread.wait_idle(group)
    assert seen == [True, True], "it was marked as waiting, and the collective did not wait for its deadline"
    assert group.all_waits.word == [0]
    assert len(group.waits) == (how == "work"), "ranks compare their waits for collectives, one by one"


def test_the_errors_of_collectives_are_told_to_those_that_wait_for_them_alone(thread: CollectiveThread) -> None:
    group = waiting_group()

    def fail(clock: WaitClock) -> None:
        raise RuntimeError("lost")

    work = thread.run(fail, group)
    thread.wait_idle(group)
    with pytest.raises(RuntimeError, match="lost"):
        work.wait()
