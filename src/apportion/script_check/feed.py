"""What a pass is fed with: the weights that the ranks of another began with, their learning rates, and their rows."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from apportion.script_check.rows import count, turned


@dataclass
class FedIteration:
    """What one iteration over a loader yields in place of its own batches.

    ``batches``: one tree for each batch (see ``rows.py``); None where it is made from ``indices`` by the loader's own
    data set and collate function. ``evaluation``: that the rows are those of an evaluation, of which each is read once,
    in batches of the loader's own size; ``indices`` is then one list. ``exhausted``: whether the ranks read it to its
    end. ``length``: the number of batches that the ranks were told it has.
    """

    batches: list[Any] = field(default_factory=list)
    indices: list[list[Any] | None] = field(default_factory=list)
    evaluation: bool = False
    exhausted: bool = True
    length: int | None = None


@dataclass
class Feed:
    """``weights``: arrays by name. ``rates``: the learning rates of each parameter group at each step, by optimizer.
    ``iterations``: by loader, in order. ``constants``: of each step in turn, what a script without a loader brings into
    its computation, as the names of functions with values; ``windows``: how many of them make one step."""

    weights: dict[str, Any] = field(default_factory=dict)
    rates: dict[int, list[list[float]]] = field(default_factory=dict)
    iterations: dict[str, list[FedIteration]] = field(default_factory=dict)
    constants: list[list[Any]] = field(default_factory=list)
    windows: int = 1

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.write_bytes(pickle.dumps(self, protocol=5))


def load_feed(path: str) -> Feed:
    """Returns what ``save`` has written."""
    value = pickle.loads(Path(path).read_bytes())
    assert isinstance(value, Feed)
    return value


def reordered(feed: Feed) -> Feed:
    """Returns a feed with the rows of each batch in the opposite order."""
    return replace(
        feed, iterations={loader: [_turned(each) for each in found] for loader, found in feed.iterations.items()}
    )


def _turned(fed: FedIteration) -> FedIteration:
    if fed.evaluation:
        return fed
    return replace(
        fed,
        batches=[None if tree is None else turned(tree, count(tree) or 0) for tree in fed.batches],
        indices=[None if rows is None else rows[::-1] for rows in fed.indices],
    )
