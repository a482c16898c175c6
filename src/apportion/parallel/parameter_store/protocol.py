"""The messages between a worker and a parameter server, when the shards are divided among servers.

::

    worker                           server j (shards of its range)
      BRING, gradient   ----------->   into the worker's place in memory
                        <-----------   there
      (every server has it: the push is begun, and written down)
      APPLY             ----------->   update of shard after shard
                        <-----------   the new weights, chunk by chunk, while the next one is updated
      PULL              ----------->
                        <-----------   versions, weights

    worker                           server j, on the worker's host
      TELL              ----------->   update of shard after shard
                        <-----------   "these are done"; the worker copies them out meanwhile

A push is begun once all of its gradient is at the servers, whose memory outlives them: from then on it gets into every
shard, once, whichever process dies. Gradients and weights travel by a group of two; the queue of batches, the log and
what says how far each seat is lie in the memory of the host. On one host nothing else need travel either: a gradient is
computed in its place in memory, and a worker copies the weights out there, part by part, while the server is at the
next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.memory.records import ServerRecord
from apportion.parallel.parameter_store.memory.store_spec import StoreSpec
from apportion.parallel.parameter_store.peer_connection import PeerListener, PeerPair, connect, wait
from apportion.parallel.parameter_store.push import StagedPush
from apportion.parallel.parameter_store.store import Store

HOST = "127.0.0.1"
CHUNK_BYTES = 4 << 20
"""The bytes of weights that travel, or are copied out, while the next ones are updated."""
MEET_SECONDS = 60.0
BRING, APPLY, TELL, PULL = 1, 2, 3, 4
"""The kinds of message: bring a gradient; update, and send the weights; update, and tell how far that is; send the
weights."""


@final
class Range:
    """The shards of one server."""

    def __init__(self, extent: StoreSpec, number: int) -> None:
        n = extent.servers
        self.first, self.last = number * extent.shards // n, (number + 1) * extent.shards // n
        self.buffers = extent.buffers > 0 and self.last == extent.shards
        self._bounds, self._most = extent.layout.bounds, extent.layout.shards
        self._step = max(1, CHUNK_BYTES // (extent.layout.dtype.itemsize * (self._bounds[1] - self._bounds[0])))

    def of(self, flat: Tensor) -> Tensor:
        """Return the server's part of a flat vector."""
        return self._part(flat, self.first, self.last)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the shards (first, last) that travel together; the shard of the buffers is a chunk by itself."""
        end = min(self.last, self._most)
        for first in range(self.first, end, self._step):
            yield first, min(end, first + self._step)
        if self.buffers:
            yield self._most, self._most + 1

    def chunk(self, at: tuple[int, int], weights: Tensor, buffers: Tensor) -> Tensor:
        """Return the part of the weights, or the buffers, that one of these chunks consists of."""
        return buffers if at[0] >= self._most else self._part(weights, *at)

    def _part(self, flat: Tensor, first: int, last: int) -> Tensor:
        return flat[self._bounds[min(first, self._most)] : self._bounds[min(last, self._most)]]


@final
class Sessions:
    """A worker's connections, one with each server. ``seats``: the servers' seats. ``near``: they are on this host, and
    gradients and weights stay in its memory."""

    def __init__(self, store: Store, world: World, seats: Sequence[int], *, near: bool) -> None:
        memory, self._store, self._near = store.memory, store, near
        self._deal, self._members = store.deal, world.members
        self._ranges = [Range(memory.extent, number) for number in range(len(seats))]
        self._pairs: list[PeerPair] = []
        for number, seat in enumerate(seats):
            self._pairs.append(self._connect(memory.servers[number], number, seat, world.seat))

    def _connect(self, server: ServerRecord, number: int, seat: int, own: int) -> PeerPair:
        """Connect to a server. Each try is short: a server may die before it has answered, and another one take its
        place."""
        deadline = time.monotonic() + MEET_SECONDS
        while True:
            self._deal.wait(lambda: self._listens(server, seat), lambda: f"parameter server {number} to listen")
            try:
                return connect(HOST, server.port, own)
            except PeerLost:
                if time.monotonic() > deadline:
                    raise
                self._deal.look()

    def _listens(self, server: ServerRecord, seat: int) -> bool:
        """Return whether the process that holds the seat now, not one before it, has published its port."""
        return server.pid == self._members.pid(seat) if self._members is not None else server.pid > 0

    def _each(self) -> Iterator[tuple[PeerPair, Range]]:
        return zip(self._pairs, self._ranges, strict=True)

    def bring(self, gradient: Tensor, change: Tensor) -> None:
        """Send the gradient and the buffers' change to every server's memory; with ``near`` they are put into this
        host's memory."""
        if self._near:
            return self._store.line_up()
        with self._watched():
            works: list[Any] = []
            for pair, part in self._each():
                pair.ask(BRING)
                works += pair.send([part.of(gradient), *([change] if part.buffers else [])])
            wait(works)
            for pair, _ in self._each():
                pair.asked()

    def apply(self, push: StagedPush, weights: Tensor, buffers: Tensor) -> list[int] | None:
        """Have the servers apply a push. Where it pulls, the new weights and buffers come back; returns their versions,
        or None where they are the ones that this push has made."""
        with self._watched():
            for pair, _ in self._each():
                pair.ask(TELL if self._near else APPLY, 2 * push.number + push.pull)
            if self._near:
                return self._copy_out(pull=push.pull)
            self._take(weights, buffers, whole=push.pull)
            return None

    def _copy_out(self, *, pull: bool) -> list[int] | None:
        """Copy out the shards that each server reports as updated, as it reports them; returns the versions that were
        found there, None without ``pull``."""
        found: list[int] = []
        for pair, part in self._each():
            for at in part.chunks():
                pair.asked()
                if pull:
                    found += self._store.copy_out(*at)
            pair.asked()
        return found if pull else None

    def pull(self, weights: Tensor, buffers: Tensor) -> list[int]:
        """Fetch the last versions of weights and buffers from the servers into these tensors; returns the version of
        each shard."""
        if self._near:
            return self._store.copy_out(0, self._store.extent.shards)
        with self._watched():
            versions: list[int] = []
            found = [torch.zeros(part.last - part.first, dtype=torch.int64) for part in self._ranges]
            for pair, _ in self._each():
                pair.ask(PULL)
            works = [work for (pair, _), into in zip(self._each(), found, strict=True) for work in pair.receive([into])]
            self._take(weights, buffers, whole=True)
            wait(works)
            for of in found:
                versions += of.tolist()
            return versions

    def _take(self, weights: Tensor, buffers: Tensor, *, whole: bool) -> None:
        """Receive the new weights and buffers that every server sends, all chunks at once, where ``whole`` asks for
        them; then each server's answer."""
        works: list[Any] = []
        for pair, part in self._each():
            if whole:
                works += pair.receive([part.chunk(at, weights, buffers) for at in part.chunks()])
        wait(works)
        for pair, _ in self._each():
            pair.asked()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Wait, where a server is lost, until the supervisor that is to replace it reports it as dead, and raise
        PeerLost: before that, no other process may finish what the server may still be applying."""
        try:
            yield
        except PeerLost:
            if self._members is not None:
                self._deal.wait(lambda: False, lambda: "the supervisor to see that a parameter server is lost")
            raise

    def close(self) -> None:
        """Close all connections to the servers."""
        for pair in self._pairs:
            pair.close()
        self._pairs.clear()


@final
class StoreServer:
    """One server: a thread for each worker that talks to it. ``store(seat)``: that seat's view of the memory."""

    def __init__(self, extent: StoreSpec, number: int, store: Callable[[int], Store]) -> None:
        self._range, self._store = Range(extent, number), store
        self._listener = PeerListener(HOST)
        self.port = self._listener.port
        self._stores: dict[int, Store] = {}
        self._threads: dict[int, threading.Thread] = {}
        self.error: BaseException | None = None
        """The exception that a thread has died of."""
        self._accept = threading.Thread(target=self._listen, name="parameter server", daemon=True)
        self._accept.start()

    def _listen(self) -> None:
        while (name := self._listener.asked()) is not None:
            seat = int(name.partition("/")[0])
            before = self._threads.get(seat)
            thread = threading.Thread(target=self._talk, args=(seat, name, before), name=name, daemon=True)
            self._threads[seat] = thread
            thread.start()

    def _talk(self, seat: int, name: str, before: threading.Thread | None) -> None:
        """Talk with one worker, until it is gone. No other thread writes into that worker's place in memory: the
        connection of the process that had the seat before has ended by then."""
        try:
            pair = self._listener.meet(name)
        except PeerLost:  # it died on its way in
            if before is not None:
                before.join()
            return
        try:
            if before is not None:
                before.join()
            if seat not in self._stores:
                self._stores[seat] = self._store(seat)
            while True:
                self._answer(pair, self._stores[seat], *pair.asked())
        except PeerLost:
            pass
        except BaseException as error:
            self.error = error
        finally:
            pair.close()

    def _answer(self, pair: PeerPair, store: Store, what: int, how: int) -> None:
        part, m = self._range, store.memory
        if what == BRING:
            changes = [m.seats.changes[store.seat]] if part.buffers else []
            wait(pair.receive([part.of(m.seats.gradients[store.seat]), *changes]))
        elif what in (APPLY, TELL):
            push = store.under_way(store.seat, pull=bool(how % 2) and what == APPLY)
            if push is None or push.number != how // 2:
                raise PeerLost("its push was ended by others: it is dead")
            if what == TELL:
                for first, last in part.chunks():
                    store.apply(push, list(range(first, last)))
                    pair.ask(TELL)
            else:
                self._send(pair, store, lambda at, to: store.apply(push, list(range(at, to))), whole=push.pull)
        else:
            wait(pair.send([torch.tensor(store.copy_out(part.first, part.last))]))
            self._send(pair, store, lambda first, last: None, whole=True)
        pair.ask(what)

    def _send(self, pair: PeerPair, store: Store, make: Callable[[int, int], None], *, whole: bool) -> None:
        """Send the shards chunk by chunk: one chunk travels while the next one is made."""
        works: list[Any] = []
        for at in self._range.chunks():
            make(*at)
            if whole:
                works += pair.send([self._range.chunk(at, store.weights, store.buffers)])
        wait(works)

    def close(self) -> None:
        """Stop listening; connections that are open go on to their end."""
        self._listener.close()
        self._accept.join()
