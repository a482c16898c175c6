"""The ranges of shards that one process answers for, those of which it keeps a copy for another host, and the decisions
about workers.

``ShardServers`` accepts connections and assigns each to the range that it is for. A copy of a range asks the server
for everything that it has, and receives from then on every change that the server makes. Where the server is lost, the
copy asks to answer in its place; where the process comes back, it asks for a copy in turn. ``copy_ranks`` chooses the
rank of each copy, on another host.

``WorkerRegistry``, at the server of the first range, decides which process speaks for a worker: it gives out
incarnations, gives up a worker that has lost its connection, and then has every range agree on the worker's last push.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import final

from apportion.comm.network.rendezvous import RankDoors
from apportion.errors import PeerLost, StateLost
from apportion.parallel.parameter_store.network.messages import CONTROL, NO_RANK, REPLY_SECONDS, StoreMessage
from apportion.parallel.parameter_store.network.range_copy import RangeCopy, follow_order, receive_stage
from apportion.parallel.parameter_store.network.range_server import RangeServer
from apportion.parallel.parameter_store.network.range_session import RangeSession
from apportion.parallel.parameter_store.network.range_state import RangeState
from apportion.parallel.parameter_store.network.shard_link import ShardLink
from apportion.parallel.parameter_store.network.views import RangeView, ViewSource

GRACE_SECONDS = 1.0
"""The seconds that a worker has to connect again."""


@final
class WorkerRegistry:
    """The decisions about workers. ``own()``: the first range, where this process answers for it; ``others()``: a
    conversation with the server of each other range."""

    def __init__(
        self, own: Callable[[], RangeServer | None], others: Callable[[], list[RangeSession]], closed: threading.Event
    ) -> None:
        self._own, self._others, self._closed = own, others, closed
        self._lock = threading.Lock()

    def new_incarnation(self, worker: int) -> int:
        """Return the incarnation of a process that has just begun, once nothing is left of the one before it."""
        with self._lock:
            server = self._own_server()
            incarnation = server.state.workers[worker].incarnation
            if incarnation:
                self._resolve(server, worker, incarnation + 1, given_up=False)
            return incarnation + 1

    def lost(self, worker: int, incarnation: int) -> None:
        """Give a worker up that has lost its connection, unless it connects again within GRACE_SECONDS."""
        threading.Thread(target=self._lost, args=(worker, incarnation), name="grace", daemon=True).start()

    def took_over(self) -> None:
        """Give those workers up that do not connect, after the first range has got another server."""
        server = self._own()
        if server is not None:
            for worker, state in server.state.workers.items():
                self.lost(worker, state.incarnation)

    def _lost(self, worker: int, incarnation: int) -> None:
        if self._closed.wait(GRACE_SECONDS):
            return
        with self._lock:
            server = self._own()
            if server is None or self._closed.is_set():
                return
            with server.order:
                if (
                    worker in server.links
                    or worker in server.byes
                    or server.state.workers[worker].incarnation != incarnation
                ):
                    return
            try:
                self._resolve(server, worker, incarnation + 1, given_up=True)
            except (PeerLost, StateLost):
                if not self._closed.is_set():
                    raise

    def _own_server(self) -> RangeServer:
        server = self._own()
        if server is None:
            raise PeerLost("another server answers for the queue now")
        return server

    def _resolve(self, server: RangeServer, worker: int, incarnation: int, *, given_up: bool) -> None:
        others = self._others()
        try:
            reports = [server.fence(worker, incarnation, given_up=given_up)]
            for other in others:
                applied, staged, *_ = other.ask(
                    StoreMessage.FENCE, worker, incarnation, int(given_up), answer=StoreMessage.FENCED
                )
                reports.append((applied, staged))
            # A push was staged at every range before any range applied it. So if one has applied it, all others have it
            # staged and can catch up; if none has, it can be dropped, since no worker has seen it.
            newest = max(applied for applied, _ in reports)
            for (applied, staged), other in zip(reports[1:], others, strict=True):
                if applied < newest:
                    other.ask(StoreMessage.CATCH_UP, worker, newest)
                elif staged:
                    other.ask(StoreMessage.DISCARD, worker)
            if reports[0][0] < newest:
                server.catch_up(worker, newest)
            elif reports[0][1]:
                server.discard(worker)
            # The batches return last: had they been handed out before, a push that still gets applied would count them
            # twice.
            server.give_back(worker)
        finally:
            for other in others:
                other.close(says_bye=False)


HELLO_SECONDS = 30.0
ASK_SECONDS = 120.0
DIAL_SECONDS = 1.0
_PAUSE_SECONDS = 0.05


def copy_ranks(servers: Sequence[int], hosts: Sequence[int]) -> list[int]:
    """Return the rank that keeps the copy of each server's range: the next server on another host. ``hosts``: the
    host of every rank. ValueError where there is none."""
    found = []
    for at, rank in enumerate(servers):
        others = [*servers[at + 1 :], *servers[:at]]
        elsewhere = [other for other in others if hosts[other] != hosts[rank]]
        if not elsewhere:
            raise ValueError(
                f"copies=1 keeps a copy of each server's shards on another host, and all of the {len(servers)} servers "
                "are on one: give servers=2 or more on several hosts, or leave copies out"
            )
        found.append(elsewhere[0])
    return found


@final
class ShardServers:
    """The ranges of one process. ``servers``: the rank of the server of each range; ``copies``: the rank of each
    copy, none where there are none; ``state(number)``: makes a range as it is at the beginning."""

    def __init__(
        self,
        doors: RankDoors,
        servers: Sequence[int],
        copies: Sequence[int],
        state: Callable[[int], RangeState],
        registry: Callable[[ShardServers], WorkerRegistry],
    ) -> None:
        self.rank, self._doors, self._servers, self._copies = doors.rank, doors, list(servers), list(copies)
        self.views = ViewSource(doors)
        self._state = state
        self.ranges: dict[int, RangeServer] = {}
        """The ranges that this process answers for."""
        self.closed = threading.Event()
        self.error: BaseException | None = None
        """The exception that a thread has died of."""
        self._following: dict[int, RangeState] = {}
        self._followers: set[int] = set()
        """The ranges of others that a thread keeps a copy of, or tries to."""
        self._epochs: dict[int, int] = {}
        self._links: set[ShardLink] = set()
        self._connections: dict[tuple[int, int], tuple[ShardLink, threading.Thread]] = {}
        self._lock = threading.Lock()
        self._registry = registry(self)

    def start(self) -> None:
        """Begin to answer, or to follow the server that answers. Raises StateLost where the shards of this process are
        lost: another process of its rank had them, and there was no copy."""
        self._doors.open(self._accept)
        own = self._servers.index(self.rank)
        view = self.views.ask(StoreMessage.ENTER, own, self.rank, seconds=ASK_SECONDS)
        if view.lost:
            raise StateLost("the shards of this parameter server are lost with the process that had them")
        if view.primary == self.rank:
            self._serve(own, self._state(own), view)
        else:
            self._begin_to_follow(own)
        for number, rank in enumerate(self._copies):
            if rank == self.rank:
                self._begin_to_follow(number)

    def _start(self, run: Callable[..., None], *given: object) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(run, *given), name=run.__name__, daemon=True)
        thread.start()
        return thread

    def _guarded(self, run: Callable[..., None], *given: object) -> None:
        try:
            run(*given)
        except PeerLost:
            pass
        except BaseException as error:
            self.error = error

    def _serve(self, number: int, state: RangeState, view: RangeView) -> None:
        self._epochs[number] = view.epoch
        server = RangeServer(state, lambda: self._drop_copy(number))
        server.unguarded = not self._copies
        with self._lock:
            self.ranges[number] = server

    def _drop_copy(self, number: int) -> None:
        """Ask that a range goes on without its copy."""
        view = self.views.ask(StoreMessage.DROP, number, self.rank, self._epochs[number], seconds=REPLY_SECONDS)
        if view.primary != self.rank:
            self._depose(number)
            raise PeerLost(f"rank {view.primary} answers for these shards now")
        self._epochs[number] = view.epoch

    def _depose(self, number: int) -> None:
        """Answer for a range no more: its copy does."""
        with self._lock:
            server = self.ranges.pop(number, None)
        if server is not None:
            for link in list(server.links.values()):
                link.close()
            self._begin_to_follow(number)

    # Conversations

    def _accept(self, rank: int, sock: socket.socket) -> None:
        link = ShardLink(sock, self._doors.describe(rank))
        with self._lock:
            self._links.add(link)
        self._start(self._handle_connection, link)

    def _handle_connection(self, link: ShardLink) -> None:
        keeps = False
        try:
            if self.closed.is_set():
                return
            kind, *numbers = link.receive_message(HELLO_SECONDS)
            if kind == StoreMessage.HELLO:
                self._serve_worker(link, *numbers[:3])
            elif kind == StoreMessage.JOIN:
                self._admit_copy(link, *numbers[:2])
                keeps = True
            elif kind == StoreMessage.COPY_STAGE:
                self._keep_stages(link, *numbers[:2])
        finally:
            if not keeps:
                with self._lock:
                    self._links.discard(link)
                link.release()

    def _serve_worker(self, link: ShardLink, number: int, worker: int, incarnation: int) -> None:
        server = self.ranges.get(number)
        if server is None or not server.may_answer or (worker != CONTROL and worker not in server.state.workers):
            link.send_message(StoreMessage.NOT_HERE)
            link.flush(HELLO_SECONDS)
            return
        if worker == CONTROL:
            server.serve_connection(link, worker, incarnation)
            return
        with self._lock:
            before = self._connections.get((number, worker))
            self._connections[number, worker] = link, threading.current_thread()
        # The old connection is closed first, which ends its thread; only then is it joined.
        if before is not None:  # no other thread writes into that worker's place
            before[0].close()
            before[1].join()
        if number == 0 and incarnation == 0:
            incarnation = self._registry.new_incarnation(worker)
        ended = server.serve_connection(link, worker, incarnation)
        if not ended and number == 0:
            self._registry.lost(worker, incarnation)

    # Copies

    def _admit_copy(self, link: ShardLink, number: int, rank: int) -> None:
        """Take a copy of a range in, with everything that the range has."""
        server = self.ranges.get(number)
        if server is None:
            raise PeerLost(f"range {number} is not here")
        with server.order:
            server.lose_copy()
            epoch = self._epochs[number]
            link.send_blob(StoreMessage.BLOB, server.state.dump(), epoch + 1)
            # The copy has all of the state before rank 0 counts on it: a copy that is named first could be asked to
            # take over with half of the state. The lock `order` keeps the state as it is meanwhile.
            link.expect(StoreMessage.ACK, REPLY_SECONDS)
            view = self.views.ask(StoreMessage.ADD, number, self.rank, epoch, rank, seconds=REPLY_SECONDS)
            if view.primary != self.rank:
                self._depose(number)
            if view.copy != rank:
                raise PeerLost(f"rank {rank} is not to have a copy of range {number}")
            self._epochs[number] = view.epoch
            server.copy = RangeCopy(rank, number, link, self._doors)
            server.unguarded = True
            server.order.notify_all()

    def _keep_stages(self, link: ShardLink, number: int, worker: int) -> None:
        while True:
            kind, *numbers = link.receive_message()
            state = self._following.get(number)
            if kind != StoreMessage.STAGE or state is None:
                raise PeerLost(f"{link.name} hands on gradients of range {number}, of which this process has no copy")
            receive_stage(link, state, worker, numbers, None)
            link.send_message(StoreMessage.STAGED, numbers[0])

    def _begin_to_follow(self, number: int) -> None:
        with self._lock:
            self._followers.add(number)
        self._start(self._follow, number)

    def _follow(self, number: int) -> None:
        """Keep a copy of a range, and answer for it where its server is lost."""
        try:
            self._follow_until_over(number)
        finally:
            with self._lock:
                self._followers.discard(number)

    def _follow_until_over(self, number: int) -> None:
        while not self.closed.is_set():
            view = self.views.ask(StoreMessage.ASK, number, seconds=ASK_SECONDS)
            if view.lost:
                return
            state = self._state(number)
            epoch = NO_RANK
            try:
                link = ShardLink(self._doors.dial(view.primary, DIAL_SECONDS), self._doors.describe(view.primary))
                with self._lock:
                    self._links.add(link)
                link.send_message(StoreMessage.JOIN, number, self.rank)
                epoch = self._receive_all(link, state)
                if self._follow_orders(link, number, state):
                    return
            except PeerLost:
                if self.closed.is_set():
                    return
            self._following.pop(number, None)
            # Without an epoch this process never became a copy, and has no state to take over with.
            if epoch != NO_RANK:
                view = self.views.ask(StoreMessage.TAKE_OVER, number, self.rank, epoch, seconds=ASK_SECONDS)
                if view.primary == self.rank:
                    self._serve(number, state, view)
                    self.ranges[number].unguarded = True
                    if number == 0:
                        self._registry.took_over()
                    return
            self.closed.wait(_PAUSE_SECONDS)

    def _receive_all(self, link: ShardLink, state: RangeState) -> int:
        """Take over everything that the range has; returns the epoch in which this is its copy."""
        nbytes, epoch, *_ = link.expect(StoreMessage.BLOB, HELLO_SECONDS)
        state.restore(link.receive_blob(nbytes, state.most_bytes))
        return epoch

    def _follow_orders(self, link: ShardLink, number: int, state: RangeState) -> bool:
        """Do what the server does, until it says that the run is over, and return True."""
        self._following[number] = state
        link.send_message(StoreMessage.ACK)
        while True:
            message = link.receive_message()
            if message[0] == StoreMessage.ORDER_END:
                return True
            follow_order(state, link, message)
            link.send_message(StoreMessage.ACK)

    # The end

    def is_over(self) -> bool:
        """Return whether every worker that this process answers has ended, and every server whose copy it keeps has
        reported that too. Sends the end to the copies of its own ranges."""
        over = True
        for server in list(self.ranges.values()):
            with server.order:
                over &= server.is_over
                if server.is_over and server.copy is not None:
                    server.copy.announce_end()
                    server.copy = None
        return over and not self._followers

    def close(self) -> None:
        """Answer no process any more."""
        self.closed.set()
        self._doors.close()
        self.views.close()
        with self._lock:
            links = [*self._links]
        for server in list(self.ranges.values()):
            if server.copy is not None:
                server.copy.close()
        for link in links:
            link.close()
