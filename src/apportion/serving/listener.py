"""All connections: who may connect, who has had its time, and how they end."""

from __future__ import annotations

import asyncio
import resource
import socket

from apportion.serving.connection import Connection
from apportion.serving.head import Head
from apportion.serving.http import App
from apportion.serving.log import log
from apportion.serving.reply import Reply, Wrong

MOST_CONNECTIONS = 1024
SPARE_DESCRIPTORS = 100
"""That are left for members' processes and files, however few a process may have."""
LOOK_SECONDS = 0.5
"""Between two looks at what has had its time."""


class Listener:
    """``sock``: bound."""

    def __init__(self, app: App, sock: socket.socket) -> None:
        self._app, self._sock = app, sock
        self._every: set[Connection] = set()
        self._most = max(1, min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS))

    async def start(self) -> None:
        """Whoever connects from now on is answered."""
        loop = asyncio.get_running_loop()
        backlog = self._app.serving.most_requests
        self._server = await loop.create_server(self._connection, sock=self._sock, backlog=backlog)
        self._looking = loop.create_task(self._look())

    def _connection(self) -> Connection:
        full = len(self._every) >= self._most
        opened = self._refused if full else self._app.opened
        return Connection(opened, self._every, body_seconds=self._app.serving.body_seconds, last=full)

    def _refused(self, head: Head) -> Reply:
        return Wrong(503, f"there are {self._most} connections already", (b"retry-after", b"1")).reply()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for connection in list(self._every):
                try:
                    connection.look(loop.time())
                except Exception as error:  # the others are to be looked after all the same
                    log("defect", level="error", why=repr(error))
                    connection.abort()

    async def close(self, seconds: float) -> None:
        """No new connections; answers that are due are given, for so long."""
        self._server.close()
        for connection in list(self._every):
            connection.drain()
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while any(connection.busy for connection in self._every) and loop.time() < end:
            await asyncio.sleep(0.01)
            for connection in list(self._every):  # who had just connected as well
                connection.drain()
        self._looking.cancel()
        for connection in list(self._every):
            connection.abort()
