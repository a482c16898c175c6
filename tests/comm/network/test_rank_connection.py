"""Waits for the messages of connections, at the moments at which a message can be missed; and exchanges, in which
neither end goes far ahead of the other."""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from apportion.comm.group import WaitClock
from apportion.comm.network.rank_connection import AHEAD_BYTES, LOOK_SECONDS, WAKE_BYTES, RankConnection, move_until


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


# Exchanges


@pytest.fixture
def over_tcp() -> Iterator[tuple[RankConnection, RankConnection]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        taken, _ = server.accept()
    made = [RankConnection(sock, name) for sock, name in zip((dialled, taken), ("there", "here"), strict=True)]
    yield made[0], made[1]
    for end in made:
        end.release()


def message(nbytes: int, seed: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(nbytes))


def room_for(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def move_both(ends: tuple[RankConnection, RankConnection], holds: Callable[[], bool]) -> None:
    """Move what both ends have to move, until a condition holds."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "nothing moves any more"
        for each in ends:
            each.move()


def move_all(ends: tuple[RankConnection, RankConnection]) -> None:
    """Move both ends until nothing moves."""
    before = -1
    while (now := sum(end.sent + end.received for end in ends)) != before:
        before = now
        for end in ends:
            end.move()


def test_an_end_of_an_exchange_waits_for_the_other_end(ends: tuple[RankConnection, RankConnection]) -> None:
    first, second = ends
    for number in (1, 2):
        own, theirs = message(4 << 20, seed=number), message(4 << 20, seed=-number)
        at_first, at_second = room_for(4 << 20), room_for(4 << 20)
        first.exchange(own, at_first)
        second.receive(at_second)
        second.begin_count()
        move_all(ends)
        assert AHEAD_BYTES - WAKE_BYTES < second.received <= AHEAD_BYTES
        assert first.move(), "the rest is still to be sent"
        assert not first.events & select.POLLOUT, "and nobody is woken for the room that there is"
        second.send(theirs)
        move_both(ends, lambda number=number: first.through == second.through == [number, number])
        assert (at_first, at_second) == (theirs, own)


def test_a_message_whose_counterpart_has_come_waits_for_nothing(ends: tuple[RankConnection, RankConnection]) -> None:
    first, second = ends
    own, at_second = message(4 << 20, seed=1), room_for(4 << 20)
    first.exchange(own, room_for(1000))
    second.exchange(message(1000, seed=2), at_second)
    move_both(ends, lambda: first.through == second.through == [1, 1])
    assert at_second == own


@pytest.mark.parametrize("over", ["ends", "over_tcp"])
def test_exchanges_of_all_lengths_and_messages_between_them_come_whole(
    over: str, request: pytest.FixtureRequest
) -> None:
    ends = request.getfixturevalue(over)
    drawn = random.Random(over)
    sent, got = [], []
    for number in range(60):
        lengths = [drawn.choice((1, 1000, AHEAD_BYTES, AHEAD_BYTES + 1, drawn.randrange(1, 1 << 20))) for _ in ends]
        messages = [message(n, seed=2 * number + at) for at, n in enumerate(lengths)]
        rooms = [room_for(n) for n in lengths]
        sent, got = [*sent, *messages], [*got, *rooms]
        kind = drawn.choice(("exchange", "exchange", "one way"))
        for at, end in enumerate(ends):
            if kind == "exchange":
                end.exchange(messages[at], rooms[1 - at])
            elif at == number % 2:
                end.send(messages[at])
                rooms[1 - at][:] = messages[1 - at]  # which is not sent
            else:
                end.receive(rooms[1 - at])
        if drawn.random() < 0.3:
            drawn.choice(ends).move()
    move_both(ends, lambda: all(end.started == end.through for end in ends))
    assert sent == got


def test_a_fast_connection_is_kept_full(over_tcp: tuple[RankConnection, RankConnection]) -> None:
    def exchange_alone(end: RankConnection, number: int) -> None:
        end.exchange(memoryview(bytearray(32 << 20)), room_for(32 << 20))
        move_until([end], lambda: end.through == [number, number], clock=WaitClock(), seconds=10)

    with ThreadPoolExecutor(2) as threads:
        for number in (1, 2, 3, 4):
            list(threads.map(exchange_alone, over_tcp, [number] * 2, timeout=60))
    first, second = over_tcp
    first.exchange(message(8 << 20, seed=4), room_for(8 << 20))
    second.receive(room_for(8 << 20))
    second.begin_count()
    move_both(over_tcp, lambda: second.received > AHEAD_BYTES)
