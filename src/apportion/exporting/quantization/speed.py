"""How fast files are here, one example at a time, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apportion.exporting.onnxruntime_session import session

TIMES, SECONDS = 60, 1.0
"""The number of times that each file computes an example, and the seconds that it has for that."""


def seconds_each(files: Sequence[Path | bytes], feed: Mapping[str, Any], *, threads: int) -> list[float]:
    """Return the median of the seconds that each file takes for these inputs, with ``threads`` threads."""
    made = [session(file, threads=threads) for file in files]
    taken: list[list[float]] = [[] for _ in made]
    end = time.monotonic() + SECONDS * len(made)
    for turn in range(TIMES):
        for own, one in zip(taken, made, strict=True):
            began = time.perf_counter()
            one.run(None, feed)
            own.append(time.perf_counter() - began)
        if turn and time.monotonic() > end:
            break
    return [statistics.median(own[1:]) for own in taken]
