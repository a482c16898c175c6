"""The parameter store: no update is lost, none is half applied, none counts twice, whoever dies and wherever."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

from apportion.comm.world import World
from apportion.errors import MembershipChanged
from apportion.parallel.parameter_store.memory.shard_layout import StoreLayout
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions, StoreSpec
from apportion.parallel.parameter_store.protocol import Sessions, StoreServer
from apportion.parallel.parameter_store.store import Contents, Store
from apportion.process import die_with_parent

pytestmark = pytest.mark.processes

FOLDERS = ("parameter_store", "process_lock")
"""Parts of the paths of the files whose lines count."""
SHARDS, WIDTH = 4, 64


class Shared:
    """A store in memory that forked processes share, and what has to be in it."""

    def __init__(self, *, workers: int = 2, momentum: float = 0.0, width: int = WIDTH, log: int = 4096) -> None:
        model = nn.Linear(width, SHARDS, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
        self.layout = StoreLayout({p: n for n, p in model.named_parameters()}, optimizer, shards=SHARDS)
        self.extent = StoreSpec(layout=self.layout, workers=workers, buffers=1, batches=log)
        self._bytes = mmap.mmap(-1, StoreRegions(self.extent).nbytes)
        self.hyper = [self.layout.rule.hyper_of(g) for g in optimizer.param_groups]
        self.expected = [torch.zeros(self.layout.total, dtype=torch.float64) for _ in range(1 + bool(momentum))]
        self.store = self.worker(0)

    def worker(self, number: int, check: Callable[[], None] = lambda: None) -> Store:
        store = Store(self.extent, memoryview(self._bytes), worker=number, check=check)
        store.settle(lambda: store.put(self._zeros(), done=0), first=number == 0)
        return store

    def _zeros(self) -> Contents:
        flats = [torch.zeros(self.layout.total, dtype=torch.float64) for _ in self.expected]
        counts = [torch.zeros(len(pieces)).double().numpy() for pieces in self.layout.pieces]
        return Contents(flats, counts, torch.zeros(1, dtype=torch.bool).numpy(), torch.zeros(1, dtype=torch.float64))

    def push(self, store: Store, gradient: float) -> None:
        store.gradient.fill_(gradient)
        store.change.fill_(gradient)
        store.push(self.hyper)

    def expect(self, gradient: float) -> None:
        """One push more."""
        flat = torch.full_like(self.expected[0], gradient)
        self.layout.rule.apply(self.expected, self.expected, flat, self.hyper[0], 0)

    def assert_whole(self, pushes: int, change: float) -> None:
        found, m = self.store.read(), self.store.memory
        assert [v.value for v in m.shards.versions] == [pushes] * self.extent.shards
        for flat, expected in zip(found.data, self.expected, strict=True):
            assert torch.equal(flat, expected)
        assert found.buffers.item() == change


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
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    """Its exit status; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def signal_at(line: int, number: signal.Signals) -> None:
    """This process gets the signal before it runs so many lines of the store."""
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not any(folder in frame.f_code.co_filename for folder in FOLDERS):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)
        return trace

    sys.settrace(trace)


# Deaths


def die_at_every_line(world: World, momentum: float, meanwhile: bool) -> dict[str, int]:
    """Take a batch and push, and be killed before the first line of the store that this runs, the second, ...; what
    had been begun is ended by another worker, at once, or after a push of its own. After each, everything is whole."""
    shared = Shared(momentum=momentum)
    store, pushes, change, seen = shared.store, 0, 0.0, {"pushed": 0, "undone": 0, "orphans": 0, "open": 0}

    for line in count(1):

        def work(line: int = line) -> None:
            other = shared.worker(1)
            signal_at(line, signal.SIGKILL)
            ticket = other.queue.take_batch(1 << 30)
            assert ticket is not None
            other.queue.record_versions(other.pulled)
            shared.push(other, line)

        status = ended(forked(work))
        m = store.memory
        seen["open"] += m.lines[1].pushing > 0
        half = m.lines[1].pushing > 0 and len({v.value for v in m.shards.versions}) > 1
        if meanwhile:
            store.queue.take_batch(1 << 30)
            store.queue.record_versions(store.pulled)
            shared.push(store, 1000.0)
            shared.expect(1000.0)
            pushes, change = pushes + 1, change + 1000.0
        seen["orphans"] += half
        before = store.pushes
        store.finish(1)
        went_in = m.shards.versions[0].value > pushes
        assert store.pushes - before <= 1
        if went_in:
            shared.expect(line)
            pushes, change = pushes + 1, change + line
        seen["pushed" if went_in else "undone"] += 1
        shared.assert_whole(pushes, change)
        assert store.done == pushes, "each push was of one batch"
        handed_out = m.head.handed_out - len(store.queue.unpushed())
        assert handed_out == pushes, "a batch is in the weights, or will be handed out again"
        assert len(set(store.queue.unpushed())) == len(store.queue.unpushed())
        if status == 0:
            return seen
        assert status == -signal.SIGKILL


@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.thorough
def test_a_worker_may_be_killed_at_any_line_and_its_push_is_whole_or_not_there(meanwhile: bool) -> None:
    (seen,) = on_ranks(die_at_every_line, 1, 0.0 if meanwhile else 0.9, meanwhile)
    assert seen["undone"] > 10
    assert seen["pushed"] > 30
    assert seen["open"] > 20, "deaths in the middle of a push"
    assert seen["orphans"] > 5, "deaths with some of the shards updated"


def die_while_ending(world: World) -> int:
    """A push is cut off, and so is everyone who ends it, one line later each."""
    shared = Shared(momentum=0.9)

    def work() -> None:
        other = shared.worker(1)
        other.queue.take_batch(1 << 30)
        other.queue.take_batch(1 << 30)
        signal_at(60, signal.SIGKILL)
        shared.push(other, 3.0)

    assert ended(forked(work)) == -signal.SIGKILL
    assert shared.store.memory.lines[1].pushing > 0

    def end(line: int) -> Callable[[], None]:
        def work() -> None:
            ender = shared.worker(0)
            signal_at(line, signal.SIGKILL)
            ender.finish(1)

        return work

    tries = next(line for line in count(1) if ended(forked(end(line))) == 0)
    shared.expect(3.0)
    shared.assert_whole(1, 3.0)
    assert shared.store.done == 2
    assert shared.store.queue.unpushed() == []
    return tries


@pytest.mark.thorough
def test_who_ends_a_push_of_the_dead_may_die_too() -> None:
    assert on_ranks(die_while_ending, 1)[0] > 20


def give_back_and_die(world: World) -> int:
    """A batch of the dead comes back once, also where who gives it back dies, and another takes it at once."""
    shared = Shared(workers=3)
    pushed: list[int] = []
    for line in count(1):

        def take() -> None:
            shared.worker(1).queue.take_batch(1 << 30)

        def end(line: int = line) -> None:
            ender = shared.worker(0)
            signal_at(line, signal.SIGKILL)
            ender.finish(1)

        assert ended(forked(take)) == 0
        status = ended(forked(end))
        third = shared.worker(2)
        ticket = third.queue.take_batch(1 << 30)
        assert ticket is not None
        third.queue.record_versions(third.pulled)
        shared.push(third, 1.0)
        pushed.append(ticket)
        shared.store.finish(1)
        if status == 0:
            break
    while back := shared.store.queue.unpushed():
        third.queue.take_batch(1 << 30)
        shared.push(third, 1.0)
        pushed += [t for t in back if t not in shared.store.queue.unpushed()]
    assert sorted(pushed) == list(range(len(pushed)))
    return len(pushed)


def stand_while_pushing(world: World, rounds: int) -> int:
    """What a checkpoint says of the queue, while another worker takes and pushes: every batch that is said to be in the
    weights is, and no other."""
    shared = Shared()

    def work() -> None:
        other = shared.worker(1)
        for _ in range(rounds):
            other.queue.take_batch(1 << 30)
            other.queue.record_versions(other.pulled)
            shared.push(other, 1.0)

    pid, seen = forked(work), 0
    deadline = time.monotonic() + 50
    while shared.store.pushes < rounds and time.monotonic() < deadline:
        found = shared.store.snapshot(lambda: None, 10.0)
        done = found.done
        assert found.unpushed in ([], [done]), "one worker: what it has taken is the next"
        assert bool((found.contents.data[0] == -float(done)).all()), "a batch is in all weights or in none"
        assert found.contents.buffers.item() == done
        seen += 0 < done < rounds
    assert ended(pid) == 0
    return seen


def test_a_checkpoint_neither_loses_a_batch_nor_has_it_twice() -> None:
    assert on_ranks(stand_while_pushing, 1, 3000)[0] > 10


@pytest.mark.thorough
def test_no_batch_comes_back_twice() -> None:
    assert on_ranks(give_back_and_die, 1)[0] > 10


# Stopped workers


def stop_a_holder(world: World) -> tuple[str, bool]:
    """A worker is stopped with a lock in its hands: whoever waits hears what the supervisor says, and goes on when the
    worker is ended."""
    shared = Shared()
    lines = _lines_of_a_push()

    def holds(pid: int) -> bool:
        os.waitpid(pid, os.WUNTRACED)
        return any(lock.attempt() or lock.release() for lock in shared.store.memory.locks)

    def work(line: int) -> Callable[[], None]:
        def push() -> None:
            other = shared.worker(1)
            signal_at(line, signal.SIGSTOP)
            shared.push(other, 2.0)

        return push

    for line in range(lines // 2, lines):
        pid = forked(work(line))
        if holds(pid):
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shared.store.finish(1)
    else:
        raise AssertionError("no line holds a lock")

    def check() -> None:
        raise MembershipChanged("a worker is stopped")

    waiting = shared.worker(0, check)
    waiting._check = check
    before = waiting.memory.shards.versions[0].value
    try:
        shared.push(waiting, 1.0)
        heard = "nothing"
    except MembershipChanged as error:
        heard = str(error)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    shared.store.finish_push(0)  # waits until the holder is dead
    os.waitpid(pid, 0)
    shared.store.finish(1)
    versions = {v.value for v in shared.store.memory.shards.versions}
    return heard, versions == {before + 2} or len(versions) == 1


def _lines_of_a_push() -> int:
    shared, seen = Shared(), 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        seen += event == "line" and any(folder in frame.f_code.co_filename for folder in FOLDERS)
        return trace

    sys.settrace(trace)
    shared.push(shared.store, 1.0)
    sys.settrace(None)
    return seen


def test_a_stopped_holder_of_a_lock_keeps_others_waiting_only_until_it_is_ended() -> None:
    heard, whole = on_ranks(stop_a_holder, 1)[0]
    assert heard == "a worker is stopped"
    assert whole


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.float32, torch.float64, "0.weight is torch.float32, 1.weight is torch.float64: use one type"),
        (torch.float16, torch.float16, "float32 or float64, and 0.weight is torch.float16"),
    ],
)
def test_weights_of_a_type_that_a_store_does_not_hold_are_refused_by_name(
    first: torch.dtype, second: torch.dtype, message: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 2, dtype=first), nn.Linear(2, 1, dtype=second))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        StoreLayout({p: name for name, p in model.named_parameters()}, optimizer)


# Servers


def push_to_a_server(world: World, momentum: float) -> list[float]:
    """Rank 0 is the worker, rank 1 the server: the largest difference from the same pushes without one, of what each
    push has pulled, of a pull, and of the whole."""
    model = nn.Linear(5000, 60, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    layout = StoreLayout({p: n for n, p in model.named_parameters()}, optimizer)
    extent = StoreSpec(layout=layout, workers=2, buffers=3, batches=8, servers=1)
    store = Store(extent, world.shared("store", StoreRegions(extent).nbytes), worker=world.rank)
    slots = len(layout.rule.slots)
    expected = [torch.zeros(layout.total, dtype=torch.float64) for _ in range(1 + slots)]
    counts = [torch.zeros(len(pieces)).double().numpy() for pieces in layout.pieces]
    start = Contents(expected, counts, torch.ones(1).bool().numpy(), torch.zeros(3, dtype=torch.float64))
    store.settle(lambda: store.put(start, done=0), first=world.rank == 0)
    if world.rank == 1:

        def of_worker(worker: int) -> Store:
            found = Store(extent, world.shared("store", StoreRegions(extent).nbytes), worker=worker, server=0)
            found.settle(lambda: None, first=False)
            return found

        server = StoreServer(extent, 0, of_worker)
        store.memory.servers[0].place, store.memory.servers[0].pid = server.place, os.getpid()
        world.group().barrier()
        server.close()
        return []
    store.servers = Sessions(store, world, [1])
    hyper, worst = [layout.rule.hyper_of(g) for g in optimizer.param_groups], []
    for number in range(3):
        store.gradient.copy_(torch.randn(layout.total, generator=torch.Generator().manual_seed(number)))
        store.change.fill_(number)
        before = [t.clone() for t in expected]
        layout.rule.apply(expected, before, store.gradient, hyper[0], 0)
        assert store.push(hyper) == 0.0, "staleness"
        worst.append(float((store.weights - expected[0]).abs().max()))
    store.weights.zero_()
    store.pull()
    worst.append(float((store.weights - expected[0]).abs().max()))
    worst += [float((a - b).abs().max()) for a, b in zip(store.read().data, expected, strict=True)]
    assert store.buffers.tolist() == [3.0] * 3
    assert list(store.pulled) == [3] * extent.shards
    store.servers.close()
    world.group().barrier()
    return worst


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_server_does_what_a_worker_would_do_itself(momentum: float) -> None:
    worst = on_ranks(push_to_a_server, 2, momentum)[0]
    assert len(worst) == 5 + (momentum > 0)
    assert max(worst) == 0.0


# Many


def push_often(world: World, workers: int, each: int) -> tuple[list[int], Tensor, list[list[int]]]:
    shared = Shared(workers=workers, log=each)

    def work(worker: int) -> None:
        store = shared.worker(worker)
        store.gradient.fill_(1.0)
        store.change.fill_(1.0)
        for _ in range(each):
            store.push(shared.hyper)

    pids = [forked(lambda worker=worker: work(worker)) for worker in range(workers)]  # type: ignore[misc]
    assert [ended(pid) for pid in pids] == [0] * workers
    m = shared.store.memory
    made = [sorted(m.log.made_rows[:, 1 : each + 1, s].flatten().tolist()) for s in range(shared.extent.shards)]
    return [v.value for v in m.shards.versions], shared.store.read().data[0], made


def assert_nothing_lost(workers: int, each: int) -> None:
    versions, weights, made = on_ranks(push_often, 1, workers, each)[0]
    assert versions == [workers * each] * len(versions)
    assert torch.equal(weights, torch.full_like(weights, -float(workers * each)))
    assert all(numbers == list(range(1, workers * each + 1)) for numbers in made), "a version each, and no other"


@pytest.mark.thorough
def test_no_update_is_lost_in_20_000_pushes_by_4_workers() -> None:
    assert_nothing_lost(4, 5_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_update_is_lost_in_1_000_000_pushes_by_4_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.SECONDS", 800.0)
    assert_nothing_lost(4, 250_000)


def pull_while_pushed(world: World, rounds: int) -> int:
    """Pulls of a store that another worker pushes to: each shard is of one version, the one that is told."""
    shared = Shared(width=16384)

    def work() -> None:
        other = shared.worker(1)
        other.gradient.fill_(1.0)
        other.change.fill_(1.0)
        for _ in range(rounds):
            other.push(shared.hyper)

    pid, moved, bounds = forked(work), 0, shared.layout.bounds
    deadline = time.monotonic() + 50
    while shared.store.pushes < rounds and time.monotonic() < deadline:
        shared.store.pull()
        moved += len(set(shared.store.pulled)) > 1
        for shard, version in enumerate(shared.store.pulled[:-1]):
            part = shared.store.weights[bounds[shard] : bounds[shard + 1]]
            assert bool((part == -float(version)).all()), "half of one push, or another version than it says"
    assert ended(pid) == 0
    return moved


def test_a_pull_never_sees_half_an_update() -> None:
    on_ranks(pull_while_pushed, 1, 3000)
