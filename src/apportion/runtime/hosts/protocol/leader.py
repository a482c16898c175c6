"""The membership of a run on several hosts, as the driver decides it: a state machine that reads no clock and sends
nothing. ``follower.py`` is the agents' side.

::

    driver   open     a change begins: nothing of an older generation goes on            -> every agent
             kill     the processes of the lost                                          -> their agents
    agent    reserved the place where the ranks would meet, were rank 0 on this host     -> driver
             answered a worker has left what it waited for;  exited  one has ended       -> driver
    driver   table    who is in from now on, with which rank, and where they meet        -> every agent

As on one host the generation is odd from ``open`` to ``table`` and even otherwise, and it only grows. A table is sent
once every worker that was in has answered the newest ``open`` or has ended, and everyone who was killed has ended: then
nothing of an older generation writes any more, on any host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, final

from apportion.errors import ApportionError

Message = dict[str, Any]


class HostSlot(NamedTuple):
    """The place of one worker: its host, and the number of its line in what the workers of that host share."""

    host: int
    number: int


class AgentOrder(NamedTuple):
    """A message to the agent of a host."""

    host: int
    message: Message


@final
class Leader:
    """The membership of all hosts. ``counts``: the workers of each host, which take the ranks in this order."""

    def __init__(self, counts: Sequence[int], *, generation: int = 0) -> None:
        self.table = [HostSlot(host, number) for host, count in enumerate(counts) for number in range(count)]
        """The slot of each rank."""
        self._several = len(counts) > 1
        self.generation = generation
        """Even: the table holds. Odd: it is being changed."""
        self.began = generation
        """The generation in which the training began, or was begun again."""
        self.saved = False
        """True once a rank has reported a checkpoint."""
        self.hosts = set(range(len(counts)))
        """The hosts that are in the run."""
        self._answered: set[HostSlot] = set()
        self._ended: set[HostSlot] = set()
        self._killed: set[HostSlot] = set()
        self._places: dict[int, tuple[str, int]] = {}

    # What is heard

    def answered(self, slot: HostSlot, generation: int) -> None:
        """Notes that a worker has left everything that belongs to an older generation than this one."""
        if generation == self.generation:
            self._answered.add(slot)

    def exited(self, slot: HostSlot) -> None:
        """Notes that the process in a slot has ended."""
        self._ended.add(slot)

    def reserved(self, host: int, generation: int, address: str, port: int) -> None:
        """Notes where the ranks are to meet in the generation after this one, were rank 0 on this host."""
        if generation == self.generation:
            self._places[host] = (address, port)

    # What is decided

    def open(self) -> list[AgentOrder]:
        """Begins a change of the table, also where one is under way."""
        # By two where a change is open already: answers to that one must not count for this one, in which more is lost.
        self.generation += 1 + self.generation % 2
        self._answered.clear()
        self._places.clear()
        return [AgentOrder(host, {"kind": "open", "generation": self.generation}) for host in sorted(self.hosts)]

    def drop(self, host: int) -> None:
        """Takes a host out of the run: nothing is expected of it any more, and no worker is started there."""
        self.hosts.discard(host)
        self._ended.update(slot for slot in self.table if slot.host == host)

    def lives(self, slot: HostSlot) -> bool:
        """Returns whether the process in a slot has not ended, as far as is known."""
        return slot not in self._ended

    def add_host(self, host: int) -> None:
        """Takes a host into the run, from the next table on."""
        self.hosts.add(host)

    def kill(self, ranks: Collection[int]) -> list[AgentOrder]:
        """Has the processes of these ranks killed, as far as they have not ended and were not killed before."""
        left = [self.table[rank] for rank in ranks if self.table[rank] not in self._ended | self._killed]
        self._killed.update(left)
        return [
            AgentOrder(host, {"kind": "kill", "slots": [slot.number for slot in left if slot.host == host]})
            for host in sorted({slot.host for slot in left})
        ]

    def asked(self) -> list[int]:
        """Returns the ranks that have neither answered the newest change nor ended."""
        return [r for r, slot in enumerate(self.table) if slot not in self._answered and slot not in self._ended]

    def undead(self, ranks: Collection[int]) -> list[int]:
        """Returns those of these ranks whose processes have not ended."""
        return [rank for rank in ranks if self.table[rank] not in self._ended]

    @property
    def can_close(self) -> bool:
        """True where a table can be sent: every worker has answered or ended, those that were killed have ended, also
        who had answered before, and each host has said its place."""
        # An answer is not enough of a process that was killed: it may have answered first, and still be writing.
        settled = self._killed <= self._ended and not self.asked()
        return self.generation % 2 == 1 and settled and self.hosts <= self._places.keys()

    def close(
        self, slots: Iterable[HostSlot], fresh: Collection[HostSlot] = (), *, ending: bool = False, begins: bool = False
    ) -> list[AgentOrder]:
        """Ends the change: rank i has the i-th of these slots. ``fresh``: those in which a new process begins;
        ``ending``: all are to save, and to leave; ``begins``: no rank has a state any longer, and the training begins
        again, from its last checkpoint. Raises ApportionError where no worker is left."""
        assert self.can_close, f"{self.asked()} have not answered in generation {self.generation}"
        table = [slot for slot in slots if slot.host in self.hosts]
        assert not begins or set(table) <= set(fresh), "a process that begins again has nothing of the time before"
        if not table:
            raise ApportionError("no worker is left on any host")
        self.table, self._answered, self._killed = table, set(), set()
        self._ended.difference_update(fresh)
        self.generation += 1
        self.began = self.generation if begins else self.began
        address, port = self._places[table[0].host]
        return [
            AgentOrder(host, self._table_of(host, address, port, fresh, ending))
            for host in sorted({slot.host for slot in table})
        ]

    def _table_of(self, host: int, address: str, port: int, fresh: Collection[HostSlot], ending: bool) -> Message:
        own = [(rank, slot) for rank, slot in enumerate(self.table) if slot.host == host]
        return {
            "kind": "table",
            "generation": self.generation,
            "began": self.began,
            "saved": self.saved,
            "first": own[0][0],
            "size": len(self.table),
            "slots": [slot.number for _, slot in own],
            "fresh": [slot.number for _, slot in own if slot in fresh],
            "address": address if self._several else "",
            "port": port,
            "ending": ending,
        }
