"""What a pass is fed with: the weights that the ranks of another began with, their learning rates, and their rows."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from apportion.script_check.rows import count, reversed_rows

Array = np.ndarray[Any, Any]


@dataclass
class FedIteration:
    """What one iteration over a loader yields in place of its own batches.

    ``batches``: one tree for each batch (see ``rows.py``); None where it is made from ``indices`` by the loader's own
    data set and collate function. ``evaluation``: that the rows are those of an evaluation, of which each is read once,
    in batches of the loader's own size; ``indices`` is then one list, or ``batches`` has one tree for each row.
    ``exhausted``: whether the ranks read it to its end. ``length``: the number of batches that it had on the ranks.
    ``parts``: of each batch, how many rows each rank has read. ``rows``: the length of the loader's data set.
    """

    batches: list[Any] = field(default_factory=list)
    indices: list[list[Any] | None] = field(default_factory=list)
    evaluation: bool = False
    exhausted: bool = True
    length: int | None = None
    parts: list[list[int]] = field(default_factory=list)
    rows: int | None = None


@dataclass
class Feed:
    """``weights``: arrays by name. ``rates``: the learning rates of each parameter group at each step, by optimizer;
    ``momenta``: its momentum and betas. ``iterations``: by loader, in order. ``draws``: the random numbers that the
    ranks drew, by place (see ``recording/draws.py``) and rank; ``join_draws``: that a script without loaders computes
    as many micro-batches in one process as on each rank, so that a draw has the numbers of all ranks. ``constants``: of
    each step in turn, what a script without a loader brings into its computation, as the names of functions with
    values; ``windows``: how many of them, or of the steps of the script, make one step. ``weights_after``: the weights
    that each step is followed by in place of its own, by name, for each optimizer in order. ``step_rows``: all rows of
    a step as one batch, by the step of all optimizers, counted from 1, for a reference function. ``again``: what the
    second run of a script is fed with that resumes in a run of its own."""

    weights: dict[str, Any] = field(default_factory=dict)
    rates: dict[int, list[list[float]]] = field(default_factory=dict)
    iterations: dict[str, list[FedIteration]] = field(default_factory=dict)
    draws: dict[str, list[list[Array | None]]] = field(default_factory=dict)
    join_draws: bool = False
    constants: list[list[Any]] = field(default_factory=list)
    windows: int = 1
    momenta: dict[int, list[list[dict[str, Any]]]] = field(default_factory=dict)
    weights_after: dict[int, list[dict[str, Array]]] = field(default_factory=dict)
    step_rows: dict[int, Any] = field(default_factory=dict)
    again: Feed | None = None

    def draw(self, place: str, number: int, shape: tuple[int, ...]) -> Array | None:
        """Returns what the n-th draw at a place has in one process; None where it is to draw for itself.

        A draw for as many rows as all ranks have together has theirs, one rank after the other. Where rows come from no
        loader, one process makes the micro-batches of all ranks: their draws follow one another.
        """
        ranks = self.draws.get(place, [])
        if not ranks:
            return None
        own = [calls[number] if number < len(calls) else None for calls in ranks]
        present = [array for array in own if array is not None]
        permutes = " randperm " in place
        if (
            not permutes
            and len(present) == len(ranks)
            and shape
            and (joined := _joined(present)) is not None
            and joined.shape == shape
        ):
            return joined
        if _alike(ranks):
            array = next((array for array in own if array is not None), None)
            return array if array is not None and array.shape == shape else None
        if self.iterations or permutes:
            return None
        if self.join_draws:
            return _joined(present) if len(present) == len(ranks) else None
        call, rank = divmod(number, len(ranks))
        array = ranks[rank][call] if call < len(ranks[rank]) else None
        return array if array is not None and array.shape == shape else None

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.write_bytes(pickle.dumps(self, protocol=5))


def _joined(arrays: list[Array]) -> Array | None:
    if any(not array.ndim for array in arrays) or len({array.shape[1:] for array in arrays}) != 1:
        return None
    return np.concatenate(arrays)


def _alike(ranks: list[list[Array | None]]) -> bool:
    """Whether the ranks that draw at a place all draw the same."""
    drawing = [calls for calls in ranks if calls]
    return all(
        (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
        for calls in drawing[1:]
        for a, b in zip(drawing[0], calls, strict=False)
    )


def load_feed(path: str) -> Feed:
    """Returns what ``save`` has written."""
    value = pickle.loads(Path(path).read_bytes())
    assert isinstance(value, Feed)
    return value


def with_own_lengths(feed: Feed) -> Feed:
    """Returns a feed under which loaders have the lengths that they have in one process, and not those of the ranks."""
    return replace(
        feed,
        iterations={
            loader: [replace(each, length=None) for each in found] for loader, found in feed.iterations.items()
        },
    )


def reversed_batches(feed: Feed) -> Feed:
    """Returns a feed with the rows of each batch in the opposite order."""
    return replace(
        feed,
        iterations={loader: [_reversed_iteration(each) for each in found] for loader, found in feed.iterations.items()},
        again=None if feed.again is None else reversed_batches(feed.again),
    )


def _reversed_iteration(fed: FedIteration) -> FedIteration:
    if fed.evaluation:
        return fed
    return replace(
        fed,
        batches=[
            None if tree is None else reversed_rows(tree, count(tree, len(rows or ())) or 0)
            for tree, rows in zip(fed.batches, fed.indices, strict=True)
        ],
        indices=[None if rows is None else rows[::-1] for rows in fed.indices],
    )
