"""The messages between the driver and an agent: JSON or plain bytes, each behind its kind and its length; and the rules
that those of an agent must obey, kind by kind.

::

    J  length  {"kind": "event", ...}
    B  length  the bytes

Nothing is unpickled, and nothing is allocated for a length beyond the bound of its kind. An agent begins with a line of
its own, since what a login shell prints comes first.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, final

MOST_JSON, MOST_BYTES = 16 << 20, 80 << 20
"""The most bytes of a message of each kind."""
GREETING = b"\napportion-agent/1\n"
"""The line that an agent begins with."""
MOST_NOISE = 1 << 16
"""The most bytes that a login shell may print before it."""
ALIVE_SECONDS = 0.5
"""The seconds after which each end says that it is there."""
_HEAD = struct.Struct("!cI")
_BOUNDS = {b"J": MOST_JSON, b"B": MOST_BYTES}
Message = dict[str, Any]
MOST_CORES = 1 << 14
"""The largest number of cores of a host, and of GPUs, that is believed."""
MOST_SLOTS = 1 << 14
"""The largest number of workers of a host."""
_MOST_TEXT = 1 << 20
"""The most characters of a name, a path or a reason; tracebacks and what ranks print are bounded by the message."""
Rule = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words, and whether it is."""


class FrameError(Exception):
    """What came is not a message of this protocol."""


@final
class FrameWriter:
    """Writes messages, whole ones from any thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def greet(self) -> None:
        """Writes the line that an agent begins with."""
        with self._lock:
            self._file.write(GREETING)
            self._file.flush()

    def send(self, message: Mapping[str, Any] | bytes) -> None:
        """Writes a message. Raises OSError where the other end is gone, ValueError where it is too long."""
        kind, data = (b"B", message) if isinstance(message, bytes) else (b"J", json.dumps(message).encode())
        if len(data) > _BOUNDS[kind]:
            raise ValueError(f"a message of {len(data):,} bytes is longer than {_BOUNDS[kind]:,}")
        with self._lock:
            self._file.write(_HEAD.pack(kind, len(data)) + data)
            self._file.flush()


@final
class FrameReader:
    """Reads messages, from one thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def await_greeting(self) -> bool:
        """Skips what a login shell prints, and returns whether the line of an agent has come before the end, or before
        too much else has."""
        seen = b""
        while not seen.endswith(GREETING):
            byte = self._file.read(1)
            if not byte or len(seen) > MOST_NOISE:
                return False
            seen += byte
        return True

    def receive(self) -> Message | bytes | None:
        """Returns the next message; None at the end of the stream, within a message too. Raises FrameError where what
        comes is none."""
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        kind, length = _HEAD.unpack(head)
        if length > _BOUNDS.get(kind, -1):
            raise FrameError(f"{head!r} does not begin a message")
        data = self._file.read(length)
        if len(data) < length:
            return None
        if kind == b"B":
            return data
        try:
            message = json.loads(data)
        except RecursionError:
            raise FrameError(f"{data[:40]!r} is JSON that is nested too deep to be read") from None
        except ValueError as error:
            raise FrameError(f"{data[:40]!r} is not JSON ({error})") from error
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise FrameError(f"{data[:40]!r} says no kind")
        return message


def _whole(least: int, most: int) -> Rule:
    return f"a whole number from {least} to {most:,}", lambda value: type(value) is int and least <= value <= most


def _or_null(rule: Rule) -> Rule:
    words, holds = rule
    return f"{words}, or null", lambda value: value is None or holds(value)


def _list_of(rule: Rule, most: int = MOST_SLOTS) -> Rule:
    words, holds = rule
    return (
        f"a list, each entry {words}",
        lambda value: isinstance(value, list) and len(value) <= most and all(map(holds, value)),
    )


_TEXT: Rule = ("a text", lambda value: isinstance(value, str) and len(value) <= _MOST_TEXT)
_LONG_TEXT: Rule = ("a text", lambda value: isinstance(value, str))
_BOOL: Rule = ("true or false", lambda value: isinstance(value, bool))
_COUNT = _whole(0, 1 << 62)
_SIGNED = _whole(-(1 << 63), (1 << 63) - 1)
_SLOT = _whole(0, MOST_SLOTS - 1)
_PORT = _whole(1, 65535)
_VERSIONS: Rule = (
    "an object of texts",
    lambda value: isinstance(value, dict) and len(value) <= 100 and all(isinstance(v, str) for v in value.values()),
)
_OBJECT: Rule = ("an object", lambda value: isinstance(value, dict))
_NUMBER: Rule = ("a finite number", lambda value: type(value) in (int, float) and math.isfinite(value))
_REAL: Rule = ("a number", lambda value: isinstance(value, int | float))
_REALS: Rule = (
    "an object of numbers",
    lambda value: isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values()),
)
_SERIES: Rule = (
    "an object of lists of numbers",
    lambda value: (
        isinstance(value, dict)
        and all(isinstance(v, list) and all(isinstance(n, int | float) for n in v) for v in value.values())
    ),
)
_PLACE = {"address": _TEXT, "port": _PORT}
_RAISED = {
    "summary": _LONG_TEXT,
    "traceback": _or_null(_LONG_TEXT),
    "where": _or_null(_LONG_TEXT),
    **{name: _BOOL for name in ("mistake", "symptom", "state_lost", "checkpoint", "not_finite", "differs")},
}
FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "here": {
        "hostname": _TEXT,
        "cores": _whole(1, MOST_CORES),
        "gpus": _whole(0, MOST_CORES),
        "address": _TEXT,
        "python": _TEXT,
        "versions": _VERSIONS,
    },
    "place": _PLACE,
    "reached": {"why": _or_null(_TEXT)},
    "refused": {"why": _LONG_TEXT},
    "started": {"directory": _TEXT},
    "notice": {"signal": _whole(1, 64), "name": _TEXT},
    "progress": {
        "generation": _COUNT,
        "lines": _list_of(_list_of(_SIGNED, 1000)),
        "stopped": _list_of(_SLOT),
    },
    "reserved": {"generation": _COUNT, **_PLACE},
    "answered": {"slot": _SLOT, "generation": _COUNT},
    "torn": {"slot": _SLOT, "generation": _COUNT},
    "exited": {"slot": _SLOT, "status": _or_null(_SIGNED), "out_of_memory": _BOOL},
    "finished": {"slot": _SLOT},
    "raised": {"slot": _SLOT, **_RAISED},
    "output": {"slot": _SLOT, "lines": _list_of(_LONG_TEXT, 1 << 20)},
    "event": {"slot": _SLOT, "event": _OBJECT},
    "noted": {"slot": _SLOT, "numbers": _list_of(_COUNT, 1 << 20)},
    "warned": {"slot": _SLOT, "text": _LONG_TEXT},
    "recorded": {"why": _or_null(_TEXT)},
    "fetched": {"copied": _BOOL, "there": _BOOL, "path": _TEXT},
    "file": {"path": _TEXT},
    "folder": {"path": _TEXT},
    "link": {"path": _TEXT, "target": _TEXT},
}
"""The fields that a message of each kind must have. What is not named here is read by nothing, or by a reader that
checks it."""
_PROOF: Rule = (
    "an object with a sentence",
    lambda value: isinstance(value, dict) and isinstance(value.get("sentence"), str),
)
EVENT: Mapping[str, Rule] = {
    "kind": _TEXT,
    "step": _COUNT,
    "epoch": _NUMBER,
    "seconds": _NUMBER,
    "data": _OBJECT,
}
"""The fields that an event has, and no others."""


_DATA: Mapping[str, Mapping[str, Rule]] = {
    "plan": {"strategy": _TEXT, "launcher": _TEXT, "why": _TEXT, "candidates": _list_of(_OBJECT)},
    "start": {
        **dict.fromkeys(("strategy", "launcher", "device"), _TEXT),
        **dict.fromkeys(("parameters", "examples", "batch_size", "steps", "first_step"), _COUNT),
        "resumed": _BOOL,
        "proof": _or_null(_PROOF),
    },
    "step": {"values": _SERIES, "examples_per_second": _REAL},
    "speed": {
        "rank": _COUNT,
        **dict.fromkeys(("examples_per_second", "loading", "computing", "waiting", "updating"), _REAL),
    },
    "rollouts": {"rank": _COUNT, "score": _or_null(_REAL)},
    "drift": {"cause": _TEXT},
    "evaluation": {"metrics": _REALS},
    "checkpoint": {"path": _TEXT},
    "fault": {"cause": _LONG_TEXT, "action": _TEXT},
    "end": {"reason": _TEXT, "metrics": _REALS, "examples_per_second": _REAL, "resume": _or_null(_LONG_TEXT)},
}
"""What the driver reads of the data of an event, by its kind; a kind that is not named is none."""


def check_message(message: Mapping[str, Any]) -> None:
    """Raises FrameError where a message that an agent has sent is not what it must be: the field, the value and the
    rule."""
    kind = str(message["kind"])
    whose = {"slot": _SLOT} if "slot" in message else {}  # also of a kind that its reader checks
    _check(kind, message, {**whose, **FIELDS.get(kind, {})})
    if kind == "event":
        _check("event", message["event"], EVENT)
        if more := sorted(message["event"].keys() - EVENT.keys()):
            raise FrameError(f"an event has no field {more[0][:40]!r}")
        if (event := message["event"]["kind"]) not in _DATA:
            raise FrameError(f"unknown kind of event: {event[:40]!r}")
        _check(f"event, {event}", message["event"]["data"], _DATA[event])


def _check(kind: str, given: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    for name, (words, holds) in rules.items():
        if name not in given:
            raise FrameError(f"its message {kind!r} has no {name!r}, which must be {words}")
        if not holds(given[name]):
            raise FrameError(f"its message {kind!r} says {name}={_brief(given[name])}, which must be {words}")


def _brief(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or -(10**30) < value < 10**30 else "a number of over 30 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
