"""The decision which rank answers for each range of shards: it is made in one place, so that no two servers do.

The place is rank 0 (``Arbiter``), which also writes the run down: of a network that is cut in two, only the side with
rank 0 goes on. A range has a server that answers, and perhaps a copy (``RangeView``). Each change has a number, the
epoch; a request for a change of an older one is answered with what holds now. The other ranks ask through a
``ViewSource``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from apportion.comm.network.rendezvous import RankDoors
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.network.messages import NO_RANK, StoreMessage
from apportion.parallel.parameter_store.network.shard_link import Message, ShardLink

ASK_SECONDS = 5.0
"""The seconds that an answer of rank 0's may take."""
DIAL_SECONDS = 1.0
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class RangeView:
    """A range, and who answers for it. ``lost``: its server is gone, and there was no copy."""

    epoch: int
    primary: int
    copy: int = NO_RANK
    lost: bool = False

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The view as it travels."""
        return self.epoch, self.primary, self.copy, int(self.lost)

    @classmethod
    def from_message(cls, message: Sequence[int]) -> RangeView:
        """Return the view that has arrived."""
        epoch, primary, copy, lost = message[:4]
        return cls(epoch, primary, copy, bool(lost))

    # Decisions

    def entered(self, rank: int) -> RangeView:
        """Return the view after a server's process has begun where another one of its rank had been."""
        if rank == self.primary:
            if self.copy == NO_RANK:
                return replace(self, epoch=self.epoch + 1, lost=True)
            return RangeView(self.epoch + 1, self.copy)
        return RangeView(self.epoch + 1, self.primary, lost=self.lost) if rank == self.copy else self

    def taken_over(self, rank: int, epoch: int) -> RangeView:
        """Return the view after the copy has asked to answer, which has lost the server."""
        fits = rank == self.copy and epoch == self.epoch
        return RangeView(self.epoch + 1, rank) if fits else self

    def dropped(self, rank: int, epoch: int) -> RangeView:
        """Return the view after the server has asked to go on without its copy, which it has lost."""
        fits = rank == self.primary and epoch == self.epoch
        return RangeView(self.epoch + 1, rank, lost=self.lost) if fits else self

    def added(self, rank: int, epoch: int, copy: int) -> RangeView:
        """Return the view after the server has asked to have a copy."""
        fits = rank == self.primary and epoch == self.epoch and not self.lost
        return RangeView(self.epoch + 1, rank, copy) if fits else self


@final
class Arbiter:
    """The views of all ranges, in rank 0. ``servers``: the rank of the server of each range."""

    def __init__(self, doors: RankDoors, servers: Sequence[int]) -> None:
        self._views = {number: RangeView(1, rank) for number, rank in enumerate(servers)}
        self._seen: set[int] = set()
        self._lock = threading.Lock()
        self._describe = doors.describe
        doors.open(self._accept)

    def answer(self, kind: int, numbers: Sequence[int]) -> RangeView:
        """Return the view of a range after what was asked, if that was granted."""
        with self._lock:
            number, rank, epoch, copy = numbers[:4]
            if kind == StoreMessage.ENTER:
                # It has entered before, so that this is another process: what the first one had in memory is gone.
                if rank in self._seen:
                    self._views = {at: view.entered(rank) for at, view in self._views.items()}
                self._seen.add(rank)
            view = self._views.get(number)
            if view is None:
                raise PeerLost(f"range {number} does not exist")
            if kind == StoreMessage.TAKE_OVER:
                view = view.taken_over(rank, epoch)
            elif kind == StoreMessage.DROP:
                view = view.dropped(rank, epoch)
            elif kind == StoreMessage.ADD:
                view = view.added(rank, epoch, copy)
            self._views[number] = view
            return view

    def _accept(self, rank: int, sock: socket.socket) -> None:
        threading.Thread(
            target=self._answer_all, args=(ShardLink(sock, self._describe(rank)),), name="views", daemon=True
        ).start()

    def _answer_all(self, link: ShardLink) -> None:
        try:
            while True:
                kind, *numbers = link.receive_message()
                link.send_message(StoreMessage.VIEW, *self.answer(kind, numbers).numbers)
                link.flush(ASK_SECONDS)
        except PeerLost:
            pass
        finally:
            link.release()


@final
class ViewSource:
    """What a rank asks rank 0, over a connection that is kept; or ``arbiter``, where this is rank 0."""

    def __init__(self, doors: RankDoors, arbiter: Arbiter | None = None) -> None:
        self._doors, self._arbiter = doors, arbiter
        self._link: ShardLink | None = None
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, kind: int, number: int, *numbers: int, seconds: float) -> RangeView:
        """Ask, and ask again until rank 0 has answered. Raises PeerLost where it does not within ``seconds``."""
        if self._arbiter is not None:
            return self._arbiter.answer(kind, (number, *numbers, 0, 0, 0))
        end = time.monotonic() + seconds
        while True:
            try:
                return RangeView.from_message(self._ask(kind, number, *numbers))
            except PeerLost:
                if self._closed or time.monotonic() > end:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _ask(self, *message: int) -> Message:
        with self._lock:
            try:
                if self._link is None:
                    self._link = ShardLink(self._doors.dial(0, DIAL_SECONDS), self._doors.describe(0))
                self._link.send_message(*message)
                return self._link.expect(StoreMessage.VIEW, ASK_SECONDS)
            except PeerLost:
                if self._link is not None:
                    self._link.release()
                    self._link = None
                raise

    def close(self) -> None:
        """Ask nothing any more."""
        self._closed = True
        link = self._link
        if link is not None:
            link.close()
