"""Servers on other hosts: no push is lost or counts twice, whichever process dies, and whoever takes its place."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from apportion.comm.group import WaitClock
from apportion.comm.network.address import Address
from apportion.comm.network.rank_listener import RankListener
from apportion.comm.network.rendezvous import RankDoors
from apportion.errors import PeerLost
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout
from apportion.parallel.parameter_store.memory.store_spec import StoreSpec
from apportion.parallel.parameter_store.network.messages import StoreMessage
from apportion.parallel.parameter_store.network.network_step import (
    NetworkDownpourStep,
    NetworkPlaces,
    build_servers,
    serve,
    server_ranks,
)
from apportion.parallel.parameter_store.network.network_store import NetworkStore
from apportion.parallel.parameter_store.network.range_session import IncarnationOver
from apportion.parallel.parameter_store.network.range_state import NO_TICKET, QueueState
from apportion.parallel.parameter_store.network.shard_link import ShardLink
from apportion.parallel.parameter_store.network.shard_servers import copy_ranks
from apportion.parallel.parameter_store.network.views import Arbiter, RangeView, ViewSource
from apportion.parallel.parameter_store.store import Contents
from apportion.process import die_with_parent

SHARDS, WIDTH, SECRET = 4, 64, b"of these tests alone"


def forked(work: Callable[[], None]) -> int:
    """A process that does this and ends; its number."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class Ranks:
    """Processes with fixed places, so that one that is killed can be started again: workers first, then servers."""

    def __init__(self, workers: int, servers: int, total: int) -> None:
        model = nn.Linear(WIDTH, SHARDS, bias=False, dtype=torch.float64)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.layout = StoreLayout({p: n for n, p in model.named_parameters()}, self.optimizer, shards=SHARDS)
        ranks = range(workers + servers)
        self.spec = StoreSpec(layout=self.layout, workers=workers, buffers=1, batches=total, servers=servers)
        self.places = NetworkPlaces.choose([*ranks], servers=servers, copies=1)
        self.total = total
        name = secrets.token_hex(8)
        self._addresses = {rank: Address(f"{name}-{rank}", 0) for rank in ranks}
        self._pids: dict[int, int] = {}
        self.kills = 0
        asked, orders = os.pipe()
        answers, told = os.pipe()
        self._starter = forked(lambda: self._fork(asked, told))
        os.close(asked)
        os.close(told)
        self._orders, self._answers = open(orders, "w", 1), open(answers)  # noqa: SIM115 (closed by stop)

    def doors(self, rank: int) -> RankDoors:
        return RankDoors(rank, RankListener(self._addresses[rank], SECRET), self._addresses, SECRET, "store")

    def store(self, rank: int) -> NetworkStore:
        doors = self.doors(rank)
        self.arbiter = Arbiter(doors, self.places.servers) if rank == 0 else None
        views = ViewSource(doors, self.arbiter)
        worker = self.places.workers.index(rank)
        return NetworkStore(self.spec, torch.zeros(self.layout.total, dtype=torch.float64), doors, views, worker)

    def start(self, rank: int) -> None:
        self._pids[rank] = self._ask("start", rank)

    def kill(self, rank: int) -> None:
        """Kill a process, and start another in its place."""
        os.kill(self._pids[rank], signal.SIGKILL)
        assert self._ask("wait", self._pids[rank]) == -signal.SIGKILL
        self.kills += 1
        self.start(rank)

    def _ask(self, *words: object) -> int:
        self._orders.write(f"{' '.join(map(str, words))}\n")
        return int(self._answers.readline())

    def _fork(self, orders: int, answers: int) -> None:
        """Of a process without threads, which starts the others for those that have some."""
        with open(orders) as asked, open(answers, "w", 1) as told:
            for line in asked:
                word, number = line.split()
                if word == "wait":
                    told.write(f"{os.waitstatus_to_exitcode(os.waitpid(int(number), 0)[1])}\n")
                    continue
                run = self._serve if int(number) in self.places.servers else self._work
                told.write(f"{forked(lambda run=run, number=number: run(int(number)))}\n")

    def all_copied(self) -> bool:
        """Whether every range has a copy: no server may be lost before."""
        assert self.arbiter is not None
        views = [self.arbiter.answer(StoreMessage.ASK, (number, 0, 0, 0)) for number in range(self.spec.servers)]
        return all(view.copy >= 0 for view in views)

    def end(self) -> None:
        """Wait until all of them have ended as they should."""
        for rank, pid in self._pids.items():
            assert self._ask("wait", pid) == 0, rank

    def stop(self) -> None:
        """End the process that starts them, and with it all of them."""
        self._orders.close()
        self._answers.close()
        os.kill(self._starter, signal.SIGKILL)
        os.waitpid(self._starter, 0)

    def zeros(self) -> Contents:
        counts = [torch.zeros(len(pieces)).double().numpy() for pieces in self.layout.pieces]
        touched = torch.zeros(1, dtype=torch.bool).numpy()
        flat = torch.zeros(self.layout.total, dtype=torch.float64)
        return Contents([flat], counts, touched, torch.zeros(1, dtype=torch.float64))

    def _serve(self, rank: int) -> None:
        torch.set_num_threads(1)
        servers = build_servers(self.doors(rank), self.spec, self.places, self.zeros)
        servers.start()
        serve(servers)
        servers.close()

    def _work(self, rank: int) -> None:
        torch.set_num_threads(1)
        store = self.store(rank)
        self.push_all(store)
        store.close()

    def push_all(self, store: NetworkStore, each: Callable[[int], None] = lambda batch: None) -> None:
        """Push 2^-(batch mod 8) for every batch that this worker gets: sums that have no rounding."""
        hyper = [self.layout.rule.hyper_of(group) for group in self.optimizer.param_groups]
        store.join()
        while True:
            try:
                batch = store.take_batch(self.total, waits=True, most=None)
                if batch is None:
                    return
                store.record_versions(store.pulled)
                store.gradient.fill_(-(2.0 ** -(batch % 8)))
                store.change.fill_(1.0)
                store.push(hyper)
                each(batch)
            except IncarnationOver:
                store.join()

    def assert_whole(self, store: NetworkStore) -> None:
        """Each batch is in the log once, and in the weights and the buffers once."""
        found, log = store.snapshot(), store.log()
        pushes = [*log.pushes()]
        assert sorted(batch for pushed in pushes for batch, _ in pushed.batches) == list(range(self.total))
        for shard in range(self.spec.shards):
            assert sorted(pushed.made[shard] for pushed in pushes) == list(range(1, self.total + 1))
        assert found.done == self.total
        assert found.contents.buffers.item() == self.total
        expected = sum(2.0 ** -(batch % 8) for batch in range(self.total))
        assert (found.contents.data[0] == expected).all()
        assert found.queue.unpushed() == []


def killed_at_times(total: int, between: int) -> int:
    """Rank 0 pushes here; after so many of its pushes a worker or a server is killed, and started again. How many were
    killed."""
    ranks = Ranks(3, 2, total)
    doomed = itertools.cycle([1, 3, 2, 4])
    pushed = 0

    def kill(batch: int) -> None:
        nonlocal pushed
        pushed += 1
        if pushed >= between and ranks.all_copied():  # else there is nothing to go on from
            ranks.kill(next(doomed))
            pushed = 0

    try:
        for rank in range(1, 5):
            ranks.start(rank)
        store = ranks.store(0)
        ranks.push_all(store, kill)
        ranks.assert_whole(store)
        store.close()
        ranks.end()
    finally:
        ranks.stop()
    return ranks.kills


@pytest.mark.slow
@pytest.mark.processes
def test_no_push_is_lost_or_counts_twice_where_workers_and_servers_are_killed() -> None:
    assert killed_at_times(1000, 40) >= 4


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_none_of_100_000_pushes_is_lost_or_counts_twice_where_workers_and_servers_are_killed() -> None:
    assert killed_at_times(100_000, 500) >= 20


@pytest.mark.processes
def test_a_batch_whose_answer_was_lost_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was handed out, and the connection, or the server, is gone before the worker knows of it."""
    expect, answers = ShardLink.expect, itertools.count()

    def loses_every_third(link: ShardLink, kind: int, seconds: float) -> Sequence[int]:
        found = expect(link, kind, seconds)
        if kind == StoreMessage.TICKET and next(answers) % 3 == 0:
            raise PeerLost("the connection was lost")
        return found

    ranks = Ranks(1, 2, 12)
    try:
        for rank in (1, 2):
            ranks.start(rank)
        store = ranks.store(0)
        with monkeypatch.context() as broken:
            broken.setattr(ShardLink, "expect", loses_every_third)
            ranks.push_all(store)
        assert next(answers) >= 12 * 3 / 2
        ranks.assert_whole(store)
        store.close()
        ranks.end()
    finally:
        ranks.stop()


@pytest.mark.processes
def test_a_worker_that_has_not_pushed_is_given_another_batch() -> None:
    """Several batches may be pushed together: the one that it has is not taken for one that it has not heard of."""
    ranks = Ranks(1, 2, 12)
    try:
        for rank in (1, 2):
            ranks.start(rank)
        store = ranks.store(0)
        store.join()
        given = []
        for _ in range(3):
            given.append(store.take_batch(ranks.total, waits=True, most=None))
            store.record_versions(store.pulled)
        assert given == [0, 1, 2]
        store.close()
    finally:
        ranks.stop()


def test_servers_are_the_last_ranks_of_the_hosts_in_turn() -> None:
    assert server_ranks([0, 1, 2], 1) == [2]
    assert server_ranks([0, 1, 2], 2) == [1, 2]
    assert server_ranks([0, 0, 1, 1], 1) == [3]
    assert server_ranks([0, 0, 1, 1], 2) == [1, 3]
    assert server_ranks([0, 0, 1, 1], 3) == [1, 2, 3]
    assert server_ranks([0, 1, 1], 2) == [1, 2], "rank 0 always works"
    with pytest.raises(ValueError, match="servers=3 leaves no worker among 3 processes: start more"):
        server_ranks([0, 1, 2], 3)


def test_a_copy_is_on_another_host() -> None:
    assert copy_ranks([1, 3, 5], [0, 0, 1, 1, 2, 2]) == [3, 5, 1]
    assert copy_ranks([1, 2, 3], [0, 1, 1, 2]) == [3, 3, 1]
    with pytest.raises(ValueError, match="all of the 2 servers are on one"):
        copy_ranks([2, 3], [0, 0, 1, 1])


def test_one_alone_answers_for_a_range_whoever_asks_first() -> None:
    both = RangeView(1, 3).added(3, 1, 4)
    assert both == RangeView(2, 3, 4)
    taken = both.taken_over(4, 2)
    assert taken == RangeView(3, 4)
    assert taken.dropped(3, 2) == taken, "who was cut off meanwhile does not go on"
    alone = both.dropped(3, 2)
    assert alone == RangeView(3, 3)
    assert alone.taken_over(4, 2) == alone, "a copy that lacks pushes does not take over"
    assert both.entered(3) == RangeView(3, 4), "the process that had the shards is gone: its copy goes on"
    assert both.entered(4) == RangeView(3, 3)
    assert alone.entered(3).lost
    assert not alone.entered(3).added(3, 4, 4).copy >= 0


def test_a_worker_is_given_again_what_it_has_not_heard_of() -> None:
    queue = QueueState()
    assert queue.unacknowledged(0, NO_TICKET) is None
    queue.hand_out(0, 0)
    queue.hand_out(1, 1)
    assert queue.unacknowledged(0, NO_TICKET) == 0
    assert queue.unacknowledged(0, 0) is None
    queue.hand_out(0, 2)
    assert queue.unacknowledged(0, 0) == 2
    assert queue.unacknowledged(0, 2) is None
    queue.mark_pushed(0, [0, 2])
    assert queue.unacknowledged(0, 2) is None, "it is in the weights"
    assert queue.unacknowledged(1, 1) is None


def test_a_batch_is_handed_out_until_it_is_pushed() -> None:
    queue = QueueState()
    for worker in (0, 1, 0):
        batch = queue.next_batch(4)
        assert batch is not None
        queue.hand_out(worker, batch)
    queue.mark_pushed(0, [0])
    queue.give_back(0)
    assert queue.unpushed() == [1, 2]
    assert queue.next_batch(4) == 2
    queue.hand_out(1, 2)
    assert queue.next_batch(4) == 3
    queue.hand_out(1, 3)
    assert queue.next_batch(4) is None
    assert not queue.is_through(4)
    assert QueueState.from_json(queue.to_json()) == queue
    queue.mark_pushed(1, [1, 2, 3])
    assert queue.is_through(4)


def test_a_worker_that_asks_for_a_batch_is_seen_to_wait() -> None:
    """It may be too far ahead of another, which hangs: nobody would be late if nobody waited."""
    clock, seen = WaitClock(), []
    clock.word = [0]
    step: Any = object.__new__(NetworkDownpourStep)
    step._world = SimpleNamespace(group=lambda: SimpleNamespace(all_waits=clock))
    step.source, step._max_staleness = SimpleNamespace(total=9), 2

    def take_batch(total: int, *, waits: bool, most: int) -> int:
        seen.append((total, waits, most, clock.word[0]))
        return 3

    step.store = SimpleNamespace(take_batch=take_batch)
    assert step._ask_for_batch(waits=True) == 3
    assert seen == [(9, True, 2, 1)]
    assert clock.word == [0]
