"""A data set in parts, each of which is opened when one of its rows is first asked for."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self, final

import numpy as np
from torch.utils.data import Dataset

from apportion.core.sampling.rng import seeded_rng
from apportion.core.sampling.sampler import Index, mix
from apportion.errors import ApportionError


class PartRows(NamedTuple):
    """Some rows of one part, one after the other in what was asked for."""

    data: Dataset[Any]
    """The data set of the part."""
    local: Index
    """The indices of the rows in the part."""
    whole: Index
    """The indices of the same rows in the whole data set."""


@final
class PartedDataset(Dataset[Any]):
    """The rows of all parts, one part after the other. A process that asks for rows of some parts opens those alone.

    What a part draws as it is opened is a function of the seed and of its number: the same on whichever rank.
    """

    def __init__(
        self,
        make: Callable[[int], Dataset[Any]],
        check: Callable[[Dataset[Any], str], Dataset[Any]],
        parts: int,
        seed: int,
        *,
        lengths: Sequence[int] | None = None,
        where: str = "",
    ) -> None:
        """Describes ``parts`` parts, of which ``make`` opens one.

        ``check``: given one and the call that made it, raises ValueError where rows cannot be taken of it;
        ``lengths``: the number of rows of each, where they are known; ``where``: the rank that opens them, for
        messages, as "rank 1 on host b".
        """
        self._make, self._check, self._seed = make, check, seed
        self.parts, self.where = parts, where
        self._opened: dict[int, Dataset[Any]] = {}
        self._lengths: tuple[int, ...] | None = None
        if lengths is not None:
            self.know(lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of rows of each part."""
        assert self._lengths is not None, "the lengths of all parts are known before any row is asked for"
        return self._lengths

    def know(self, lengths: Sequence[int]) -> None:
        """Take these as the lengths of the parts."""
        self._lengths = tuple(lengths)
        self._ends = np.array(list(accumulate(lengths)), dtype=np.int64)
        for part, data in self._opened.items():
            self._check_length(part, data)

    @property
    def opened(self) -> list[int]:
        """The numbers of the parts that this process has opened, in order."""
        return sorted(self._opened)

    def open(self, part: int) -> Dataset[Any]:
        """Return a part, opened where it was not. Raises ValueError where it is not what a part must be, and
        ApportionError where what opens it fails, both with its number and this rank."""
        if part not in self._opened:
            at = f" on {self.where}" if self.where else ""
            try:
                with seeded_rng(mix(self._seed, part, 0x9A47)):
                    data = self._make(part)
            except Exception as error:  # whatever it is, all ranks are told
                frame = traceback.extract_tb(error.__traceback__)[-1]
                raise ApportionError(
                    f"part {part} of {self.parts} could not be opened{at}: {type(error).__name__}: {error} "
                    f"({frame.filename}:{frame.lineno}); data({part}) is called on each rank that is dealt part {part},"
                    " and has to find its rows there"
                ) from error
            try:
                self._check(data, f"data({part})")
            except ValueError as error:
                raise ValueError(f"part {part} of {self.parts} cannot be taken{at}: {error}") from None
            self._check_length(part, data)
            self._opened[part] = data
        return self._opened[part]

    def open_all(self) -> Self:
        """Open every part, so that all lengths are known; returns this data set."""
        self.know([len(self.open(part)) for part in range(self.parts)])  # type: ignore[arg-type]
        return self

    def closed(self) -> PartedDataset:
        """Return the same parts, none of which is opened yet: for a process that opens its own."""
        return PartedDataset(self._make, self._check, self.parts, self._seed, lengths=self._lengths, where=self.where)

    def _check_length(self, part: int, data: Dataset[Any]) -> None:
        length: int = len(data)  # type: ignore[arg-type]
        if self._lengths is not None and length != self._lengths[part]:
            at = f" on {self.where}" if self.where else ""
            raise ValueError(
                f"part {part} of {self.parts} has {length} rows{at}, and had {self._lengths[part]} where it was opened "
                "before: a part must have the same rows wherever and whenever it is opened"
            )

    def first_row(self, part: int) -> int:
        """The index of the first row of a part in the whole data set."""
        return int(self._ends[part]) - self.lengths[part]

    def pieces(self, index: Index) -> Iterator[PartRows]:
        """The rows with these indices, in their order, by the parts that they are of."""
        parts = np.searchsorted(self._ends, index, side="right")
        starts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(index)]
        for start, stop in pairwise(starts if len(index) else ()):
            part = int(parts[start])
            yield PartRows(self.open(part), index[start:stop] - self.first_row(part), index[start:stop])

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        (rows,) = self.pieces(np.array([index], dtype=np.int64))
        return rows.data[int(rows.local[0])]
