"""Mistakes in the protocol of several hosts that its simulation has to find: each a part with one rule left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from simulated_runs import Parts

from apportion.runtime.checkpoint.terms import RunTerm, RunWriter, is_refused
from apportion.runtime.hosts.protocol.follower import Follower, TakenTable
from apportion.runtime.hosts.protocol.leader import AgentOrder, HostSlot, Leader


class _WaitsForNobody(Leader):  # type: ignore[misc]
    """Sends a table before all have answered."""

    @property
    def can_close(self) -> bool:
        return self.generation % 2 == 1 and self.hosts <= self._places.keys()


class _CountsOldAnswers(Leader):  # type: ignore[misc]
    """Takes answers to an older change for answers to the newest."""

    def answered(self, slot: HostSlot, generation: int) -> None:
        self._answered.add(slot)


class _KillsNobody(Leader):  # type: ignore[misc]
    """Takes who is lost for dead."""

    def kill(self, ranks: Collection[int]) -> list[AgentOrder]:
        self._ended.update(self.table[rank] for rank in ranks)
        return []


class _CountsFromTheStart(Leader):  # type: ignore[misc]
    """Counts the first rank of a host among the workers of the first table."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(counts)
        self._counts = list(counts)

    def _table_of(self, host: int, *rest: Any) -> dict[str, Any]:
        return {**super()._table_of(host, *rest), "first": sum(self._counts[:host])}


class _PutsReplacementsLast(Leader):  # type: ignore[misc]
    """Gives a replacement the last rank of its host."""

    def _table_of(self, *given: Any) -> dict[str, Any]:
        table = super()._table_of(*given)
        table["slots"].sort(key=lambda slot: slot in table["fresh"])
        return table


class _KeepsDroppedHosts(Leader):  # type: ignore[misc]
    """Leaves the workers of a host that was given up in the table."""

    def close(
        self, slots: Iterable[HostSlot], fresh: Collection[HostSlot] = (), *, ending: bool = False
    ) -> list[AgentOrder]:
        dropped = {slot.host for slot in self.table} - self.hosts
        self.hosts |= dropped
        self._places.update(dict.fromkeys(dropped, ("", 0)))
        told = super().close(slots, fresh, ending=ending)
        self.hosts -= dropped
        return told


class _OpensTheSameAgain(Leader):  # type: ignore[misc]
    """Opens a change a second time under its first generation."""

    def open(self) -> list[AgentOrder]:
        self.generation -= 2 * (self.generation % 2)
        return super().open()


class _ObeysOldChanges(Follower):  # type: ignore[misc]
    """Begins every change that it hears of."""

    def open(self, generation: int, living: Collection[int]) -> bool:
        self.generation = min(self.generation, generation - 1)
        return super().open(generation, living)


class _TakesAnyTable(Follower):  # type: ignore[misc]
    """Takes the table of another change than the one that is open."""

    def close(self, table: Mapping[str, Any], living: Collection[int]) -> TakenTable | None:
        self.generation = table["generation"] - 1
        return super().close(table, living)


def _first(steps: Sequence[int]) -> int | None:
    return 0 if max(steps) else None


def _least(steps: Sequence[int]) -> int | None:
    return steps.index(min(step for step in steps if step)) if max(steps) else None


def _obeys_lower(asked: RunTerm, known: RunTerm | None) -> bool:
    return False


def _obeys_equal(asked: RunTerm, known: RunTerm | None) -> bool:
    return known is not None and asked.number < known.number


def _same_again(known: Iterable[RunTerm | None], start: str) -> RunTerm:
    return RunTerm(max((term.number for term in known if term is not None), default=1), start)


def _anyone_writes(asked: RunWriter, known: RunWriter | None) -> bool:
    return True


def _any_generation_writes(asked: RunWriter, known: RunWriter | None) -> bool:
    return known is None or not is_refused(asked.term, known.term)


MISTAKES: dict[str, Callable[[], Parts]] = {
    "a table is sent before all have answered": lambda: Parts(leader=_WaitsForNobody),
    "answers of an older generation count": lambda: Parts(leader=_CountsOldAnswers),
    "the lost are not killed before the table": lambda: Parts(leader=_KillsNobody),
    "ranks are counted from the first table": lambda: Parts(leader=_CountsFromTheStart),
    "a replacement takes a wrong place": lambda: Parts(leader=_PutsReplacementsLast),
    "a dropped host is still in the table": lambda: Parts(leader=_KeepsDroppedHosts),
    "the generation does not grow with a second open": lambda: Parts(leader=_OpensTheSameAgain),
    "an agent obeys an old open": lambda: Parts(follower=_ObeysOldChanges),
    "an agent takes the table of another change": lambda: Parts(follower=_TakesAnyTable),
    "all go on from rank 0": lambda: Parts(furthest=_first),
    "all go on from the least": lambda: Parts(furthest=_least),
    "a lower term is obeyed": lambda: Parts(is_refused=_obeys_lower),
    "two starts have one term": lambda: Parts(is_refused=_obeys_equal),
    "a lower term writes": lambda: Parts(may_write=_anyone_writes),
    "rank 0 of an older generation writes": lambda: Parts(may_write=_any_generation_writes),
    "a start takes no higher term": lambda: Parts(next_term=_same_again),
}
