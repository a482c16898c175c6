"""Shortens the epochs of long loaders, so that a proof of few steps reaches past their ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any


class Shortened:
    """The first batches of a sampler and its last one, so that an epoch ends within the steps of a proof.

    The number of batches has the same remainder by 4 as that of the whole epoch, so that accumulation over 2 or 4
    micro-batches ends in the same way.
    """

    def __init__(self, sampler: Any, most: int) -> None:
        self._sampler, self._most = sampler, most
        self.order = list[Any]()
        """The batches of the epoch, once it has begun; empty where the script's own sampler draws them one by one, as
        such a sampler may count those that it has drawn."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    @property
    def full(self) -> int:
        """The number of batches of the whole epoch."""
        return len(self._sampler)

    def __len__(self) -> int:
        return shortened_length(self.full, self._most)

    def __iter__(self) -> Iterator[Any]:
        if not _of_torch(self._sampler):
            yield from self._one_by_one()
            return
        batches = list(islice(self._sampler, len(self._sampler)))  # as some go on without an end
        length = shortened_length(len(batches), self._most)
        self.order = batches if length == len(batches) else [*batches[: length - 1], batches[-1]]
        yield from self.order

    def _one_by_one(self) -> Iterator[Any]:
        drawn, full = iter(self._sampler), self.full
        yield from islice(drawn, len(self) - 1)
        last = deque(islice(drawn, full - len(self) + 1), maxlen=1)
        yield from last
        next(drawn, None)  # what a sampler does at its end, such as counting epochs


def _of_torch(sampler: Any) -> bool:
    """Whether a sampler, and the one that it takes its rows from, are torch's own, which keep no count."""
    inner = getattr(sampler, "sampler", None)
    return all(type(each).__module__.startswith("torch.") for each in (sampler, inner) if each is not None)


def shortened_length(batches: int, most: int) -> int:
    """Returns the number of batches to which an epoch is shortened: at most ``most`` and 3."""
    return min(batches, most + batches % 4)
