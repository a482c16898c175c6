"""The reasons for which a server does not answer a request."""

from __future__ import annotations

from apportion.errors import ApportionError


class DeadlineExceeded(ApportionError):
    """Fewer members than the quorum have answered in time."""


class NoQuorum(ApportionError):
    """Members failed, and those that are left are fewer than the quorum: waiting longer would not help."""


class Overloaded(ApportionError):
    """The queues are full. ``seconds``: the time after which it is worth asking again."""

    def __init__(self, message: str, *, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
