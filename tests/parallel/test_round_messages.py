"""The messages between replicas that come and go and whoever makes their averages: what has come is never slept on."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from apportion.comm.network.rank_connection import RankConnection
from apportion.parallel.averaging.messages import MessageKind, MessageReader, send_message

Ends = tuple[RankConnection, RankConnection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = (RankConnection(sock, "rank 1") for sock in socket.socketpair())
    yield one, other
    one.release()
    other.release()


def sent(connection: RankConnection) -> None:
    while connection.move():
        pass


def test_what_came_while_something_was_sent_is_known_though_the_socket_says_nothing_more(ends: Ends) -> None:
    here, there = ends
    reader = MessageReader(here, {MessageKind.PART: 8})
    assert not reader.has_come
    send_message(there, MessageKind.PART, {"round": 3}, bytearray(b"12345678"))
    sent(there)
    send_message(here, MessageKind.ROUND, {"round": 3})
    here.move()  # which takes the head of the other's message along
    assert not here.events & select.POLLIN, "nobody would be woken"
    assert reader.has_come
    message = reader.next()
    assert message is not None
    assert (message.kind, message.fields, bytes(message.data)) == (MessageKind.PART, {"round": 3}, b"12345678")
    assert not reader.has_come
    assert here.events & select.POLLIN
