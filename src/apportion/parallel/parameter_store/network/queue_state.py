"""The queue of batches as the servers keep it: plain data, and pure decisions about them.

A batch is handed out, and then it is in the weights, or comes back where its worker is given up; so it is in the
weights once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

NO_TICKET = -1
"""The number of no batch, in a message."""


@dataclass
class QueueState:
    """The batches that were handed out. ``dealt``: the first that never was; ``returned``: those that came back;
    ``opened``: by worker, those that it has and has not pushed; ``ended``: the workers that take no more for now."""

    dealt: int = 0
    returned: list[int] = field(default_factory=list)
    opened: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    stopped: bool = False
    """Tells whether the run was ended before its last batch: nothing is handed out."""

    def next_batch(self, total: int) -> int | None:
        """Return the batch that is handed out next, out of ``total``; None where all are handed out."""
        if self.stopped:
            return None
        if self.returned:
            return self.returned[-1]
        return self.dealt if self.dealt < total else None

    def unheard(self, worker: int, last: int) -> int | None:
        """Return the batch that a worker has and does not know of, since the answer was lost with a server or a
        connection; None where there is none. ``last``: the last batch that it knows of (NO_TICKET: none)."""
        opened = self.opened.get(worker)
        return opened[-1] if opened and opened[-1] != last else None

    def hand_out(self, worker: int, batch: int) -> None:
        """Note that a worker has this batch, which ``next_batch`` has named."""
        if self.returned and self.returned[-1] == batch:
            self.returned.pop()
        else:
            self.dealt = max(self.dealt, batch + 1)
        self.opened.setdefault(worker, []).append(batch)
        self.ended.discard(worker)

    def pushed(self, worker: int, batches: Iterable[int]) -> None:
        """Note that these batches of a worker are in the weights."""
        done = set(batches)
        self.opened[worker] = [batch for batch in self.opened.get(worker, []) if batch not in done]

    def give_back(self, worker: int) -> None:
        """Put the batches that a worker has and has not pushed back, to be handed out first."""
        self.returned += sorted(self.opened.pop(worker, []), reverse=True)
        self.ended.add(worker)

    def is_through(self, total: int) -> bool:
        """Tell whether every batch is in the weights."""
        return self.stopped or (self.dealt >= total and not self.returned and not any(self.opened.values()))

    def unpushed(self) -> list[int]:
        """Return the batches that were handed out and are not in the weights."""
        return sorted({*self.returned, *(batch for of in self.opened.values() for batch in of)})

    def resume(self, done: int, unpushed: Iterable[int]) -> None:
        """Begin again after ``done`` updates, with batches that were handed out in an earlier run and are not among
        them: they come first."""
        self.returned = sorted(unpushed, reverse=True)
        self.dealt = done + len(self.returned)
        self.opened.clear()
        self.ended.clear()
        self.stopped = False

    def plain(self) -> dict[str, Any]:
        """Return the queue as plain JSON."""
        opened = {str(worker): batches for worker, batches in self.opened.items()}
        return {"dealt": self.dealt, "returned": self.returned, "opened": opened, "ended": sorted(self.ended)}

    @classmethod
    def of_plain(cls, given: dict[str, Any]) -> QueueState:
        """Make the queue that ``plain`` has written."""
        opened = {int(worker): list(batches) for worker, batches in given["opened"].items()}
        return cls(int(given["dealt"]), list(given["returned"]), opened, set(given["ended"]))
