"""What becomes of a worker's batches when its process is lost: decided by the server of the first range.

A push that some range has applied gets into all of them: it was brought to every one before that. One that none has
applied is dropped, and its batches are handed out again, with those that the worker had not pushed. From then on nobody
listens to the process: where it lives, it begins anew.
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
class SeatDealer:
    """The decisions about workers. ``own()``: the first range, where this process answers for it; ``others()``: a
    conversation with the server of each other range."""

    def __init__(
        self, own: Callable[[], RangeServer | None], others: Callable[[], list[RangeSession]], closed: threading.Event
    ) -> None:
        self._own, self._others, self._closed = own, others, closed
        self._lock = threading.Lock()

    def new_life(self, seat: int) -> int:
        """Return the life of a process that has just begun, once nothing is left of the one before it."""
        with self._lock:
            server = self._here()
            life = server.state.seats[seat].life
            if life:
                self._resolve(server, seat, life + 1, given_up=False)
            return life + 1

    def lost(self, seat: int, life: int) -> None:
        """Give a worker up that has lost its connection, unless it connects again within GRACE_SECONDS."""
        threading.Thread(target=self._lost, args=(seat, life), name="grace", daemon=True).start()

    def took_over(self) -> None:
        """Give those workers up that do not connect, after the first range has got another server."""
        server = self._own()
        if server is not None:
            for seat, state in server.state.seats.items():
                self.lost(seat, state.life)

    def _lost(self, seat: int, life: int) -> None:
        if self._closed.wait(GRACE_SECONDS):
            return
        with self._lock:
            server = self._own()
            if server is None or self._closed.is_set():
                return
            with server.order:
                if seat in server.links or seat in server.byes or server.state.seats[seat].life != life:
                    return
            try:
                self._resolve(server, seat, life + 1, given_up=True)
            except (PeerLost, StateLost):
                if not self._closed.is_set():
                    raise

    def _here(self) -> RangeServer:
        server = self._own()
        if server is None:
            raise PeerLost("another server answers for the queue now")
        return server

    def _resolve(self, server: RangeServer, seat: int, life: int, *, given_up: bool) -> None:
        others = self._others()
        try:
            told = [server.fence(seat, life, given_up=given_up)]
            for other in others:
                applied, staged, *_ = other.ask(Say.FENCE, seat, life, int(given_up), answer=Say.FENCED)
                told.append((applied, staged))
            newest = max(applied for applied, _ in told)
            for (applied, staged), other in zip(told[1:], others, strict=True):
                if applied < newest:
                    other.ask(Say.CATCH_UP, seat, newest)
                elif staged:
                    other.ask(Say.DISCARD, seat)
            if told[0][0] < newest:
                server.catch_up(seat, newest)
            elif told[0][1]:
                server.discard(seat)
            server.give_back(seat)
        finally:
            for other in others:
                other.close(says_bye=False)
