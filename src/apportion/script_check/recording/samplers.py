"""Records the lists of indices that a script takes from a batch sampler without a loader, and feeds those of all ranks.

A ``BatchSampler`` that the script iterates over by itself is a loader whose batches are lists of indices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from itertools import count
from typing import Any

from torch.utils.data import BatchSampler

from apportion.script_check.recording.known_loaders import Loaders


def install(loaders: Loaders) -> None:
    """Watch torch's batch sampler where the script itself iterates over it."""
    recorder = loaders.recorder
    iterate = BatchSampler.__iter__

    @wraps(iterate)
    def watched(self: BatchSampler) -> Iterator[list[Any]]:
        if not recorder.is_user_file(sys._getframe(1).f_code.co_filename) or not recorder.active:
            return iterate(self)
        return _fed(loaders, self, iterate) if recorder.feed is not None else _recorded(loaders, self, iterate(self))

    BatchSampler.__iter__ = watched  # type: ignore[method-assign]


def _recorded(loaders: Loaders, sampler: BatchSampler, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
    recorder = loaders.recorder
    key, iteration = loaders.begin_sampler_iteration(sampler)
    before = recorder.draws
    for number in count():
        outer, recorder.drawing = recorder.drawing, "order"
        try:
            indices = next(batches, None)
        finally:
            recorder.drawing = outer
        if indices is None:
            break
        recorder.emit(
            "batch",
            loader=key,
            iteration=iteration,
            number=number,
            indices=list(indices),
            rows=None,
            random=recorder.draws > before,
        )
        yield indices
    recorder.emit("exhausted", loader=key, iteration=iteration)


def _fed(loaders: Loaders, sampler: BatchSampler, iterate: Any) -> Iterator[list[Any]]:
    given = loaders.next_fed(sampler, None)
    if given is None:
        return _recorded(loaders, sampler, iterate(sampler))
    rows = given.indices
    if given.evaluation:
        read = rows[0] or []
        rows = [read[start : start + sampler.batch_size] for start in range(0, len(read), sampler.batch_size)]
    return _recorded(loaders, sampler, iter([list(indices) for indices in rows if indices is not None]))
