"""The server of one range of shards: it answers workers, and has its copy know what it does.

Everything that changes the range happens under one lock, in one order, which the copy receives. No answer names a
change that the copy has not received: what a worker has seen outlives the server. A gradient that arrives, and a pull,
take no part in that, so that a slow worker keeps no other waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from apportion.errors import PeerLost
from apportion.parallel.parameter_store.network.messages import CONTROL, REPLY_SECONDS, StoreMessage
from apportion.parallel.parameter_store.network.range_copy import CopyLost, RangeCopy, gradient_pieces, receive_gradient
from apportion.parallel.parameter_store.network.range_state import (
    NO_TICKET,
    RangeState,
    packed,
    state_json_of,
    unpacked,
)
from apportion.parallel.parameter_store.network.shard_link import ShardLink
from apportion.parallel.parameter_store.store import Contents

LOOK_SECONDS = 0.5
"""The seconds after which a thread that waits in the queue checks again that its worker is connected."""
Handler = Callable[[ShardLink, int, int, Sequence[int]], None]
"""Answers a message: the conversation, the worker, its incarnation, and the message's numbers."""


@final
class RangeServer:
    """One range, as its server. ``drop_copy()``: asks that the range goes on without its copy, and raises PeerLost
    where this is not its server any more."""

    def __init__(self, state: RangeState, drop_copy: Callable[[], None]) -> None:
        self.state, self._drop_copy = state, drop_copy
        self.unguarded = True
        """Tells whether the range may be answered for without a copy: it has none, or has had one."""
        self.order = threading.Condition()
        """Held by the thread that changes the range."""
        self.copy: RangeCopy | None = None
        self.byes: set[int] = set()
        """The workers that have ended."""
        self.gone: set[int] = set()
        """The workers whose processes were given up, until others take their places."""
        self.links: dict[int, ShardLink] = {}
        """The conversation that speaks for each worker."""
        self._frozen: ShardLink | None = None
        self._outs: dict[ShardLink, tuple[Tensor, Tensor]] = {}
        self._handlers: dict[int, Handler] = {
            StoreMessage.STAGE: self._stage,
            StoreMessage.APPLY: self._apply,
            StoreMessage.PULL: self._pull,
            StoreMessage.TAKE: self._hand_out_batch,
            StoreMessage.LEAVE: self._stop_taking,
            StoreMessage.FREEZE: self._freeze,
            StoreMessage.THAW: self._thaw,
            StoreMessage.CATCH_UP: self._catch_up,
            StoreMessage.READ: self._read,
            StoreMessage.LOG: self._log,
            StoreMessage.PUT: self._put,
            StoreMessage.FENCE: self._fence,
            StoreMessage.DISCARD: self._discard,
        }

    # Conversations

    def serve_connection(self, link: ShardLink, worker: int, incarnation: int) -> bool:
        """Answer a worker, or a process of the control, until it says that it ends, and return True; or until it is
        gone."""
        torch.set_num_threads(1)  # each thread has its own number, and there is one for each worker already
        try:
            if not self._welcome(link, worker, incarnation):
                return True
            while True:
                kind, *numbers = link.receive_message()
                if kind == StoreMessage.BYE:
                    with self.order:
                        self.byes.add(worker)
                        self.order.notify_all()
                    return True
                handler = self._handlers.get(kind)
                if handler is None:
                    raise PeerLost(f"{link.name} sent message {kind}, which is not a valid request")
                handler(link, worker, incarnation, numbers)
        except PeerLost:
            return False
        finally:
            with self.order:
                if self.links.get(worker) is link:
                    del self.links[worker]
                if self._frozen is link:
                    self._frozen = None
                self._outs.pop(link, None)
                self.order.notify_all()

    def _welcome(self, link: ShardLink, worker: int, incarnation: int) -> bool:
        if worker == CONTROL:
            link.send_message(StoreMessage.WELCOME)
            return True
        with self.order:
            state = self.state.workers[worker]
            if incarnation < state.incarnation:
                link.send_message(StoreMessage.INCARNATION_OVER)
                link.flush(REPLY_SECONDS)
                return False
            # The copy learns of the incarnation first: were this server lost after it had answered, the copy would
            # still answer the process that is refused here.
            if incarnation > state.incarnation:
                self._change(StoreMessage.ORDER_INCARNATION, worker, incarnation)
                state.incarnation = incarnation
            self.links[worker] = link
            self.byes.discard(worker)
            self.gone.discard(worker)
            staged = state.staged.number if state.staged is not None else 0
            link.send_message(StoreMessage.WELCOME, incarnation, state.applied, staged, self.state.done)
            return True

    def _must_live(self, link: ShardLink, worker: int, incarnation: int) -> None:
        if self.links.get(worker) is not link or self.state.workers[worker].incarnation != incarnation:
            raise PeerLost(f"another process speaks for worker {worker} now")

    # The copy

    def _change(self, kind: int, *numbers: int) -> None:
        """Have the copy know of a change that takes no time; the caller holds ``order``, and makes it afterwards."""
        self._begin_change(kind, *numbers)
        self._finish_change()

    def _begin_change(self, kind: int, *numbers: int) -> None:
        if self.copy is not None:
            self._with_copy(lambda copy: copy.send_order(kind, *numbers))

    def _finish_change(self) -> None:
        if self.copy is not None:
            self._with_copy(lambda copy: copy.wait_for_ack())

    def _with_copy(self, send: Callable[[RangeCopy], Any]) -> None:
        assert self.copy is not None
        try:
            send(self.copy)
        except PeerLost:
            self.lose_copy()

    def lose_copy(self) -> None:
        """Go on without the copy. The caller holds ``order``. PeerLost where the copy answers instead of this."""
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.close()
            self._drop_copy()

    # Workers

    def _stage(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        with self.order:
            self._must_live(link, worker, incarnation)
        copy = self.copy
        try:
            staged = receive_gradient(link, self.state, worker, numbers, self._handing_on(copy, worker))
        except CopyLost as lost:
            staged = lost.staged
            with self.order:
                if self.copy is copy:
                    self.lose_copy()
        # The gradient arrived without the lock, so that a slow worker holds up no other. In the meantime the worker may
        # have been given up, or another copy may have joined, which has not seen the gradient.
        with self.order:
            self._must_live(link, worker, incarnation)
            if self.copy is not copy and self.copy is not None:  # it came while the gradient did
                self._with_copy(lambda own: _hand_on_whole(own, worker, staged.number, staged.tensors))
            self.state.stage(worker, staged)
        link.send_message(StoreMessage.STAGED, staged.number)

    def _handing_on(self, copy: RangeCopy | None, worker: int) -> ShardLink | None:
        if copy is None:
            return None
        try:
            return copy.staging_link(worker)
        except PeerLost:
            with self.order:
                if self.copy is copy:
                    self.lose_copy()
            return None

    def _apply(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        number, pulls = numbers[0], bool(numbers[1])
        out = self._out(link) if pulls else None
        versions: Tensor | None = None
        with self._changing(link, worker, incarnation):
            state = self.state.workers[worker]
            if state.applied < number:
                if state.staged is None or state.staged.number != number:
                    raise PeerLost(f"{link.name} applies push {number}, which is not here")
                versions = self._apply_now(link, worker, out)
            else:
                # The worker asks again, since the answer was lost with a connection: the push is applied once.
                made = next(p.made for p in reversed(self.state.log) if (p.worker, p.number) == (worker, number))
                link.send_message(StoreMessage.APPLIED, made, self.state.done)
        if pulls and versions is None:
            assert out is not None
            versions = self._send_copy(link, out)
        if versions is not None:
            link.send(versions)
        link.flush(REPLY_SECONDS)

    def _apply_now(self, link: ShardLink, worker: int, out: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """Apply a push. Without a copy the new weights leave run by run, while the next run is updated; with one they
        leave once the copy knows of the push."""
        state, staged = self.state, self.state.workers[worker].staged
        assert staged is not None
        self._begin_change(StoreMessage.ORDER_APPLY, worker, staged.number)
        # With a copy the weights leave only after it knows of the push: a worker must never see a version that is lost
        # with this server. Without a copy there is nothing to wait for, and sending overlaps with the update.
        at_once = self.copy is None
        lost: list[PeerLost] = []
        waiting: list[tuple[int, int]] = []

        def send(first: int, last: int) -> None:
            assert out is not None
            try:
                if not lost:
                    link.send(self._chunk(first, last, out))
            except PeerLost as error:  # the push gets into every shard all the same
                lost.append(error)

        answer = (StoreMessage.APPLIED, state.pushes + 1, state.done + len(staged.entries))
        if at_once:
            try:
                link.send_message(*answer)
            except PeerLost as error:
                lost.append(error)
        copied = None if out is None else send if at_once else lambda first, last: waiting.append((first, last))
        state.apply(worker, copied, out)
        self._finish_change()
        self.order.notify_all()
        if not at_once:
            link.send_message(*answer)
        for at in waiting:
            send(*at)
        if lost:
            raise lost[0]
        return state.versions.clone() if out is not None else None

    def _pull(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        out = self._out(link)
        link.send_message(StoreMessage.PULLED, self.state.done)
        link.send(self._send_copy(link, out))
        link.flush(REPLY_SECONDS)

    def _send_copy(self, link: ShardLink, out: tuple[Tensor, Tensor]) -> Tensor:
        if self.copy is not None:
            with self.order:
                return self.state.copy_out(out, lambda first, last: link.send(self._chunk(first, last, out)))
        return self.state.copy_out(out, lambda first, last: link.send(self._chunk(first, last, out)))

    def _chunk(self, first: int, last: int, out: tuple[Tensor, Tensor]) -> Tensor:
        bounds, shards = self.state.extent.layout.bounds, self.state.extent.layout.shards
        if first >= shards:
            return out[1]
        begin = bounds[self.state.range.first]
        return out[0][bounds[first] - begin : bounds[last] - begin]

    def _out(self, link: ShardLink) -> tuple[Tensor, Tensor]:
        """Return the memory from which weights are sent in a conversation."""
        if link not in self._outs:
            self._outs[link] = torch.zeros_like(self.state.flats[0]), torch.zeros_like(self.state.buffers)
        return self._outs[link]

    @contextmanager
    def _changing(self, link: ShardLink, worker: int, incarnation: int) -> Iterator[None]:
        """Hold the order, once no process reads the store as a whole."""
        with self.order:
            # wait() releases the lock, so that the process that froze the range can read and thaw it. If that process
            # is lost, its conversation ends, which clears the mark.
            while self._frozen is not None and self._frozen is not link:
                self.order.wait(LOOK_SECONDS)
            self._must_live(link, worker, incarnation)
            yield

    # The queue

    def _hand_out_batch(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        total, waits, most, last = numbers[0], bool(numbers[1]), numbers[2], numbers[3]
        while True:
            with self._changing(link, worker, incarnation):
                queue = self.state.queue
                # A worker whose connection broke asks again. If the answer was lost, it already has a batch that it
                # does not know of, and gets this one: a second one would leave the first without a gradient for ever.
                if (batch := queue.unacknowledged(worker, last)) is not None:
                    break
                batch = queue.next_batch(total)
                if batch is None and not (waits and not queue.is_through(total)):
                    self._change(StoreMessage.ORDER_ENDED, worker)
                    queue.ended.add(worker)
                    self.order.notify_all()
                    break
                if batch is not None and (most < 0 or self._pushes_ahead(worker) <= most):
                    self._change(StoreMessage.ORDER_OPEN, worker, batch)
                    queue.hand_out(worker, batch)
                    self.order.notify_all()
                    break
                self.order.wait(LOOK_SECONDS)
            if link.has_ended():
                raise PeerLost(f"{link.name} is gone")
        link.send_message(StoreMessage.TICKET, NO_TICKET if batch is None else batch, self.state.done)

    def _stop_taking(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        with self.order:
            self._must_live(link, worker, incarnation)
            self._change(StoreMessage.ORDER_ENDED, worker)
            self.state.queue.ended.add(worker)
            self.state.queue.stopped |= bool(numbers[0])
            self.order.notify_all()
        link.send_message(StoreMessage.DONE)

    def _pushes_ahead(self, worker: int) -> int:
        """Return by how many pushes a worker is ahead of the slowest of those that still take batches."""
        workers, ended = self.state.workers, self.state.queue.ended
        going = [state.applied for other, state in workers.items() if other not in ended or other == worker]
        return workers[worker].applied - min(going)

    # The whole

    def _freeze(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        with self.order:
            while self._frozen is not None and self._frozen is not link:
                self.order.wait(LOOK_SECONDS)
                if link.has_ended():
                    raise PeerLost(f"{link.name} is gone")
            self._frozen = link
            applied = torch.tensor([self.state.workers[at].applied for at in sorted(self.state.workers)])
        link.send_message(StoreMessage.FROZEN, tensors=[applied])
        link.flush(REPLY_SECONDS)

    def _thaw(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        with self.order:
            if self._frozen is link:
                self._frozen = None
            self.order.notify_all()
        link.send_message(StoreMessage.DONE)

    def _catch_up(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        whom, number = numbers[:2]
        with self.order:
            state = self.state.workers[whom]
            if state.applied < number:
                if state.staged is None or state.staged.number != number:
                    raise PeerLost(f"push {number} of worker {whom} is not here")
                self._begin_change(StoreMessage.ORDER_APPLY, whom, number)
                self.state.apply(whom)
                self._finish_change()
            self.order.notify_all()
        link.send_message(StoreMessage.DONE)

    def _read(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        with self.order:
            blob = packed(self.state.contents())
        link.send_blob(StoreMessage.BLOB, blob)

    def _log(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        with self.order:
            try:
                found = self.state.log_tensors()
            except ValueError:
                found = {}
            blob = packed({"json": self.state.contents()["json"], **found})
        link.send_blob(StoreMessage.BLOB, blob)

    def _put(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        blob = link.receive_blob(numbers[0], self.state.most_bytes * max(2, self.state.extent.servers))
        with self.order:
            self.begin_with(unpacked(blob), numbers[1])
            self.order.notify_all()
        link.send_message(StoreMessage.DONE)

    def begin_with(self, given: dict[str, Tensor], done: int) -> None:
        """Begin with contents that a worker has sent; the incarnations of the workers stay. The caller holds
        ``order``."""
        state = self.state
        sizes = [len(pieces) for pieces in state.extent.layout.pieces]
        counts = [part.numpy() for part in given["counts"].split(sizes)]
        data = [given[f"data/{at}"] for at in range(len(state.flats))]
        incarnations = {worker: each.incarnation for worker, each in state.workers.items()}
        contents = Contents(data, counts, given["touched"].numpy(), given["buffers"])
        state.put(contents, done=done, unpushed=state_json_of(given)["unpushed"])
        for worker, incarnation in incarnations.items():
            state.workers[worker].incarnation = incarnation
        if self.copy is not None:
            self._with_copy(lambda copy: copy.put(state.dump(), done))

    # Workers that are given up

    def _fence(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        link.send_message(StoreMessage.FENCED, *self.fence(numbers[0], numbers[1], given_up=bool(numbers[2])))

    def fence(self, worker: int, incarnation: int, *, given_up: bool) -> tuple[int, int]:
        """Refuse a worker's processes before this incarnation from now on; returns the numbers of its last push that is
        applied, and of the one that is staged (0: none)."""
        with self.order:
            state = self.state.workers[worker]
            if state.incarnation < incarnation:
                self._change(StoreMessage.ORDER_INCARNATION, worker, incarnation)
                state.incarnation = incarnation
            if (spoke := self.links.pop(worker, None)) is not None:
                spoke.close()
            if given_up:
                self.gone.add(worker)
            self.order.notify_all()
            return state.applied, state.staged.number if state.staged is not None else 0

    def _discard(self, link: ShardLink, worker: int, incarnation: int, numbers: Sequence[int]) -> None:
        self.discard(numbers[0])
        link.send_message(StoreMessage.DONE)

    def discard(self, worker: int) -> None:
        """Drop the push of a worker that is staged and will not be applied."""
        with self.order:
            self._change(StoreMessage.ORDER_DISCARD, worker)
            self.state.workers[worker].staged = None

    def catch_up(self, worker: int, number: int) -> None:
        """Apply the push of a worker that is staged, where the range does not have it."""
        with self.order:
            if self.state.workers[worker].applied < number:
                self._begin_change(StoreMessage.ORDER_APPLY, worker, number)
                self.state.apply(worker)
                self._finish_change()
            self.order.notify_all()

    def give_back(self, worker: int) -> None:
        """Have the batches of a worker that it has not pushed handed out again."""
        with self.order:
            self._change(StoreMessage.ORDER_BACK, worker)
            self.state.queue.give_back(worker)
            self.order.notify_all()

    @property
    def may_answer(self) -> bool:
        """Tells whether workers are answered: at the beginning they wait for the copy."""
        return self.unguarded or self.copy is not None

    @property
    def is_over(self) -> bool:
        """Tells whether every worker has ended, or was given up."""
        return len(self.byes | self.gone) >= len(self.state.workers)


def _hand_on_whole(copy: RangeCopy, worker: int, number: int, tensors: Sequence[Tensor]) -> None:
    """Give the copy a push that arrived before it was there."""
    *small, gradient = tensors
    link = copy.staging_link(worker)
    link.send_message(StoreMessage.STAGE, number, len(tensors[0]), tensors=[*small, *gradient_pieces(gradient)])
    link.expect(StoreMessage.STAGED, REPLY_SECONDS)
