"""Data sets in parts: the data set, each part of which is opened when one of its rows is first asked for; which parts a
rank has; and how the lengths of all parts become known.

Parts are dealt to hosts first, and then to the ranks of each host. Each rank opens its own. Ranks that stay until the
end send each other the lengths. Ranks that may be replaced write them into memory of their host, where a rank that
comes later finds what those before it have written.
"""

from __future__ import annotations

import ctypes
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self, final

import numpy as np
from torch.utils.data import Dataset

from apportion.comm.group import collective, gather_messages
from apportion.comm.sync import CACHE_LINE, CommitWord, Word, sleep_on, wake
from apportion.comm.world import World
from apportion.core.order import Index
from apportion.core.rng import mix, seeded_rng
from apportion.core.sampler import DataShard, webster
from apportion.errors import ApportionError, StateLost


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
            except Exception as error:  # whatever it is, every rank raises it
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


def deal_parts(parts: int, hosts: Sequence[int]) -> list[DataShard]:
    """The share of each rank. ``hosts``: the number of every rank's host, by rank.

    A host has consecutive parts, about in proportion to its ranks, and one at least. Where it has as many as ranks or
    more, each rank has some of them for itself; where it has fewer, several ranks have one part and share its rows.
    Raises ValueError where there are fewer parts than hosts.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    if parts < len(ranks_of):
        raise ValueError(
            f"parts={parts} cannot be dealt to {len(ranks_of)} hosts: each opens one at least, and none opens "
            f"another's; make parts>={len(ranks_of)}, or use {parts} host{'s' if parts > 1 else ''}"
        )
    dealt: dict[int, DataShard] = {}
    first = 0
    for ranks, many in zip(ranks_of.values(), _parts_of_hosts(parts, [*map(len, ranks_of.values())]), strict=True):
        dealt |= dict(zip(ranks, _shares(first, many, len(ranks)), strict=True))
        first += many
    return [dealt[rank] for rank in range(len(hosts))]


@collective
def share_of(parts: int, world: World, *, in_order: bool) -> DataShard:
    """This rank's share. Called by all ranks. Raises ValueError where there are fewer parts than hosts, or, with
    ``in_order``, where the rows of the ranks do not lie in each batch in the order of the ranks."""
    shares = deal_parts(parts, world.hosts())
    if in_order and not are_in_order(shares):
        raise ValueError(
            "count=None gathers the outputs of all ranks in their order, and the hosts of these ranks take turns, so "
            f"that the {parts} parts are in another: number the ranks host by host"
        )
    return shares[world.rank]


def are_in_order(shares: Sequence[DataShard]) -> bool:
    """Tells whether the rows of the ranks lie in each batch in the order of the ranks."""
    places = [(share.parts or (0, 0), share.index) for share in shares]
    return places == sorted(places)


def _parts_of_hosts(parts: int, ranks: Sequence[int]) -> list[int]:
    """The number of parts of each host: one, and the rest by the method of Webster."""
    return webster([1] * len(ranks), ranks, parts - len(ranks))


def _shares(first: int, parts: int, ranks: int) -> list[DataShard]:
    """The shares of the ranks of one host in its parts, which begin at ``first``."""
    if parts >= ranks:
        own = [DataShard(rank, ranks).rows(parts) for rank in range(ranks)]
        return [DataShard(parts=(first + rows.start, first + rows.stop)) for rows in own]
    sharers = [DataShard(part, parts).rows(ranks) for part in range(parts)]
    return [
        DataShard(place, these.stop - these.start, parts=(first + part, first + part + 1))
        for part, these in enumerate(sharers)
        for place in range(these.stop - these.start)
    ]


LOOK_SECONDS = 0.05
"""The seconds between two looks at whether the membership has changed, while a rank waits for a length."""


@collective
def learn_lengths(dataset: PartedDataset, shard: DataShard, world: World) -> None:
    """Open the parts of this rank's share, and let the data set know the lengths of all. Called by all ranks; a rank
    that replaces another calls it alone. Raises, on all ranks, what a rank raises that cannot open a part."""
    assert shard.parts is not None
    dataset.where = f"rank {world.rank} on host {socket.gethostname()}"
    own = range(*shard.parts)
    if world.members is None:
        dataset.know(_gathered_lengths(dataset, own, world))
        return
    # Through memory and not by a collective: a rank that replaces another comes alone, while the others train on.
    page = _LengthsPage(world.shared("lengths of parts", _LengthsPage.nbytes(dataset.parts)), dataset.parts)
    if world.local_size < world.size:
        dataset.know(_lengths_of_hosts(dataset, own, world, page))
        return
    for part in own:
        page.write(part, len(dataset.open(part)))  # type: ignore[arg-type]
    dataset.know(page.wait(world))


def _lengths_of_hosts(dataset: PartedDataset, own: range, world: World, page: _LengthsPage) -> list[int]:
    """The lengths that ranks of several hosts tell each other at the beginning; each host keeps them for those that
    come later. Raises StateLost on a host that has come later itself: all begin again."""
    lengths = page.read()
    if not world.under_way:
        lengths = _gathered_lengths(dataset, own, world)
        for part, length in enumerate(lengths):
            page.write(part, length)
    elif lengths is None:
        raise StateLost(f"{dataset.where} was not there when the lengths of the {dataset.parts} parts were exchanged")
    assert lengths is not None
    return lengths


def _gathered_lengths(dataset: PartedDataset, own: range, world: World) -> list[int]:
    """The lengths that the ranks tell each other."""
    failed: ApportionError | ValueError | None = None
    lengths: dict[str, int] = {}
    try:
        lengths = {str(part): len(dataset.open(part)) for part in own}  # type: ignore[arg-type]
    except (ApportionError, ValueError) as error:
        failed = error
    mistake = isinstance(failed, ValueError)
    own_message = {"lengths": lengths, "failed": None if failed is None else str(failed), "mistake": mistake}
    # A rank that failed takes part as well and sends its error: one that raised before would leave the others waiting.
    messages = gather_messages({**own_message, "where": dataset.where}, world.group(), device=world.device)
    if failed is not None:
        raise failed
    for rank in messages:
        if rank["failed"] is not None:
            raise (ValueError if rank["mistake"] else ApportionError)(rank["failed"])
    found: dict[int, tuple[int, str]] = {}
    for rank in messages:
        for part, length in rank["lengths"].items():
            known, where = found.setdefault(int(part), (length, rank["where"]))
            if known != length:
                raise ValueError(
                    f"part {part} of {dataset.parts} has {length} rows on {rank['where']} and {known} on {where}: a "
                    "part must have the same rows wherever it is opened"
                )
    return [found[part][0] for part in range(dataset.parts)]


@final
class _LengthsPage:
    """The lengths of all parts in memory that the ranks of a host share; 0: not written yet."""

    def __init__(self, memory: memoryview, parts: int) -> None:
        self._changes = Word.from_buffer(memory)
        """The number of changes, or about that many: a rank that waits is woken when it changes."""
        self._lengths = [ctypes.c_int64.from_buffer(memory, CACHE_LINE + 8 * part) for part in range(parts)]

    @staticmethod
    def nbytes(parts: int) -> int:
        return CACHE_LINE + 8 * parts

    def write(self, part: int, length: int) -> None:
        """Write a length, the same as is there where another rank has written it."""
        CommitWord(self._lengths[part]).publish(length)
        self._changes.value = (self._changes.value + 1) & 0x7FFFFFFF
        wake(self._changes)

    def read(self) -> list[int] | None:
        """Return all lengths; None where some are not there yet."""
        # 0 means "not written yet", so that this rests on every part having rows.
        lengths = [CommitWord(word).read() for word in self._lengths]
        return lengths if all(lengths) else None

    def wait(self, world: World) -> list[int]:
        """Wait until all lengths are there, and return them. Raises MembershipChanged where a rank is lost meanwhile;
        one that hangs is found by the supervisor."""
        while True:
            # Read before the lengths: a length that is written in between changes the word, and the sleep ends at once.
            seen = self._changes.value
            if (lengths := self.read()) is not None:
                return lengths
            world.check()
            sleep_on(self._changes, seen, LOOK_SECONDS)
