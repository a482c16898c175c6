"""What the agent of a host makes of what its driver says of the membership: a state machine that reads no clock, starts
and ends nothing, and sends nothing. ``leader.py`` is the driver's side, and shows what both say.

It obeys each change once, in the order of their generations: an ``open`` that is not newer than all before it, and a
``table`` of another change than the one that is open, may come late or twice, and change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, final


class TakenTable(NamedTuple):
    """The changes of processes that a new table of slots demands of an agent."""

    fresh: list[int]
    """The slots in which new processes begin."""
    left_out: list[int]
    """The slots whose processes have no rank any more, and are ended."""


@final
class Follower:
    """The membership as the agent of one host knows it. ``slots``: the number of slots of this host, which have the
    ranks of the first table in their order."""

    def __init__(self, slots: int, *, generation: int = 0) -> None:
        self.generation = generation
        """The generation of the newest order that was obeyed. Even: its table holds. Odd: a change is open."""
        self.slots: Sequence[int] = range(slots)
        """The slots of this host's ranks, in the order of the ranks."""
        self._asked: set[int] = set()

    def open(self, generation: int, living: Collection[int]) -> bool:
        """Begins a change, which the workers in the slots ``living`` have to answer. Returns False, and does nothing,
        where this is not a change (an even generation), or not newer than all that was obeyed before."""
        # An order may come twice, or late after a newer one: obeyed again, it would wait for answers that have been
        # given.
        if generation % 2 == 0 or generation <= self.generation:
            return False
        self.generation = generation
        self._asked = set(living)
        return True

    @property
    def asked(self) -> list[int]:
        """The slots whose workers have not answered the open change yet."""
        return sorted(self._asked)

    def note_answer(self, slot: int, generation: int) -> bool:
        """Notes that a worker has left everything older than this generation. Returns whether the driver is to hear of
        it: once for each worker that was asked, and for the open change alone."""
        if generation != self.generation or slot not in self._asked:
            return False
        self._asked.discard(slot)
        return True

    def close(self, table: Mapping[str, Any], living: Collection[int]) -> TakenTable | None:
        """Takes the table that ends the open change, and returns what is to be done for it; None for every other table.
        ``living``: the slots that have a process. A slot never has two: a new one begins only where there is none."""
        if self.generation % 2 == 0 or table["generation"] != self.generation + 1:
            return None
        self.generation += 1
        self.slots = list(table["slots"])
        self._asked.clear()
        fresh = [slot for slot in table["fresh"] if slot not in living]
        return TakenTable(fresh, [slot for slot in living if slot not in self.slots])
