"""The states of a connection, and which may follow which."""

from __future__ import annotations

from enum import IntEnum


class ConnectionState(IntEnum):
    """The part of a request that a connection is at."""

    HEAD = 0
    """A head is due, or on its way; the answer before it may still be being sent."""
    BODY = 1
    """A head has come, and its body has not, or not all of it."""
    ANSWER = 2
    """A whole request has come, and its answer is due."""
    ENDING = 3
    """The last answer is given: what the client still sends is dropped."""
    OVER = 4
    """The connection is lost."""


_S = ConnectionState
FOLLOWING: tuple[frozenset[ConnectionState], ...] = (
    frozenset({_S.BODY, _S.ENDING, _S.OVER}),
    frozenset({_S.ANSWER, _S.HEAD, _S.ENDING, _S.OVER}),
    frozenset({_S.HEAD, _S.ENDING, _S.OVER}),
    frozenset({_S.OVER}),
    frozenset(),
)
"""The states that may follow each state, by its number."""
