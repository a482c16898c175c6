"""The written form of a deadline."""

from __future__ import annotations

import re

_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}


def seconds_of(deadline: str) -> float:
    """Return the seconds of a time that is written like "2 s", "500 ms" or "5 min". ValueError where it is not."""
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(ms|s|min)\s*", str(deadline))
    if match is None or not float(match[1]):
        raise ValueError(f'deadline={deadline!r} must be a time above 0, like "2 s", "500 ms" or "5 min"')
    return float(match[1]) * _SECONDS[match[2]]
