"""The log of rounds that close at their deadline: who took part in which, with which batches and which weight; enough
to compute the run again in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoggedPart:
    """What one replica made of one round."""

    rank: int
    life: int
    """The incarnation, which is the number of its connection: a replica that joins again has another one, and begins
    anew. (Files that hold a log keep the name of this field, as that of ``dealt``.)"""
    begun: int
    """The round whose average it began from."""
    batches: tuple[int, ...]
    """The batches that it made, in this order."""
    dealt: int
    """The number of batches that it was assigned."""
    examples: float
    """The weight of the part in the average: the number of examples of these batches; 0 where it came too late, so that
    it is in no average."""


@dataclass(frozen=True)
class LoggedRound:
    """A round that is over, and who was in its average."""

    number: int
    done: int
    """The number of batches in the average that it began with."""
    present: int
    """The number of replicas that were idle as it began, by which the schedules go on."""
    seconds: float
    """The seconds from when it was opened until the next one could be."""
    waited: float
    """The seconds of these until it was closed; the rest is the average."""
    parts: tuple[LoggedPart, ...]
    """The parts in its average, in rank order, and then those that came meanwhile and were too late for theirs."""
    came: tuple[tuple[int, int], ...] = ()
    """The rank and the incarnation of each replica that has joined since the round before was closed."""

    def has_part_of(self, incarnation: int) -> bool:
        """Return whether a part of this incarnation is in the average."""
        return any(part.life == incarnation and part.examples for part in self.parts)


@dataclass(frozen=True)
class RoundLog:
    """All rounds since the first average."""

    first: int
    """The number of batches in that average."""
    rounds: tuple[LoggedRound, ...]

    @property
    def longest(self) -> float:
        """The seconds of the longest round after the first, in which replicas may still be getting ready."""
        return max((each.seconds for each in self.rounds[1:]), default=0.0)

    def took_part(self, rank: int) -> list[int]:
        """Return the numbers of the rounds whose average has a part of this rank."""
        return [each.number for each in self.rounds if any(p.rank == rank and p.examples for p in each.parts)]

    def returns(self) -> list[tuple[int, int, int | None]]:
        """Return each time that a rank has come, or come back from a round that was closed without it, after the first
        round was opened: the rank, the round in which it came, and the next one that its part is in; None where there
        is none, since it was gone again, or the run had ended."""
        found = []
        for at, each in enumerate(self.rounds[1:], 1):
            late = [(part.rank, part.life) for part in each.parts if not part.examples]
            for rank, incarnation in dict.fromkeys((*each.came, *late)):
                first = next((r.number for r in self.rounds[at + 1 :] if r.has_part_of(incarnation)), None)
                found.append((rank, each.number, first))
        return found

    def save(self, path: str | Path) -> None:
        """Write the log as a file of JSON."""
        Path(path).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> RoundLog:
        """Read the log from a file that ``save`` wrote."""
        fields: dict[str, Any] = json.loads(Path(path).read_text())
        return cls(fields["first"], tuple(_round(each) for each in fields["rounds"]))


def _round(fields: dict[str, Any]) -> LoggedRound:
    parts: Sequence[dict[str, Any]] = fields.pop("parts")
    made = tuple(LoggedPart(**{**part, "batches": tuple(part["batches"])}) for part in parts)
    came = tuple((rank, incarnation) for rank, incarnation in fields.pop("came"))
    return LoggedRound(**fields, parts=made, came=came)
