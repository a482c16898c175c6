"""Records the orders of rows that a script draws with numpy or Python: a script without a loader may draw the same one
in each epoch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from apportion.script_check.recording.draws import LARGEST, WatchedDraws
from apportion.script_check.recording.recorder import Recorder

_ORDERING: tuple[tuple[Any, str, int | None], ...] = (
    (random, "shuffle", 0), (random, "sample", None), (random.Random, "shuffle", 1), (random.Random, "sample", None),
    (np.random, "shuffle", 0), (np.random, "permutation", None),
)  # fmt: skip
"""The functions that bring rows into an order, and the place of the argument whose order they change."""


def install(recorder: Recorder, drawing: WatchedDraws) -> None:
    """Watch the functions that shuffle, those of numpy's generators as well."""

    def watching(name: str, function: Callable[..., Any], place: int | None) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            recorder.draws += 1
            result = function(*args, **kwargs)
            rows = result if place is None else args[place] if len(args) > place else None
            if rows is not None and (order := _digest(rows)) is not None:
                drawing.record_order(name, order, len(rows))
            return result

        return watched

    for owner, name, place in _ORDERING:
        setattr(owner, name, watching(name, getattr(owner, name), place))

    class WatchedGenerator(np.random.Generator):
        """A generator of numpy whose orders are recorded."""

        permutation = watching("permutation", np.random.Generator.permutation, None)
        shuffle = watching("shuffle", np.random.Generator.shuffle, 1)

    default_rng = np.random.default_rng

    @wraps(default_rng)
    def generator(*args: Any, **kwargs: Any) -> np.random.Generator:
        recorder.draws += 1
        made = default_rng(*args, **kwargs)
        return WatchedGenerator(made.bit_generator) if type(made) is np.random.Generator else made

    np.random.default_rng = generator


def _digest(rows: Any) -> str | None:
    """A digest of an order of numbers, names, or tuples of such; None for anything else."""
    if not isinstance(rows, list | np.ndarray) or not len(rows) or len(rows) > LARGEST:
        return None
    if not all(map(_is_name, rows)) if isinstance(rows, list) else rows.dtype.kind not in "iufUS":
        return None
    data = repr(rows).encode() if isinstance(rows, list) else rows.tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _is_name(row: Any) -> bool:
    return isinstance(row, int | float | str) or (isinstance(row, tuple) and all(map(_is_name, row)))
