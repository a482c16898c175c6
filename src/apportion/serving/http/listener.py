"""The listening socket and all connections: which clients may connect, which have had their time, and how they end."""

from __future__ import annotations

import asyncio
import os
import resource
import socket

from apportion.serving.http.connection import Connection
from apportion.serving.http.request_head import Head
from apportion.serving.http.response import HTTPError, Response
from apportion.serving.http.routes import App
from apportion.serving.log import log

MOST_CONNECTIONS = 1024
REFUSED_AT_ONCE = 16
"""The number of connections over the limit that are answered 503; others are closed at once."""
ACCEPTED_AT_ONCE = 16
"""The number of connections that are accepted before other work has its turn: those that give way to them are closed by
then."""
SPARE_DESCRIPTORS = 32
"""The number of file descriptors that are kept free for files, besides those for members' processes, which are replaced
however many clients there are."""
DESCRIPTORS_OF_A_PROCESS = 6
"""The number of file descriptors that a member's process needs while it is started, beside the one that it replaces."""
LOOK_SECONDS = 0.5
"""The seconds between two looks for connections whose time limit has passed."""
SAID_SECONDS = 10.0
"""The seconds between two lines in the log about clients that were disconnected or turned away."""
PAUSE_SECONDS = 0.1
"""The seconds without accepting connections, after one could not be accepted."""


class Listener:
    """The server's end of all connections. ``sock``: a socket that is bound."""

    def __init__(self, app: App, sock: socket.socket) -> None:
        self._app, self._sock = app, sock
        self._every: set[Connection] = set()
        self._refusing: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._most = most_connections(
            resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd")), len(app.ensemble.members)
        )
        self._gave_way = self._turned_away = self._said = 0
        self._said_at = float("-inf")

    async def start(self) -> None:
        """Start to answer the clients that connect."""
        self._loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        self._sock.listen(self._app.serving.most_requests)
        self._loop.add_reader(self._sock, self._accept)
        self._looking = self._loop.create_task(self._watch())

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor, no memory
                log("connections are not accepted", level="error", why=str(error))
                self._loop.remove_reader(self._sock)
                self._loop.call_later(PAUSE_SECONDS, self._accept_again)
                return
            sock.setblocking(False)
            self._take_connection(sock)

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)

    def _take_connection(self, sock: socket.socket) -> None:
        """Take a new connection; where there are too many, in the place of those that have been idle for longest."""
        full = len(self._every) + len(self._opening) >= self._most and not self._make_room()
        if full and len(self._refusing) >= REFUSED_AT_ONCE:
            self._turned_away += 1
            sock.close()
            return
        task = self._loop.create_task(self._open(sock, full=full))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket, *, full: bool) -> None:
        def made() -> Connection:
            seconds = self._app.serving.body_seconds
            if full:
                return Connection(self._refused, self._refusing, body_seconds=seconds, last=True)
            return Connection(self._app.opened, self._every, body_seconds=seconds, unread=self._app.unread)

        try:
            await self._loop.connect_accepted_socket(made, sock)
        except OSError:  # it has gone already
            sock.close()

    def _make_room(self) -> bool:
        """Close the connections that have been idle for longest. Returns whether there were any."""
        idle = sorted((since, id(one), one) for one in self._every if (since := one.idle_since) is not None)
        for _, _, connection in idle[: max(1, self._most // 16)]:
            self._every.discard(connection)
            connection.abort()
            self._gave_way += 1
        return bool(idle)

    def _refused(self, head: Head) -> Response:
        return HTTPError(503, f"there are {self._most} connections already", (b"retry-after", b"1")).reply()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._loop.time()
            self._app.unread.enforce_limits(now)
            self._log_disconnected(now)
            for connection in [*self._every, *self._refusing]:
                try:
                    connection.enforce_time_limits(now)
                except Exception as error:  # the other connections are watched all the same
                    log("defect", level="error", why=repr(error))
                    connection.abort()

    def _log_disconnected(self, now: float) -> None:
        """Log how many clients were disconnected, every ``SAID_SECONDS`` at most."""
        count = self._gave_way + self._turned_away + self._app.unread.let_go
        if count == self._said or now < self._said_at + SAID_SECONDS:
            return
        self._said, self._said_at = count, now
        log(
            "clients let go",
            level="warning",
            idle_and_over_the_limit=self._gave_way,
            over_the_limit=self._turned_away,
            not_reading_their_answer=self._app.unread.let_go,
            most_connections=self._most,
        )

    async def close(self, seconds: float) -> None:
        """Take no new connections, and give the answers that are due, for ``seconds`` at most."""
        self._loop.remove_reader(self._sock)
        self._sock.close()
        end = self._loop.time() + seconds
        self._drain()
        while any(connection.busy for connection in self._every) and self._loop.time() < end:
            await asyncio.sleep(0.01)
            self._drain()  # connections that were just opened as well
        self._looking.cancel()
        for connection in [*self._every, *self._refusing]:
            connection.end()
        await asyncio.sleep(0)  # in which connections that have nothing left to send are closed

    def _drain(self) -> None:
        for connection in [*self._every, *self._refusing]:
            connection.drain()


def most_connections(descriptors: int, used: int, members: int) -> int:
    """Return how many connections there may be where this process may have ``descriptors``, of which ``used``
    are taken."""
    if descriptors == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    kept = used + SPARE_DESCRIPTORS + REFUSED_AT_ONCE + ACCEPTED_AT_ONCE + DESCRIPTORS_OF_A_PROCESS * (members + 1)
    return max(1, min(MOST_CONNECTIONS, descriptors - kept))
