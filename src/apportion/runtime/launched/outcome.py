"""What came of something that ranks did together, as plain JSON: a value, or the error that it was raised as."""

from __future__ import annotations

from typing import Any

from apportion.comm.channel import Message
from apportion.errors import ApportionError, CheckpointError, Disproved, NotFinite, PeerLost, RanksDiffer, WorkerFailed

RESULT, FAILED = "result", "failed"
"""The kinds of the message."""
_KINDS = {
    kind.__name__: kind
    for kind in (ApportionError, CheckpointError, Disproved, NotFinite, PeerLost, RanksDiffer, ValueError, WorkerFailed)
}


def result(value: Any) -> Message:
    """Returns the message that tells a value, which is plain JSON."""
    return {"kind": RESULT, "value": value}


def failed(error: BaseException) -> Message:
    """Returns the message that tells an error of rank 0."""
    name = type(error).__name__
    text = str(error) if name in _KINDS else f"rank 0 failed: {name}: {error}"
    about = {key: getattr(error, key, None) for key in ("rank", "traceback", "where")}
    return {"kind": FAILED, "name": name if name in _KINDS else "ApportionError", "text": text, **about}


def error_of(message: Message) -> Exception:
    """Returns the error that a message tells, of the type that it had; ApportionError where the type is unknown."""
    kind: Any = _KINDS.get(message["name"], ApportionError)
    if issubclass(kind, WorkerFailed):
        return kind(message["text"], rank=message["rank"], traceback=message["traceback"], where=message["where"])  # type: ignore[no-any-return]
    return kind(message["text"])  # type: ignore[no-any-return]


def value_of(message: Message) -> Any:
    """Returns the value that a message tells, or raises the error."""
    if message["kind"] == RESULT:
        return message["value"]
    raise error_of(message)
