"""Messages between the replicas and the one that makes their averages: a kind, some plain JSON, and tensors' bytes.

Nothing is unpickled, and no length that the other end names is allocated without being bounded: JSON by MOST_JSON, the
bytes by what a message of its kind may have.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, final

from apportion.comm.network.rank_connection import RankConnection

_HEAD = struct.Struct("!BIQ")
"""The kind of a message, the length of its JSON and the number of its bytes."""
MOST_JSON = 4 << 20
"""The most bytes of the JSON of a message."""


class MessageKind(IntEnum):
    """The kinds of messages."""

    HELLO = 1
    """A replica says who it is, and what it was given to train."""
    REFUSED = 2
    """A replica is sent the reason why it may not take part."""
    ROUND = 3
    """A replica is given its batches, and the average that it begins with."""
    PART = 4
    """A replica gives what it has learnt from its batches."""
    ASKED = 8
    """A replica is asked to give what it has by now."""
    CLOSED = 5
    """A replica is informed that its round is over without it."""
    LEFT = 6
    """A replica says that it has left a round that was closed, and how many batches it had made of it."""
    ENDED = 7
    """A replica is informed that the run has ended."""


@dataclass(frozen=True)
class RoundMessage:
    """A message that has come."""

    kind: MessageKind
    fields: Mapping[str, Any]
    data: bytearray


def send_message(
    connection: RankConnection, kind: MessageKind, fields: Mapping[str, Any], data: bytearray | None = None
) -> None:
    """Begin to send a message; ``data`` must stay as it is until it is through."""
    text = json.dumps(fields).encode()
    if len(text) > MOST_JSON:
        raise AssertionError(f"the JSON of a message has {len(text)} bytes, and at most {MOST_JSON} are read")
    nbytes = 0 if data is None else len(data)
    connection.send(memoryview(_HEAD.pack(kind, len(text), nbytes)))
    connection.send(memoryview(text))
    if data:
        connection.send(memoryview(data))


@final
class MessageReader:
    """Receives the messages of a connection as far as they have come. ``most``: the most bytes that a message of a kind
    may have besides its JSON; kinds that are not in it are refused."""

    def __init__(self, connection: RankConnection, most: Mapping[MessageKind, int]) -> None:
        self.connection, self._most = connection, dict(most)
        self._head, self._text, self._data = bytearray(_HEAD.size), bytearray(), bytearray()
        self._kind: MessageKind | None = None
        self._until = connection.receive(memoryview(self._head))

    @property
    def has_come(self) -> bool:
        """True where a piece has come that ``next`` has not looked at: sending on this connection also receives, and
        the socket does not report those bytes again."""
        return self.connection.through[1] >= self._until

    def next(self) -> RoundMessage | None:
        """Return the next message that is whole; None where none is. Raises PeerLost where the connection has ended,
        and ConnectionError where something else comes than a message."""
        connection = self.connection
        while True:
            connection.move()
            if not self.has_come:
                return None
            if self._kind is None:
                self._start_message()
                continue
            message = RoundMessage(self._kind, self._parsed(), self._data)
            self._kind, self._data = None, bytearray()
            self._until = connection.receive(memoryview(self._head))
            return message

    def _start_message(self) -> None:
        """Make room for the message whose head has come."""
        number, text, data = _HEAD.unpack(self._head)
        if number not in set(self._most) or text > MOST_JSON or data > self._most[MessageKind(number)]:
            raise ConnectionError(
                f"{self.connection.name} sent a message of kind {number} with {text} + {data} bytes, which is none of "
                "this run"
            )
        self._kind, self._text, self._data = MessageKind(number), bytearray(text), bytearray(data)
        self._until = self.connection.receive(memoryview(self._text))
        if data:
            self._until = self.connection.receive(memoryview(self._data))

    def _parsed(self) -> Mapping[str, Any]:
        try:
            fields = json.loads(self._text)
        except ValueError as error:
            raise ConnectionError(f"{self.connection.name} sent {self._text[:40]!r}, which is not JSON") from error
        if not isinstance(fields, dict):
            raise ConnectionError(f"{self.connection.name} sent {type(fields).__name__}, where a message has names")
        return fields
