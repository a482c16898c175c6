"""The two ends of a connection between a worker and a parameter server of the same host: the shards lie in memory that
both of them map.

::

    worker                           server j (shards of its range)
      (the gradient lies in the worker's place in memory, and the push is begun, and written down)
      UPDATE, push number  -------->   update of chunk after chunk
                           <--------   UPDATE for each chunk that is done; the worker copies it out meanwhile
                           <--------   UPDATE once more, at the end

``Sessions`` is the worker's end: one connection to each server. ``StoreServer`` is the server's end: one thread for
each worker. A push is in memory, which outlives every process, before a server is asked for it: it gets into every
shard, once, whichever process dies. Words alone travel, over sockets of the host that only its user can reach. Servers
on other hosts are in ``network/``.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from apportion.comm.network.address import Address
from apportion.comm.network.rank_listener import RankListener
from apportion.comm.network.rendezvous import RankDoors
from apportion.comm.world import World
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.memory.store_spec import ServerRecord, StoreSpec
from apportion.parallel.parameter_store.network.shard_link import ShardLink
from apportion.parallel.parameter_store.push import StagedPush
from apportion.parallel.parameter_store.shard_range import Range
from apportion.parallel.parameter_store.store import Store

MEET_SECONDS = 60.0
DIAL_SECONDS = 1.0
UPDATE = 1
"""The kind of message: update, and tell how far that is."""
_NAME = "parameter server"
_OPEN = b"a socket of one host, which only its user can reach"


def _address(place: int) -> Address:
    """Return the socket at which a server listens. ``place``: a number that it has drawn."""
    return Address(f"store-{place:x}", 0)


@final
class Sessions:
    """A worker's connections, one with each server. ``slots``: the servers' slots."""

    def __init__(self, store: Store, world: World, slots: Sequence[int]) -> None:
        memory, self._store = store.memory, store
        self._queue, self._members = store.queue, world.members
        self._ranges = [Range(memory.extent, number) for number in range(len(slots))]
        self._links: list[ShardLink] = []
        for number, slot in enumerate(slots):
            self._links.append(self._connect(memory.servers[number], number, slot, world.slot))

    def _connect(self, server: ServerRecord, number: int, slot: int, own: int) -> ShardLink:
        """Connect to a server. Each try is short: a server may die before it has answered, and another one take its
        place."""
        deadline = time.monotonic() + MEET_SECONDS
        while True:
            self._queue.wait_until(lambda: self._listens(server, slot), lambda: f"parameter server {number} to listen")
            doors = RankDoors(own, None, {slot: _address(server.place)}, _OPEN, _NAME)
            try:
                return ShardLink(doors.dial(slot, DIAL_SECONDS), f"parameter server {number}")
            except PeerLost:
                if time.monotonic() > deadline:
                    raise
                self._queue.sleep_until_woken()

    def _listens(self, server: ServerRecord, slot: int) -> bool:
        """Return whether the process that holds the slot now, not one before it, has published where it listens."""
        return server.pid == self._members.pid(slot) if self._members is not None else server.pid > 0

    def apply(self, push: StagedPush) -> list[int] | None:
        """Have the servers apply a push. Where it pulls, the shards that each server reports as updated are copied out
        as it reports them; returns the versions that were found there, None without ``pull``."""
        with self._watched():
            for link in self._links:
                link.send_message(UPDATE, push.number)
            found: list[int] = []
            for link, part in zip(self._links, self._ranges, strict=True):
                for at in part.chunks():
                    link.receive_message()
                    if push.pull:
                        found += self._store.copy_out(*at)
                link.receive_message()
            return found if push.pull else None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Wait, where a server is lost, until the supervisor that is to replace it reports it as dead, and raise
        PeerLost: before that, no other process may finish what the server may still be applying."""
        try:
            yield
        except PeerLost:
            if self._members is not None:
                # The server may have died, or only its connection: it may still write to the shards. Only the
                # supervisor knows that a process has ended, and ends this wait by a change of the world, which check()
                # raises.
                self._queue.wait_until(lambda: False, lambda: "the supervisor to see that a parameter server is lost")
            raise

    def close(self) -> None:
        """Close all connections to the servers."""
        for link in self._links:
            link.release()
        self._links.clear()


@final
class StoreServer:
    """One server: a thread for each worker that talks to it. ``store(slot)``: that slot's view of the memory."""

    def __init__(self, extent: StoreSpec, number: int, store: Callable[[int], Store]) -> None:
        self._range, self._store = Range(extent, number), store
        self.place = secrets.randbits(62)
        """The number that workers find this server by."""
        self._listener = RankListener(_address(self.place), _OPEN)
        self._doors = RankDoors(number, self._listener, {}, _OPEN, _NAME)
        self._stores: dict[int, Store] = {}
        self._threads: dict[int, threading.Thread] = {}
        self.error: BaseException | None = None
        """The exception that a thread has died of."""
        self._doors.open(self._accept)

    def _accept(self, slot: int, sock: socket.socket) -> None:
        before = self._threads.get(slot)
        given = (slot, ShardLink(sock, f"worker {slot}"), before)
        self._threads[slot] = threading.Thread(
            target=self._serve_worker, args=given, name=f"worker {slot}", daemon=True
        )
        self._threads[slot].start()

    def _serve_worker(self, slot: int, link: ShardLink, before: threading.Thread | None) -> None:
        """Talk with one worker, until it is gone. No other thread writes into that worker's place in memory: the
        connection of the process that had the slot before has ended by then."""
        try:
            # The connection of the process before is closed by its death, so its thread ends. Were both threads to run,
            # two processes would write the drafts of one worker.
            if before is not None:
                before.join()
            if slot not in self._stores:
                self._stores[slot] = self._store(slot)
            while True:
                kind, number, *_ = link.receive_message()
                if kind != UPDATE:
                    raise PeerLost(f"{link.name} sent message {kind}, which is not a valid request")
                self._answer(link, self._stores[slot], number)
        except PeerLost:
            pass
        except BaseException as error:
            self.error = error
        finally:
            link.release()

    def _answer(self, link: ShardLink, store: Store, number: int) -> None:
        # The message carries a number alone. The push is read from shared memory, where the worker wrote all of it
        # before it sent the number, and where it outlives the worker.
        push = store.under_way(store.worker)
        if push is None or push.number != number:
            raise PeerLost("its push was completed by another process: the worker counts as dead")
        for first, last in self._range.chunks():
            store.apply(push, list(range(first, last)))
            link.send_message(UPDATE)
        link.send_message(UPDATE)

    def close(self) -> None:
        """Stop listening; connections that are open go on to their end."""
        self._doors.close()
        self._listener.close()
