"""The thread that makes the averages of replicas which come and go, with replicas that send what is not of the run."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import networks
import pytest
import torch

from apportion.comm.network.rank_connection import RankConnection
from apportion.parallel.averaging.contribution import ContributionBytes, ReplicaTensors
from apportion.parallel.averaging.coordinator import OpenRounds, RoundCoordinator
from apportion.parallel.averaging.messages import MessageKind, MessageReader, RoundMessage, send_message
from apportion.parallel.replica.replica import Replica

SECONDS = 20.0


class Listener:
    """A listener to which one more rank has connected."""

    address = on_ready = None

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self._waiting = {rank: sock}

    def ready(self, name: str) -> list[int]:
        return list(self._waiting)

    def poll(self, name: str, rank: int, seconds: float) -> socket.socket | None:
        return self._waiting.pop(rank, None)

    def close(self) -> None:
        for sock in self._waiting.values():
            sock.close()


class Sender:
    """A replica's end, by which a test sends what it likes."""

    def __init__(self, rank: int, sock: socket.socket, most: int) -> None:
        self.connection = RankConnection(sock, f"rank {rank}")
        kinds = {kind: most for kind in MessageKind}
        self._reader = MessageReader(self.connection, kinds)

    def send(self, kind: MessageKind, fields: dict[str, Any], data: bytearray | None = None) -> None:
        send_message(self.connection, kind, fields, data)
        while self.connection.through[0] < self.connection.started[0]:
            self.connection.move()

    def received(self, kind: MessageKind) -> RoundMessage:
        """Waits for the next message of a kind."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if (message := self._reader.next()) is not None and message.kind is kind:
                return message
        raise AssertionError(f"no {kind.name} within {SECONDS:.0f} s")


@pytest.fixture
def rounds() -> Iterator[tuple[RoundCoordinator, list[Sender], int]]:
    """The coordinator of two replicas and three batches, their ends, and the bytes of what rank 0 sends."""
    frame = ReplicaTensors(Replica(networks.cases["mlp"](64), rank=0, device=torch.device("cpu")), None)
    full = ContributionBytes(frame.new(), slots=True)
    pairs = [socket.socketpair() for _ in range(2)]
    coordinator = RoundCoordinator(
        OpenRounds(every=1, total=3, deadline=SECONDS, size=2),
        frame,
        Listener(1, pairs[1][0]),  # type: ignore[arg-type]
        "test",
        pairs[0][0],
    )
    senders = [Sender(rank, pair[1], full.nbytes) for rank, pair in enumerate(pairs)]
    for rank, sender in enumerate(senders):
        sender.send(MessageKind.HELLO, {"process": f"process {rank}", "nbytes": full.nbytes, "given": {}})
    coordinator.start(frame.new(), 0, ())
    yield coordinator, senders, full.nbytes
    for sender in senders:
        sender.connection.release()
    coordinator.close()


@pytest.mark.parametrize("kind", [MessageKind.PART, MessageKind.LEFT])
def test_what_comes_without_its_tensors_is_not_averaged_and_the_others_go_on(kind: MessageKind, rounds: Any) -> None:
    coordinator, (first, second), nbytes = rounds
    opened, others = (sender.received(MessageKind.ROUND) for sender in (first, second))
    assert opened.fields["round"] == others.fields["round"]
    second.send(kind, {"round": others.fields["round"], "made": 1, "examples": 4.0}, bytearray())
    second.connection.release()
    while not opened.fields["ended"]:
        made = {"round": opened.fields["round"], "made": len(opened.fields["batches"]), "examples": 4.0}
        first.send(MessageKind.PART, made, bytearray(nbytes))
        opened = first.received(MessageKind.ROUND)
    assert coordinator.failed is None
    parts = [part for closed in coordinator.log().rounds for part in closed.parts if part.examples]
    assert {part.rank for part in parts} == {0}
    assert sorted(batch for part in parts for batch in part.batches) == [0, 1, 2], (
        "the other's batch is made by this one"
    )
