"""The copy of a range on another host: its server sends it each change before any worker learns of the change.

``RangeCopy`` is the copy as the server sees it. ``receive_gradient`` receives a worker's push, at the server and at the
copy, and hands it on as it arrives. ``follow_order`` applies, at the copy, what the server has done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from torch import Tensor

from apportion.comm.network.rendezvous import RankDoors
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.network.messages import MOST_BATCHES, PIECE_BYTES, REPLY_SECONDS, StoreMessage
from apportion.parallel.parameter_store.network.range_state import RangeState, StagedGradient
from apportion.parallel.parameter_store.network.shard_link import Message, ShardLink

DIAL_SECONDS = 1.0


@final
class RangeCopy:
    """A copy, as the server that has it sees it. Orders are given by one thread at a time; each worker's gradients are
    handed on by the thread that receives them, over a conversation of their own."""

    def __init__(self, rank: int, number: int, orders: ShardLink, doors: RankDoors) -> None:
        self.rank, self._number, self._orders, self._doors = rank, number, orders, doors
        self._stages: dict[int, ShardLink] = {}
        self._lock = threading.Lock()

    def send_order(self, kind: int, *numbers: int) -> None:
        """Begin to tell the copy what is being done."""
        self._orders.send_message(kind, *numbers)

    def wait_for_ack(self) -> None:
        """Wait until the copy knows it. Raises PeerLost where it is gone."""
        self._orders.expect(StoreMessage.ACK, REPLY_SECONDS)

    def put(self, blob: Tensor, done: int) -> None:
        """Have the copy begin with these contents."""
        self._orders.send_blob(StoreMessage.ORDER_PUT, blob, done)
        self.wait_for_ack()

    def staging_link(self, worker: int) -> ShardLink:
        """Return the conversation for a worker's gradients. Raises PeerLost where the copy is gone."""
        with self._lock:
            link = self._stages.get(worker)
        if link is None:
            link = ShardLink(self._doors.dial(self.rank, DIAL_SECONDS), self._doors.describe(self.rank))
            link.send_message(StoreMessage.COPY_STAGE, self._number, worker)
            with self._lock:
                self._stages[worker] = link
        return link

    def announce_end(self) -> None:
        """Tell the copy that the run is over, and that it has nothing to take over."""
        try:
            self._orders.send_message(StoreMessage.ORDER_END)
            self._orders.flush(DIAL_SECONDS)
        except PeerLost:
            pass

    def close(self) -> None:
        """End all conversations with the copy. May be called from any thread."""
        with self._lock:
            for link in (self._orders, *self._stages.values()):
                link.close()


def gradient_pieces(gradient: Tensor) -> Sequence[Tensor]:
    """Return the parts in which a gradient travels."""
    return gradient.split(max(1, PIECE_BYTES // gradient.element_size())) if gradient.numel() else ()


def receive_stage(
    link: ShardLink, state: RangeState, worker: int, numbers: Sequence[int], on: ShardLink | None
) -> None:
    """Receive a worker's push, and keep it. ``on``: the conversation that it is handed on in, as it arrives. Raises
    PeerLost where either end is gone, in which case nothing is kept."""
    staged = receive_gradient(link, state, worker, numbers, on)
    state.stage(worker, staged)


def receive_gradient(
    link: ShardLink, state: RangeState, worker: int, numbers: Sequence[int], on: ShardLink | None
) -> StagedGradient:
    """Receive a worker's push into its place, and hand it on as it arrives."""
    number, batches = numbers[:2]
    if not 0 < batches <= MOST_BATCHES or worker not in state.workers:
        raise PeerLost(f"{link.name} pushes {batches} batches for worker {worker}, which cannot be")
    state.workers[worker].staged = None  # what is there is about to be written over
    staged = StagedGradient.allocate(state.extent, state.range, number, batches, state.gradient_memory(worker))
    *small, gradient = staged.tensors
    pieces = gradient_pieces(gradient)
    link.receive_tensors(small, REPLY_SECONDS)
    if on is None:
        link.receive_tensors(pieces, REPLY_SECONDS)
        return staged
    lost: list[PeerLost] = []

    def hand_on(*tensors: Tensor) -> None:
        try:
            if not lost:
                on.send(*tensors)
        except PeerLost as error:  # the worker's part arrives all the same
            lost.append(error)

    try:
        on.send_message(StoreMessage.STAGE, number, batches, tensors=small)
    except PeerLost as error:
        lost.append(error)
    link.receive_tensors(pieces, REPLY_SECONDS, arrived=lambda at: hand_on(pieces[at]))
    if lost:
        raise CopyLost(staged) from lost[0]
    try:
        # The copy has all of the gradient before the worker is answered: only then can a push no longer be lost.
        on.expect(StoreMessage.STAGED, REPLY_SECONDS)
    except PeerLost as error:
        raise CopyLost(staged) from error
    return staged


class CopyLost(Exception):
    """The copy went away while a gradient was handed on, which has arrived here."""

    def __init__(self, staged: StagedGradient) -> None:
        super().__init__("the copy of a range is lost")
        self.staged = staged


def follow_order(state: RangeState, link: ShardLink, message: Message) -> None:
    """Do, as a copy, what the server has done."""
    kind, worker, number = message[:3]
    queue = state.queue
    if kind == StoreMessage.ORDER_APPLY:
        staged = state.workers[worker].staged
        if state.workers[worker].applied < number:
            if staged is None or staged.number != number:
                raise PeerLost(f"{link.name} applies push {number} of worker {worker}, which is not here")
            state.apply(worker)
    elif kind == StoreMessage.ORDER_INCARNATION:
        state.workers[worker].incarnation = number
    elif kind == StoreMessage.ORDER_OPEN:
        queue.hand_out(worker, number)
    elif kind == StoreMessage.ORDER_BACK:
        queue.give_back(worker)
    elif kind == StoreMessage.ORDER_ENDED:
        queue.ended.add(worker)
    elif kind == StoreMessage.ORDER_DISCARD:
        state.workers[worker].staged = None
    elif kind == StoreMessage.ORDER_PUT:
        state.restore(link.receive_blob(worker, state.most_bytes))
    else:
        raise PeerLost(f"{link.name} sent message {kind}, which is not a valid order")
