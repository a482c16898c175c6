"""All connections: who may connect, who has had its time, and how they end."""

from __future__ import annotations

import asyncio
import socket

from apportion.serving.connection import Connection
from apportion.serving.http import App
from apportion.serving.reply import Wrong

MOST_CONNECTIONS = 1024
LOOK_SECONDS = 0.5
"""Between two looks at what has had its time."""


class Listener:
    """``sock``: bound."""

    def __init__(self, app: App, sock: socket.socket) -> None:
        self._app, self._sock = app, sock
        self._every: set[Connection] = set()

    async def start(self) -> None:
        """Whoever connects from now on is answered."""
        loop = asyncio.get_running_loop()
        backlog = self._app.serving.most_requests
        self._server = await loop.create_server(self._connection, sock=self._sock, backlog=backlog)
        self._looking = loop.create_task(self._look())

    def _connection(self) -> Connection:
        opened = self._app.opened
        if len(self._every) >= MOST_CONNECTIONS:
            full = Wrong(503, f"there are {len(self._every)} connections already", (b"retry-after", b"1"))
            opened = lambda head: full.reply()  # noqa: E731
        return Connection(opened, self._every, body_seconds=self._app.serving.body_seconds)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for connection in list(self._every):
                connection.look(loop.time())

    async def close(self, seconds: float) -> None:
        """No new connections; answers that are due are given, for so long."""
        self._server.close()
        for connection in list(self._every):
            connection.drain()
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while any(connection.busy for connection in self._every) and loop.time() < end:
            await asyncio.sleep(0.01)
        self._looking.cancel()
        for connection in list(self._every):
            connection.abort()
