"""The parts of a world, on one host and over torch.distributed, and after deaths: real processes."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import apart, on_ranks
from slots import Kill, kills, on_slots

from apportion.comm.world import World
from apportion.errors import MembershipChanged

pytestmark = pytest.mark.processes


def in_parts(world: World) -> list[Any]:
    """A mesh of 2 x 2, a part of a part, and the whole."""
    across = world.split("tensor", [[0, 1], [2, 3]])
    along = world.split("pipe", [[2, 0], [1, 3]])  # 2 comes first
    found: list[Any] = []
    for part in (across, along, along.split("one", [[0], [1]])):
        total = torch.tensor([10.0**world.rank])
        part.group().all_reduce(total).wait()
        found.append((part.rank, part.size, total.item()))
    assert world.group("tensor") is across.group()
    assert world.split("tensor", [[0, 1], [2, 3]]) is across
    total = torch.tensor([10.0**world.rank])
    world.group().all_reduce(total).wait()
    along.group().send(total * along.rank, 1 - along.rank).wait()
    along.group().receive(total, 1 - along.rank).wait()
    return [*found, total.item()]


def test_parts_of_a_world_have_ranks_and_collectives_of_their_own() -> None:
    assert on_ranks(in_parts, 4) == [
        [(0, 2, 11.0), (1, 2, 101.0), (0, 1, 1.0), 0.0],
        [(1, 2, 11.0), (0, 2, 1010.0), (0, 1, 10.0), 1111.0],
        [(0, 2, 1100.0), (0, 2, 101.0), (0, 1, 100.0), 1111.0],
        [(1, 2, 1100.0), (1, 2, 1010.0), (0, 1, 1000.0), 0.0],
    ]


def unsupervised(world: World, over: str, function: Any, *arguments: Any) -> Any:
    """The function where nobody hands out memory. ``over``: the class of a group between hosts; none: the ranks may
    find some memory of their own."""
    own = apart(over=over) if over else World.from_env(device="cpu")
    found = function(own, *arguments)
    own.close()
    assert not dist.is_initialized()
    return found


@pytest.mark.parametrize("over", ["", "NetworkGroup", "ProcessGroup"])
def test_parts_of_a_world_are_the_same_where_nobody_hands_out_memory(over: str) -> None:
    assert on_ranks(unsupervised, 4, over, in_parts) == on_ranks(in_parts, 4)


def remembered(world: World, progress: Any) -> list[int]:
    """Parts of each generation find the memory of those before; no other part's."""
    while True:
        try:
            part = world.split("part", [[0, 2], [1, 3]])
            memory = np.frombuffer(part.shared("kept", 64), dtype=np.int64)
            if world.generation == 0:
                memory[part.rank] = 10 + world.rank
                part.group().barrier()
                progress[world.slot] = 1
                world.group().barrier()
                if world.slot == 3:
                    signal.pause()  # until it is killed
                world.group().barrier()
            part.group().barrier()
            return [*memory[:2].tolist(), world.generation]
        except MembershipChanged:
            world = world.rejoin()


def test_the_memory_of_a_part_is_its_own_and_outlives_its_ranks() -> None:
    outcome = on_slots(remembered, 4, killed=[Kill(1, 0.05, 3)])
    assert outcome.results == [[10, 12, 2], [11, 13, 2]] * 2


def split_wrongly(world: World) -> list[str]:
    told = []
    for axis, ranks in (("world", [[0, 1]]), ("a/b", [[0, 1]]), ("pipe", [[0], [0, 1]]), ("pipe", [[0]])):
        with pytest.raises(ValueError, match="must") as raised:
            world.split(axis, ranks)
        told.append(str(raised.value))
    with pytest.raises(ValueError, match="axis='pipe' is unknown: this world has 'world'; split"):
        world.group("pipe")
    part = world.split("pipe", [[0], [1]])
    with pytest.raises(ValueError, match="needs a supervisor"):
        part.rejoin()
    assert (part.rank, part.size, part.slot, part.slots) == (0, 1, 0, 1)
    assert part.has_cores() == world.has_cores(), "all of the host's processes compute"
    return told


def test_a_wrong_split_is_refused_and_says_what_is_right() -> None:
    assert on_ranks(split_wrongly, 2)[0][2:] == [
        "ranks=[[0], [0, 1]] must hold each of 2 ranks once",
        "ranks=[[0]] must hold each of 2 ranks once",
    ]


def count_waits(world: World) -> tuple[bool, int]:
    """Whoever watches this process sees when it sleeps in a part's group too."""
    word = np.zeros(1, dtype=np.int64)
    world.group().waiting = word
    part = world.split("part", [[0, 1]])
    before = part.group().waited
    if world.rank == 1:
        time.sleep(0.2)
        part.group().barrier()
        return True, 0
    watched: list[int] = []
    thread = threading.Timer(0.1, lambda: watched.append(int(word[0])))
    thread.start()
    part.group().barrier()
    thread.join()
    return world.group().waited - before > 0.1, watched[0] - int(word[0])


def test_the_waits_of_a_part_are_waits_of_the_process() -> None:
    assert on_ranks(count_waits, 2)[0] == (True, 1)


# Workers that are killed and replaced


def rounds(world: World, progress: Any, many: int) -> int:
    """Each round, messages go round a ring, and two parts sum what they have. Survivors and replacements agree on the
    round by what the supervisor's memory says."""
    while True:
        try:
            return _rounds(world, progress, many)
        except MembershipChanged:
            while True:
                try:
                    world = world.rejoin()
                    break
                except MembershipChanged:
                    pass


def _rounds(world: World, progress: Any, many: int) -> int:
    size = world.size
    part = world.split("part", [list(range(0, size, 2)), list(range(1, size, 2))])
    done = torch.tensor([int(progress[world.slot])])
    first = int(world.group().all_gather(done).min())
    large = torch.empty(300_000)
    for number in range(first, many):
        world.check()
        large.fill_(number * 10 + world.rank)
        work = world.group().send(large, (world.rank + 1) % size)
        came = torch.empty_like(large)
        world.group().receive(came, (world.rank - 1) % size).wait()
        work.wait()
        assert came.eq(number * 10 + (world.rank - 1) % size).all(), "a message of another round or generation"
        total = torch.tensor([float(number)])
        part.group().all_reduce(total).wait()
        assert total.item() == number * part.size, "a sum of another round or generation"
        if part.size > 1:
            part.group().send(total, 1 - part.rank)
            part.group().receive(total, 1 - part.rank).wait()
        world.group().barrier()
        progress[world.slot] = number + 1
    world.group().barrier()
    return many


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.thorough
def test_after_a_kill_messages_and_parts_go_on_among_those_who_are_there(replaced: bool) -> None:
    many = kills(12, 400, 4, seed=3) if replaced else [Kill(40, 0.001, 2)]
    outcome = on_slots(rounds, 4, 400, killed=many, replaced=replaced)
    assert outcome.kills == len(many)
    assert outcome.changes >= (5 if replaced else 1)


def along_two_axes(world: World) -> list[int]:
    parts = [world.split(axis, [[0, 1]]) for axis in ("tensor", "pipe")]
    memories = [np.frombuffer(part.shared("kept", 64), dtype=np.int64) for part in (*parts, world)]
    for number, memory in enumerate(memories):
        memory[world.rank] = number + 1
    for part in parts:
        part.group().barrier()
    return [int(memory[1 - world.rank]) for memory in memories]


def test_the_same_ranks_along_two_axes_are_two_parts() -> None:
    assert on_ranks(along_two_axes, 2) == [[1, 2, 3]] * 2


def exchanged(world: World, device: str) -> list[list[float]]:
    """What two ranks on one device have after messages to each other, of 3 numbers and of more than are buffered, and
    after each collective."""
    from apportion.comm import process_group

    where, other = torch.device(device), 1 - world.rank
    if device == "cpu":  # as if it were the memory of a GPU
        process_group._is_on_gpu = lambda tensor: True
    group = process_group.ProcessGroup.connect(rank=world.rank, size=2, device=where, local_size=2)
    found = []
    for numbers in (3, process_group.BUFFERED_BYTES // 4):
        sent = torch.arange(float(numbers), device=where) + 10 * world.rank
        into = torch.zeros(numbers, device=where)
        sending = group.send(sent, other)
        group.receive(into, other).wait()
        sending.wait()
        assert torch.equal(into, torch.arange(float(numbers), device=where) + 10 * other)
        found.append(into[:3].tolist())
    own = torch.tensor([1.0, 2.0], device=where) + world.rank
    rows, part, total = torch.zeros(2, 2, device=where), torch.zeros(1, device=where), own.clone()
    group.gather_into(rows, own)
    group.reduce_scatter(own.view(2, 1), part)
    group.all_reduce(total).wait()
    group.broadcast(own, source=1)
    group.barrier()
    found += [rows.flatten().tolist(), part.tolist(), total.tolist(), own.tolist()]
    group.close()
    return found


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=GPU)])
@pytest.mark.thorough
def test_ranks_that_share_a_gpu_exchange_by_way_of_the_host(device: str) -> None:
    first, second = on_ranks(exchanged, 2, device)
    assert first == [[10.0, 11.0, 12.0]] * 2 + [[1.0, 2.0, 2.0, 3.0], [3.0], [3.0, 5.0], [2.0, 3.0]]
    assert second == [[0.0, 1.0, 2.0]] * 2 + [[1.0, 2.0, 2.0, 3.0], [5.0], [3.0, 5.0], [2.0, 3.0]]
