"""The store as a worker sees it whose servers are on other hosts: what it pushes, pulls, and asks of the queue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, final

import torch
from torch import Tensor

from apportion.comm.network.rendezvous import RankDoors
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.memory.store_spec import PUSH, TICKET, VERSIONS, StoreSpec
from apportion.parallel.parameter_store.network.messages import StoreMessage
from apportion.parallel.parameter_store.network.range_session import IncarnationOver, RangeSession
from apportion.parallel.parameter_store.network.range_state import (
    RUN_BYTES,
    Collected,
    StagedGradient,
    collect,
    packed,
    state_json_of,
    unpacked,
)
from apportion.parallel.parameter_store.network.views import ViewSource
from apportion.parallel.parameter_store.push_log import PushLog
from apportion.parallel.parameter_store.push_store import PushStore
from apportion.parallel.parameter_store.shard_range import Range
from apportion.parallel.parameter_store.store import Contents

BEGIN_SECONDS = 120.0
"""The seconds that a worker may take to begin while servers are lost."""
TRIES = 20
"""The number of times that the store is asked for as a whole where servers are lost meanwhile."""
_Found = TypeVar("_Found")


@final
class NetworkStore(PushStore):
    """A worker's way to all ranges. ``weights``: where what is pulled goes; ``worker``: its number."""

    def __init__(self, extent: StoreSpec, weights: Tensor, doors: RankDoors, views: ViewSource, worker: int) -> None:
        self.extent, self.worker, self._views = extent, worker, views
        ranges = [Range(extent, number, chunk_bytes=RUN_BYTES) for number in range(extent.servers)]
        self._sessions = [
            RangeSession(shard_range, number, doors, views, worker, self._describe_loss)
            for number, shard_range in enumerate(ranges)
        ]
        self._threads = ThreadPoolExecutor(max(1, len(ranges) - 1), "servers")
        self.weights = weights
        """The weights that were pulled, as a flat vector."""
        self.gradient = torch.zeros_like(weights)
        """The gradient that the next push brings: flat, filled by the caller."""
        self.buffers = torch.zeros(extent.buffers, dtype=torch.float64)
        self.change = torch.zeros_like(self.buffers)
        """The change of each buffer that the next push brings: flat, filled by the caller."""
        self.pulled: Sequence[int] = [0] * extent.shards
        """The version of each shard in ``weights``."""
        self.queue: NetworkStore = self
        """The queue: what is written down of each batch goes to the servers with the push that it is in."""
        self._waited = 0.0
        self._saved: int | None = None
        """The number of updates behind the state that was read, or put in, last; None: neither was done here."""
        self._number = 0
        self._entries: list[tuple[int, Sequence[int] | None]] = []

    @property
    def waited(self) -> float:
        """The seconds spent waiting for the queue and for servers that were lost."""
        return self._waited

    @property
    def done(self) -> int:
        """The number of batches in the weights, as the servers have said last."""
        return max(session.done for session in self._sessions)

    def _describe_loss(self) -> str:
        if self._saved is None:
            return "the updates since the last checkpoint are lost"
        return f"{self.done - self._saved} updates are lost, those after update {self._saved}, whose state was the last"

    @property
    def nbytes(self) -> int:
        """The bytes of weights and of what is pushed of them, in this process."""
        return self.weights.nbytes + self.gradient.nbytes + self.buffers.nbytes

    def join(self) -> None:
        """Begin as this worker: whatever another process of it had begun is ended before this returns. Where this one
        is given up meanwhile, or a server is lost, it begins again. Raises PeerLost where that takes too long."""
        end = time.monotonic() + BEGIN_SECONDS
        while not self._try_to_join():
            if time.monotonic() > end:
                raise PeerLost(f"worker {self.worker} could not begin within {BEGIN_SECONDS:.0f} s: servers are lost")

    def _try_to_join(self) -> bool:
        """Try to begin as this worker, and return whether all servers agree on how far it is."""
        first, *others = self._sessions
        for session in self._sessions:
            session.disconnect()
        self._entries.clear()
        try:
            first.connect(0)
            self._number = first.applied
            for other in others:
                other.connect(first.incarnation)
        except IncarnationOver:
            return False
        # The ranges may differ while the first of them still resolves what the process before had begun.
        return all(other.applied == self._number for other in others)

    def restart(self) -> None:
        """Begin to count pushes anew, after the servers were given other contents."""
        self._number = 0
        self._entries.clear()
        for session in self._sessions:
            session.applied = session.staged = 0

    # The queue

    def take_batch(self, total: int, *, waits: bool, most: int | None) -> int | None:
        """Take the next batch; None: there is none. ``waits``: where others have batches that may come back; ``most``:
        by how many pushes this worker may be ahead of the slowest."""
        began = time.perf_counter()
        batch = self._sessions[0].take_batch(total, waits=waits, most=-1 if most is None else most)
        self._waited += time.perf_counter() - began
        if batch is not None:
            self._entries.append((batch, None))
        return batch

    def record_taken(self, batch: int) -> None:
        """Note a batch that follows from the round, without asking the server."""
        self._entries.append((batch, None))

    def record_versions(self, pulled: Sequence[int] | None) -> None:
        """Write down the versions that the gradient of the batch taken last is computed on; None: on the weights that
        the batch before it left."""
        self._entries[-1] = self._entries[-1][0], None if pulled is None else list(pulled)

    def wake_all(self) -> None:
        """Do nothing: the server of the queue wakes who waits for it."""

    def stop_taking(self, *, stops: bool) -> None:
        """Take no more batches for now; ``stops``: no worker is given any."""
        self._sessions[0].stop_taking(stops=stops)

    # Pushes and pulls

    def pull(self) -> None:
        """Fetch the last version of every shard into ``weights``, and of the buffers into ``buffers``."""
        into = self.weights, self.buffers
        self.pulled = torch.cat(self._each(lambda session: session.pull(into))).tolist()

    def push(self, hyper: Sequence[Sequence[float]], *, used: Sequence[bool] | None = None, pull: bool = True) -> float:
        """Bring ``gradient`` and ``change`` to every range, and have all of them apply it; as ``Store.push``. Returns
        the staleness: pushes of others to a shard since it was pulled, the mean over the shards."""
        staged = [self._staged(session.range, hyper, used) for session in self._sessions]
        into = (self.weights, self.buffers) if pull else None
        # Every range has the whole push before any applies it. If this worker or a server dies in between, the push can
        # still be completed everywhere, or dropped everywhere.
        self._each(lambda session: session.stage(staged[session.number]))
        found = self._each(lambda session: session.apply(staged[session.number], into))
        self._number += 1
        # The entries are forgotten only after every range has applied the push: a session that connects again in the
        # middle sends the same push, with the same number, and a range that has it does not apply it twice.
        self._entries.clear()
        sizes = [session.range.last - session.range.first for session in self._sessions]
        made = sum(count * size for (count, _), size in zip(found, sizes, strict=True))
        stale = made - sum(self.pulled) - self.extent.shards
        if pull:
            self.pulled = torch.cat([versions for _, versions in found if versions is not None]).tolist()
        return stale / self.extent.shards

    def _staged(
        self, shard_range: Range, hyper: Sequence[Sequence[float]], used: Sequence[bool] | None
    ) -> StagedGradient:
        """Return what a range gets of the push."""
        number = self._number + 1
        staged = StagedGradient.allocate(
            self.extent, shard_range, number, len(self._entries), shard_range.part_of(self.gradient)
        )
        for row, (batch, pulled) in zip(staged.entries, self._entries, strict=True):
            row[TICKET], row[PUSH] = batch, number
            row[VERSIONS:] = torch.tensor(pulled[shard_range.first : shard_range.last]) if pulled is not None else -1
        staged.hyper.copy_(torch.tensor(hyper, dtype=torch.float64).view_as(staged.hyper))
        staged.used.copy_(torch.tensor(used)) if used is not None else staged.used.fill_(1)
        if shard_range.buffers:
            staged.change.copy_(self.change)
        return staged

    def _each(self, ask: Callable[[RangeSession], _Found]) -> list[_Found]:
        """Ask all servers at once, each in a thread. Where one raises, all have come to an end."""
        *others, own = self._sessions
        asked = [self._threads.submit(ask, session) for session in others]
        raised: list[BaseException] = []
        try:
            last = ask(own)
        except (PeerLost, IncarnationOver) as error:
            raised.append(error)
        raised += [found for found in (future.exception() for future in asked) if found is not None]
        if raised:
            raise next((error for error in raised if isinstance(error, IncarnationOver)), raised[0])
        return [*(future.result() for future in asked), last]

    # The whole

    def snapshot(self) -> Collected:
        """Read the store as it is at one moment: every batch is in the weights whole, or listed as unpushed."""
        found = self._at_once(lambda: collect(self.extent, self._fetch(StoreMessage.READ)))
        self._saved = found.done
        return found

    def log(self) -> PushLog:
        """Read the log of all pushes. ValueError where its beginning was overwritten."""
        return self._at_once(lambda: self._join_logs(self._fetch(StoreMessage.LOG)))

    def _fetch(self, kind: int) -> list[dict[str, Tensor]]:
        layout, spec = self.extent.layout, self.extent
        most = (layout.total + 64) * layout.dtype.itemsize * (2 + len(layout.rule.slots))
        most += 8 * (8 + VERSIONS + spec.shards) * (spec.capacity * spec.workers + 4 * spec.batches + 64) + (64 << 20)
        return [unpacked(session.fetch(kind, most)) for session in self._sessions]

    def _at_once(self, read: Callable[[], _Found]) -> _Found:
        """Read while nothing changes, and every push that some range has is in all of them."""
        for left in range(TRIES, 0, -1):
            try:
                applied = [session.freeze(self.extent.workers) for session in self._sessions]
                newest = [max(numbers) for numbers in zip(*applied, strict=True)]
                for session, found in zip(self._sessions, applied, strict=True):
                    for worker, number in enumerate(newest):
                        if found[worker] < number:
                            session.ask(StoreMessage.CATCH_UP, worker, number)
                found_all = read()
                for session in self._sessions:
                    session.ask(StoreMessage.THAW)
                return found_all
            except PeerLost:
                for session in self._sessions:  # what is cut off changes again
                    session.disconnect()
                if left == 1:
                    raise
        raise AssertionError("the last try has returned or raised")

    def _join_logs(self, parts: Sequence[dict[str, Tensor]]) -> PushLog:
        if any("log" not in part for part in parts):
            raise ValueError(f"the log has room for {self.extent.capacity} pushes of a worker, and there were more")
        entries: list[list[Tensor]] = [[] for _ in range(self.extent.workers)]
        made: list[list[Tensor]] = [[] for _ in range(self.extent.workers)]
        ranges = [self._rows(part) for part in parts]
        for key in sorted(ranges[0]):
            rows = [pushes[key] for pushes in ranges]
            first = rows[0][1]
            entries[key[0]].append(torch.cat([first[:, :VERSIONS], *(batches[:, VERSIONS:] for _, batches in rows)], 1))
            made[key[0]].append(
                torch.cat([torch.full((batches.shape[1] - VERSIONS,), version) for version, batches in rows])
            )
        width = self.extent.shards
        return PushLog(
            state_json_of(parts[0])["base"],
            tuple(torch.cat([torch.zeros(0, VERSIONS + width, dtype=torch.int64), *each]).numpy() for each in entries),
            tuple(
                torch.stack(each).numpy() if each else torch.zeros(0, width, dtype=torch.int64).numpy() for each in made
            ),
        )

    @staticmethod
    def _rows(part: dict[str, Tensor]) -> dict[tuple[int, int], tuple[int, Tensor]]:
        """Return what the log of a range has of each push, by worker and number: the version made, and the batches."""
        log = part["log"].tolist()
        entries = part["entries"].split([row[3] for row in log]) if log else ()
        return {
            (worker, number): (made, batches) for (worker, number, made, _), batches in zip(log, entries, strict=True)
        }

    def put(self, contents: Contents, *, done: int, unpushed: Sequence[int] = ()) -> None:
        """Have all servers begin with these contents, while no worker pushes."""
        found = {f"data/{at}": flat for at, flat in enumerate(contents.data)}
        counts = [torch.from_numpy(each.astype("float64")) for each in contents.counts]
        found["counts"] = torch.cat(counts) if counts else torch.zeros(0, dtype=torch.float64)
        found["touched"] = torch.from_numpy(contents.touched.astype("uint8"))
        found["buffers"] = contents.buffers
        message = json.dumps({"unpushed": list(unpushed)}).encode()
        found["json"] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        blob = packed(found)
        for session in self._sessions:
            session.put(blob, done)
        self._saved = done

    def close(self) -> None:
        """End the conversations: this worker takes no part any more."""
        for session in self._sessions:
            session.close(says_bye=True)
        self._threads.shutdown()
        self._views.close()
