"""Waits for the messages of connections, at the moments at which a message can be missed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from apportion.comm.group import WaitClock
from apportion.comm.network.rank_connection import LOOK_SECONDS, RankConnection, move_until


@pytest.fixture
def ends() -> Iterator[tuple[RankConnection, RankConnection]]:
    """Both ends of a connection."""
    made = [RankConnection(sock, name) for sock, name in zip(socket.socketpair(), ("there", "here"), strict=True)]
    yield made[0], made[1]
    for end in made:
        end.release()


def wait_for(receiver: RankConnection, clock: WaitClock) -> float:
    """Wait for the first message, and return the seconds that it took."""
    began = time.perf_counter()
    move_until([receiver], lambda: receiver.through[1] == 1, clock=clock, seconds=10.0)
    return time.perf_counter() - began


def test_a_message_that_comes_while_others_are_moved_on_is_noticed_at_once(
    ends: tuple[RankConnection, RankConnection],
) -> None:
    """As in a group, the connection that is waited for is one of those that are moved on while something is waited
    for, after another whose move has the message come."""
    sender, receiver = ends
    receiver.receive(memoryview(bytearray(4)))
    clock = WaitClock()

    def other() -> bool:
        sender.send(memoryview(b"come"))
        assert not sender.move(), "so few bytes go at once"
        return False

    clock.moving = {0: other, id(receiver): receiver.move_aside}
    assert wait_for(receiver, clock) < LOOK_SECONDS / 2


def test_what_a_caller_moves_itself_is_left_to_it() -> None:
    clock, moved = WaitClock(), list[str]()
    clock.moving = {1: lambda: bool(moved.append("own")) or True, 2: lambda: bool(moved.append("other"))}
    assert not clock.move_on(but={1})
    assert moved == ["other"]
    assert list(clock.moving) == [1], "the other is through"
    assert clock.move_on()
