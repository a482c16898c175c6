"""One JSON object a line, on standard error: {"time", "level", "event", ...}."""

from __future__ import annotations

import sys
import time
from typing import Any, Literal

import orjson


def log(event: str, *, level: Literal["info", "warning", "error"] = "info", **about: Any) -> None:
    """``event``: for people and for grep; the rest for programs."""
    line = orjson.dumps({"time": round(time.time(), 3), "level": level, "event": event, **about}, default=str)
    try:
        sys.stderr.buffer.write(line + b"\n")
        sys.stderr.buffer.flush()
    except OSError:  # nobody reads it any more
        pass
