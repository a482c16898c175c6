"""The order in which the examples of an epoch are taken, where that is neither "shuffled" nor "sequential"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from apportion.core.rng import mix
from apportion.core.value import Value

Index = np.ndarray[Any, np.dtype[np.int64]]

ORDERS = "apportion.core.orders"
"""The folder of the orders: one file each."""


class Order(Value, ABC):
    """An order of the examples of an epoch, as a pure function of (seed, epoch): the same on any number of workers."""

    @abstractmethod
    def length(self, examples: int) -> int:
        """The number of examples that are taken in an epoch, of a data set of this many; the same in every epoch."""

    @abstractmethod
    def epoch(self, examples: int, batch_size: int, seed: int, epoch: int) -> Index:
        """The indices of the examples of an epoch, in their order: ``length(examples)`` of them, each below
        ``examples``. ``batch_size``: the examples of an update."""

    def check(self, examples: int) -> None:
        """Raise ValueError where this does not fit a data set of this many examples."""

    def opened(self, dataset: Any) -> Order:
        """The order, with what it has to know of the data set."""
        return self

    def of_rows(self, rows: Sequence[int]) -> Order:
        """The order of a data set that has these rows of the whole one and no others, once each: a proof trains on
        few."""
        return self


def generator(seed: int, epoch: int, key: int) -> torch.Generator:
    """A generator of its own for an epoch of an order: it neither depends on what else is drawn, nor moves that."""
    return torch.Generator().manual_seed(mix(seed, epoch, key))


def must_be_draws(draws: object) -> None:
    """Raise ValueError where a number of draws is neither a whole number above 0 nor None."""
    if draws is not None and (not isinstance(draws, int) or isinstance(draws, bool) or draws < 1):
        raise ValueError(
            f"draws={draws!r} must be a whole number of at least 1, the examples that are taken in an epoch, or None "
            "for as many as the data set has"
        )
