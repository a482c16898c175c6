"""What becomes of a worker's batches when its process is lost: decided by the server of the first range.

A push that some range has applied gets into all of them: it was brought to every one before that. One that none has
applied is dropped, and its batches are handed out again, with those that the worker had not pushed. From then on no
server answers the process: where it lives, it begins anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from apportion.errors import PeerLost, StateLost
from apportion.parallel.parameter_store.network.messages import Say
from apportion.parallel.parameter_store.network.range_server import RangeServer
from apportion.parallel.parameter_store.network.range_session import RangeSession

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
            server = self._here()
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

    def _here(self) -> RangeServer:
        server = self._own()
        if server is None:
            raise PeerLost("another server answers for the queue now")
        return server

    def _resolve(self, server: RangeServer, worker: int, incarnation: int, *, given_up: bool) -> None:
        others = self._others()
        try:
            reports = [server.fence(worker, incarnation, given_up=given_up)]
            for other in others:
                applied, staged, *_ = other.ask(Say.FENCE, worker, incarnation, int(given_up), answer=Say.FENCED)
                reports.append((applied, staged))
            newest = max(applied for applied, _ in reports)
            for (applied, staged), other in zip(reports[1:], others, strict=True):
                if applied < newest:
                    other.ask(Say.CATCH_UP, worker, newest)
                elif staged:
                    other.ask(Say.DISCARD, worker)
            if reports[0][0] < newest:
                server.catch_up(worker, newest)
            elif reports[0][1]:
                server.discard(worker)
            server.give_back(worker)
        finally:
            for other in others:
                other.close(says_bye=False)
