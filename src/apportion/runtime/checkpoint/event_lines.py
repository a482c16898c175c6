"""The events of a run as lines of JSON, of which ``events.jsonl`` is made (``reporting/journal.py`` says how)."""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from apportion.core.event import Event, EventKind
from apportion.runtime.checkpoint.durable_files import Appended

EVENTS = "events.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEXTS = {"strategy", "launcher", "device", "path", "cause", "traceback", "action", "run_dir", "reason", "resume"}
"""The fields of an event's data that are text whatever they say: a cause may be "NaN"."""


def append_events(run_dir: Path, events: Iterable[Event]) -> None:
    """Appends events to the record of a run, which no rank writes any more. Raises OSError where that cannot be
    done."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = Appended(run_dir / EVENTS, lambda line: decode(line) is not None)
    try:
        for event in events:
            lines.write(encode(event))
    finally:
        lines.close()


def encode(event: Event) -> bytes:
    record = {
        "time": round(time.time(), 3),
        "kind": event.kind,
        "step": event.step,
        "epoch": event.epoch,
        "seconds": event.seconds,
        "data": event.data,
    }
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:  # some number is not finite: rare enough to find out by trying
        text = json.dumps(_finite(record), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def decode(line: bytes) -> tuple[float, Event] | None:
    """Return the wall clock and the event on a line; None where the line is not an event."""
    try:
        record = json.loads(line)
        data = record["data"]
        if not isinstance(data, dict) or not isinstance(record["kind"], str):
            return None
        if b'NaN"' in line or b'Infinity"' in line:
            data = {key: value if key in _TEXTS else _numbers(value) for key, value in data.items()}
        event = Event(
            kind=cast("EventKind", record["kind"]),
            step=operator.index(record["step"]),
            epoch=float(record["epoch"]),
            seconds=float(record["seconds"]),
            data=data,
        )
        return float(record["time"]), event
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _finite(value: Any) -> Any:
    """Return the value with a string for each number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _numbers(value: Any) -> Any:
    """Return the value with a number for each string that ``_finite`` writes for one."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value
