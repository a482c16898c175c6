"""A worker's conversation with the server of one range, which outlives that server where the range has a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor

from apportion.comm.network.rendezvous import RankDoors
from apportion.errors import PeerLost, StateLost
from apportion.parallel.parameter_store.network.messages import CONTROL, NO_RANK, REPLY_SECONDS, StoreMessage
from apportion.parallel.parameter_store.network.range_copy import gradient_pieces
from apportion.parallel.parameter_store.network.range_state import NO_TICKET, StagedGradient
from apportion.parallel.parameter_store.network.shard_link import ShardLink
from apportion.parallel.parameter_store.network.views import RangeView, ViewSource
from apportion.parallel.parameter_store.shard_range import Range

START_SECONDS = 120.0
"""The seconds that a server may take to begin."""
LOST_SECONDS = 10.0
"""The seconds after which a server that does not answer is given up, where its range has no copy."""
DIAL_SECONDS = 1.0
WELCOME_SECONDS = 30.0
_PAUSE_SECONDS = 0.02, 0.3
_Found = TypeVar("_Found")


class IncarnationOver(Exception):
    """The servers listen no more to this process: it was given up, and its batches are handed out again."""


@final
class RangeSession:
    """The conversation. ``worker``: the number of the worker, or CONTROL. It is connected when it is first needed.
    ``describe_loss()``: what is known of the updates that are lost with a server."""

    def __init__(
        self,
        shard_range: Range,
        number: int,
        doors: RankDoors,
        views: ViewSource,
        worker: int,
        describe_loss: Callable[[], str] = lambda: "the updates since the last checkpoint are lost",
    ) -> None:
        self._describe_loss = describe_loss
        self.range, self.number = shard_range, number
        self._doors, self._views, self._worker = doors, views, worker
        self._link: ShardLink | None = None
        self._was_connected = self._closed = False
        self.incarnation = 0
        self._ticket = NO_TICKET
        """The last batch that this worker was given in this incarnation."""
        self.applied = self.staged = self.done = 0
        """The numbers of the last push that the range has and of the one that is staged there, when it was last asked;
        and the batches in the weights."""

    # Connections

    def connect(self, incarnation: int) -> None:
        """Connect to the server that answers for the range, as the process with this incarnation (0: a new one is asked
        for). Raises IncarnationOver where another process has taken the worker's place, and StateLost where no server
        has the range any more."""
        began, pause = time.monotonic(), _PAUSE_SECONDS[0]
        while True:
            view = self._views.ask(StoreMessage.ASK, self.number, seconds=START_SECONDS)
            if view.lost:
                raise StateLost(self._lost_message(view))
            try:
                if self._try_to_connect(view.primary, incarnation):
                    self._was_connected = True
                    return
                patience = START_SECONDS  # it is about to answer, or to hand over
            except PeerLost as error:
                if self._closed:
                    raise
                patience = LOST_SECONDS if self._was_connected and view.copy == NO_RANK else START_SECONDS
                if time.monotonic() - began > patience:
                    raise StateLost(self._lost_message(view)) from error
            if time.monotonic() - began > patience:
                raise PeerLost(f"{self._doors.describe(view.primary)} has not begun to answer in {patience:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS[1])

    def _lost_message(self, view: RangeView) -> str:
        return (
            f"{self._doors.describe(view.primary)}, the parameter server of shards {self.range.first} to "
            f"{self.range.last - 1}, is lost, and no other host has a copy of them: {self._describe_loss()}. Go on "
            "from the last checkpoint (resume), and give parameter_server(copies=1), which needs servers on two hosts"
        )

    def _try_to_connect(self, rank: int, incarnation: int) -> bool:
        self.disconnect()
        link = ShardLink(self._doors.dial(rank, DIAL_SECONDS), self._doors.describe(rank))
        try:
            link.send_message(StoreMessage.HELLO, self.number, self._worker, incarnation)
            kind, *numbers = link.receive_message(WELCOME_SECONDS)
        except PeerLost:
            link.release()
            raise
        if kind == StoreMessage.WELCOME:
            self._link = link
            if numbers[0] != self.incarnation:
                self._ticket = NO_TICKET
            self.incarnation, self.applied, self.staged, self.done = numbers[:4]
            return True
        link.release()
        if kind == StoreMessage.INCARNATION_OVER:
            raise IncarnationOver
        return False

    def disconnect(self) -> None:
        """End the conversation; the next question begins another one."""
        link, self._link = self._link, None
        if link is not None:
            link.release()

    def retry(self, action: Callable[[ShardLink], _Found]) -> _Found:
        """Do something that may be done twice, anew after each loss of the connection."""
        while True:
            try:
                if self._link is None:
                    self.connect(self.incarnation)
                assert self._link is not None
                return action(self._link)
            except PeerLost:
                self.disconnect()
                if self._closed:
                    raise

    # Pushes and pulls

    def stage(self, staged: StagedGradient) -> None:
        """Bring a push to the range, if it is not there yet."""
        *small, gradient = staged.tensors
        pieces = gradient_pieces(gradient)

        def send_push(link: ShardLink) -> None:
            if self.applied >= staged.number or self.staged == staged.number:
                return
            link.send_message(StoreMessage.STAGE, staged.number, len(staged.entries), tensors=[*small, *pieces])
            link.expect(StoreMessage.STAGED, REPLY_SECONDS)
            self.staged = staged.number

        self.retry(send_push)

    def apply(self, staged: StagedGradient, into: tuple[Tensor, Tensor] | None) -> tuple[int, Tensor | None]:
        """Have a push applied that every range has; where it pulls, the new weights and buffers come ``into`` the flat
        vectors. Returns which push of the range it was, and the versions of what was pulled."""

        def ask(link: ShardLink) -> tuple[int, Tensor | None]:
            if self.applied < staged.number and self.staged != staged.number:  # another server, which has lost it
                *small, gradient = staged.tensors
                link.send_message(
                    StoreMessage.STAGE, staged.number, len(staged.entries), tensors=[*small, *gradient_pieces(gradient)]
                )
                link.expect(StoreMessage.STAGED, REPLY_SECONDS)
                self.staged = staged.number
            link.send_message(StoreMessage.APPLY, staged.number, int(into is not None))
            made, self.done, *_ = link.expect(StoreMessage.APPLIED, REPLY_SECONDS)
            versions = self._receive_weights(link, into) if into is not None else None
            self.applied, self.staged = staged.number, 0
            return made, versions

        return self.retry(ask)

    def pull(self, into: tuple[Tensor, Tensor]) -> Tensor:
        """Fetch the last weights and buffers of the range into these flat vectors; returns their versions."""

        def ask(link: ShardLink) -> Tensor:
            link.send_message(StoreMessage.PULL)
            (self.done, *_) = link.expect(StoreMessage.PULLED, REPLY_SECONDS)
            return self._receive_weights(link, into)

        return self.retry(ask)

    def _receive_weights(self, link: ShardLink, into: tuple[Tensor, Tensor]) -> Tensor:
        shard_range = self.range
        versions = torch.zeros(shard_range.last - shard_range.first, dtype=torch.int64)
        link.receive_tensors([*(shard_range.chunk(at, *into) for at in shard_range.chunks()), versions], REPLY_SECONDS)
        return versions

    # Questions

    def take_batch(self, total: int, *, waits: bool, most: int) -> int | None:
        """Take the next batch of the queue, which the server of the first range keeps. ``waits``: where others have
        batches that may come back; ``most``: the pushes by which this worker may be ahead (-1: any)."""

        def ask(link: ShardLink) -> int | None:
            link.send_message(StoreMessage.TAKE, total, int(waits), most, self._ticket)
            batch, self.done, *_ = link.expect(StoreMessage.TICKET, REPLY_SECONDS if not waits else float("inf"))
            if batch == NO_TICKET:
                return None
            self._ticket = batch
            return batch

        return self.retry(ask)

    def stop_taking(self, *, stops: bool) -> None:
        """Take no more batches for now; ``stops``: no worker is given any."""

        def ask(link: ShardLink) -> None:
            link.send_message(StoreMessage.LEAVE, int(stops))
            link.expect(StoreMessage.DONE, REPLY_SECONDS)

        self.retry(ask)

    def freeze(self, workers: int) -> list[int]:
        """Have nothing of the range change until ``thaw``; returns the number of each worker's last push in it. Asked
        once: where the connection is lost, the range changes again."""
        link = self._connected()
        link.send_message(StoreMessage.FREEZE)
        link.expect(StoreMessage.FROZEN, REPLY_SECONDS)
        applied = torch.zeros(workers, dtype=torch.int64)
        link.receive_tensors([applied], REPLY_SECONDS)
        found: list[int] = applied.tolist()
        return found

    def ask(self, kind: int, *numbers: int, answer: int = StoreMessage.DONE) -> Sequence[int]:
        """Ask something once, in the conversation that there is; returns the numbers of the answer."""
        link = self._connected()
        link.send_message(kind, *numbers)
        return link.expect(answer, REPLY_SECONDS)

    def fetch(self, kind: int, most: int) -> Tensor:
        """Ask for bytes, at most ``most`` of them, in the open conversation."""
        link = self._connected()
        link.send_message(kind)
        nbytes, *_ = link.expect(StoreMessage.BLOB, REPLY_SECONDS)
        return link.receive_blob(nbytes, most)

    def put(self, blob: Tensor, done: int) -> None:
        """Have the range begin with these contents, which have ``done`` updates behind them."""
        link = self._connected()
        link.send_blob(StoreMessage.PUT, blob, done)
        link.expect(StoreMessage.DONE, REPLY_SECONDS)
        self.applied = self.staged = 0
        self.done = done

    def _connected(self) -> ShardLink:
        if self._link is None:
            self.connect(self.incarnation if self._worker != CONTROL else 0)
        assert self._link is not None
        return self._link

    def close(self, *, says_bye: bool) -> None:
        """End the conversation for good."""
        self._closed = True
        if says_bye and self._link is not None:
            try:
                self._link.send_message(StoreMessage.BYE)
                self._link.flush(DIAL_SECONDS)
            except PeerLost:
                pass
        self.disconnect()
