"""How the ranks of a run come to know the lengths of all parts, of which each opens its own.

Ranks that stay until the end tell each other. Ranks that may be replaced write into memory of their host, where one
that comes later finds what those before it have written.
"""

from __future__ import annotations

import ctypes
import socket
from typing import final

from apportion.comm.group import collective
from apportion.comm.objects import gather_messages
from apportion.comm.sync import CACHE_LINE, CommitWord, Word, sleep_on, wake
from apportion.comm.world import World
from apportion.core.parts.dataset import PartedDataset
from apportion.core.sampling.sampler import DataShard
from apportion.errors import ApportionError, StateLost

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
        dataset.know(_told(dataset, own, world))
        return
    page = _LengthsPage(world.shared("lengths of parts", _LengthsPage.nbytes(dataset.parts)), dataset.parts)
    if world.local_size < world.size:
        dataset.know(_told_to_hosts(dataset, own, world, page))
        return
    for part in own:
        page.write(part, len(dataset.open(part)))  # type: ignore[arg-type]
    dataset.know(page.wait(world))


def _told_to_hosts(dataset: PartedDataset, own: range, world: World, page: _LengthsPage) -> list[int]:
    """The lengths that ranks of several hosts tell each other at the beginning; each host keeps them for those that
    come later. Raises StateLost on a host that has come later itself: all begin again."""
    lengths = page.read()
    if not world.under_way:
        lengths = _told(dataset, own, world)
        for part, length in enumerate(lengths):
            page.write(part, length)
    elif lengths is None:
        raise StateLost(f"{dataset.where} was not there when the lengths of the {dataset.parts} parts were told")
    assert lengths is not None
    return lengths


def _told(dataset: PartedDataset, own: range, world: World) -> list[int]:
    """The lengths that the ranks tell each other."""
    failed: ApportionError | ValueError | None = None
    lengths: dict[str, int] = {}
    try:
        lengths = {str(part): len(dataset.open(part)) for part in own}  # type: ignore[arg-type]
    except (ApportionError, ValueError) as error:
        failed = error
    mistake = isinstance(failed, ValueError)
    own_message = {"lengths": lengths, "failed": None if failed is None else str(failed), "mistake": mistake}
    told = gather_messages({**own_message, "where": dataset.where}, world.group(), device=world.device)
    if failed is not None:
        raise failed
    for rank in told:
        if rank["failed"] is not None:
            raise (ValueError if rank["mistake"] else ApportionError)(rank["failed"])
    found: dict[int, tuple[int, str]] = {}
    for rank in told:
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
    """The lengths of all parts in memory that the ranks of a host share; 0: nobody has written it yet."""

    def __init__(self, memory: memoryview, parts: int) -> None:
        self._changes = Word.from_buffer(memory)
        """The number of changes, or about that many: whoever waits is woken when it changes."""
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
        lengths = [CommitWord(word).read() for word in self._lengths]
        return lengths if all(lengths) else None

    def wait(self, world: World) -> list[int]:
        """Wait until all lengths are there, and return them. Raises MembershipChanged where a rank is lost meanwhile;
        one that hangs is found by the supervisor."""
        while True:
            seen = self._changes.value
            if (lengths := self.read()) is not None:
                return lengths
            world.check()
            sleep_on(self._changes, seen, LOOK_SECONDS)
