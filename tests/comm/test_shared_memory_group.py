"""The collectives of one host, what they wait on, and the memory of ranks that nobody supervises: real processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_calls import Call, calls, digest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor

from apportion.comm import barrier as meeting_file
from apportion.comm.barrier import Barrier
from apportion.comm.group import Group, Work
from apportion.comm.host_memory import host_memory, is_faster
from apportion.comm.membership import Membership
from apportion.comm.process_group import ProcessGroup
from apportion.comm.shared_memory_group import SharedMemoryGroup, nbytes
from apportion.comm.sync import Word, sleep_on
from apportion.comm.world import World
from apportion.errors import MembershipChanged, PeerLost

pytestmark = pytest.mark.processes

# The collectives against a computation by hand


def make_calls(world: World, wanted: list[Call]) -> list[str]:
    group = world.group()
    return [digest(call.on(group)) for call in wanted]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(calls(), min_size=10, max_size=25))
@pytest.mark.thorough
def test_every_collective_gives_the_same_bits_as_by_hand_on_every_rank(size: int, wanted: list[Call]) -> None:
    """One after another, so that each finds the slots as the one before has left them."""
    for rank, found in enumerate(on_ranks(make_calls, size, wanted)):
        expected = [digest(call.by_hand(size, rank)) for call in wanted]
        differing = [call for call, a, b in zip(wanted, found, expected, strict=True) if a != b]
        assert not differing, f"rank {rank}: {differing}"


def of_no_rows(world: World) -> list[Any]:
    group = world.group()
    none = [tuple(part.shape) for shape in ((0, 3), (0,)) for part in group.all_gather_rows(torch.zeros(shape))]
    column = torch.arange(6.0).view(2, 3).t()  # not contiguous
    return [none, tuple(group.all_gather(torch.zeros(2, 0)).shape), group.all_gather(column).tolist()]


def test_gathering_takes_empty_tensors_and_such_that_are_not_contiguous() -> None:
    for none, empty, columns in on_ranks(of_no_rows, 2):
        assert none == [(0, 3), (0, 3), (0,), (0,)]
        assert empty == (2, 2, 0)
        assert columns == [[[0, 3], [1, 4], [2, 5]]] * 2


def not_contiguous(world: World) -> str:
    try:
        world.group().all_reduce(torch.zeros(3, 2).t())
    except RuntimeError as error:
        return str(error)
    return "summed"


def test_summing_what_is_not_contiguous_is_refused_rather_than_lost() -> None:
    for told in on_ranks(not_contiguous, 2):
        assert "view size is not compatible" in told


def gather_many(world: World) -> int:
    group = world.group()
    for rows in range(3000):
        group.all_gather(torch.zeros(rows % 1500, dtype=torch.uint8))
    assert isinstance(group, SharedMemoryGroup)
    return len(group._views)


def test_numbers_of_rows_that_always_differ_fill_no_memory() -> None:
    assert max(on_ranks(gather_many, 2)) <= 1024


# The meeting


def wraps(world: World, start: int) -> list[float]:
    outer, group = world.group(), SharedMemoryGroup(world.shared("other", nbytes(world.size)), world.rank, world.size)
    group.meeting.number = start
    group.meeting._own.value = start
    outer.barrier()
    found = []
    for number in range(40):
        tensor = torch.full((3,), float(world.rank + number))
        group.all_reduce(tensor).wait()
        found.append(tensor.sum().item())
    return [*found, float(group.meeting.number)]


@pytest.mark.parametrize("start", [2**31 - 20, 2**32 - 20])
def test_the_number_of_meetings_may_wrap_around(start: int) -> None:
    for found in on_ranks(wraps, 3, start):
        assert found == [*(3.0 * (3 + 3 * number) for number in range(40)), float((start + 40) % 2**32)]


def nap_and_meet(world: World, meetings: int) -> float:
    """The longest wait. Nobody looks again by itself for seconds: whoever is not woken shows."""
    meeting_file.SLEEP_SECONDS = 5.0
    meeting = Barrier(world.shared("naps", nbytes(world.size)), world.rank, world.size, spins=False)
    naps = random.Random(world.rank)
    for _ in range(meetings):
        for _ in range(naps.choice((0, 0, 0, 10, 100, 1000))):
            pass
        if naps.random() < 0.002:
            time.sleep(naps.random() * 2e-4)
        meeting()
    return max(ended - began for began, ended in meeting.waits)


@pytest.mark.parametrize("meetings", [30_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_no_wake_up_is_lost(meetings: int) -> None:
    assert max(on_ranks(nap_and_meet, 2, meetings)) < 3.0


def wait_long(world: World, seconds: float) -> float:
    """Processor seconds of the wait; 0 of the rank that is waited for."""
    group = world.group()
    group.barrier()
    began = time.process_time()
    if world.rank == 1:
        time.sleep(seconds)
    group.barrier()
    return time.process_time() - began


def test_who_waits_sleeps() -> None:
    assert max(on_ranks(wait_long, 3, 1.0)) < 0.1


# Generations


def until_changed(world: World) -> float:
    """Rank 1 changes the membership while rank 0 waits for it: when it was changed, or when that was noticed."""
    members = Membership(world.shared("page", Membership.nbytes(2)), 2)
    memory = world.shared("meeting", nbytes(2))
    meeting = Barrier(memory, world.rank, 2, check=lambda: members.check(0))
    meeting()
    if world.rank == 1:
        time.sleep(0.3)  # rank 0 is well asleep
        changed = time.perf_counter()
        members.open_change()
        return changed
    try:
        meeting()
    except MembershipChanged:
        return time.perf_counter()
    raise AssertionError("nobody came, and yet the wait has ended")


def test_a_change_of_the_membership_ends_a_wait_within_tens_of_milliseconds() -> None:
    noticed, changed = on_ranks(until_changed, 2)
    assert 0.0 <= noticed - changed < 0.08


def meets_a_straggler(world: World) -> str:
    """Rank 1 stays behind in generation 0 and comes to many meetings there; rank 0 waits in generation 2."""
    memory = world.shared("meeting", nbytes(2))
    if world.rank == 1:
        straggler = Barrier(memory, 1, 2, generation=0)
        for _ in range(1000):
            straggler.arrive()
        world.group().barrier()
        return ""
    world.group().barrier()
    until = time.perf_counter() + 0.2

    def check() -> None:
        if time.perf_counter() > until:
            raise MembershipChanged("long enough")

    try:
        Barrier(memory, 0, 2, generation=2, check=check)()
    except MembershipChanged as error:
        return str(error)
    return "it took the straggler for one of its own"


def test_a_straggler_of_an_older_generation_does_not_satisfy_a_newer_wait() -> None:
    assert on_ranks(meets_a_straggler, 2) == ["long enough", ""]


class Interrupted:
    """A word; whoever reads it is interrupted right after, and something else happens first."""

    def __init__(self, word: Word, happens: Callable[[], None]) -> None:
        self._word, self._happens = word, happens

    @property
    def value(self) -> int:
        seen = self._word.value
        self._happens()
        return seen


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_number_read_before_its_owner_began_anew_does_not_count(interrupted: int) -> None:
    """The owner joins the new generation between the reader's two reads, whichever word is read first."""
    memory = memoryview(mmap.mmap(-1, nbytes(2)))
    old = Barrier(memory, 1, 2, generation=0)
    for _ in range(5):
        old.arrive()
    meeting = Barrier(memory, 0, 2, generation=2)
    meeting.arrive()
    ((_, sequence, generation),) = meeting._others
    words: list[Any] = [sequence, generation]
    words[interrupted] = Interrupted(words[interrupted], lambda: Barrier(memory, 1, 2, generation=2) and None)
    assert not meeting._is_there(*words)
    Barrier(memory, 1, 2, generation=2).arrive()
    assert meeting._is_there(sequence, generation)


def shrinks_and_grows(world: World) -> list[float]:
    """Of three ranks one goes and comes back: what the two left behind in memory is nobody's arrival."""
    memory, outer, found = world.shared("again", nbytes(3)), world.group(), []
    for generation, size in ((0, 3), (2, 2), (4, 3)):
        outer.barrier()
        if world.rank == 2 and generation == 4:
            time.sleep(0.2)  # the others are there long before
        if world.rank < size:
            group = SharedMemoryGroup(memory, world.rank, size, generation=generation)
            sums = torch.tensor([float(world.rank + generation)])
            group.all_reduce(sums).wait()
            found.append(sums.item())
            words = torch.full((4096,), 4, dtype=torch.int32)  # as a line of generation 4 would read
            group.all_reduce(words).wait()
    return found


def test_a_smaller_group_leaves_nothing_that_a_larger_one_takes_for_an_arrival() -> None:
    assert on_ranks(shrinks_and_grows, 3) == [[3.0, 5.0, 15.0], [3.0, 5.0, 15.0], [3.0, 15.0]]


def test_a_place_is_read_whole_or_asked_for_again() -> None:
    memory = memoryview(mmap.mmap(-1, Membership.nbytes(3)))
    page = Membership(memory, 3)
    page.begin()
    assert page.slots_by_rank() == [0, 1, 2]
    page.open_change()
    assert not page.acknowledged(0)
    with pytest.raises(PeerLost, match="did not say within 0 s"):
        page.rejoin(0, 0.2)
    assert page.acknowledged(0)
    page.close_change([2, 0])
    assert not page.acknowledged(0)
    assert (page.rejoin(0, 1.0).rank, page.rejoin(2, 1.0).rank) == (1, 0)
    assert page.rejoin(0, 1.0).size == 2
    with pytest.raises(PeerLost, match="without the worker on slot 1"):
        page.rejoin(1, 1.0)


def test_sleeping_on_a_word_that_has_changed_returns_at_once() -> None:
    word = Word(3)
    began = time.perf_counter()
    sleep_on(word, 4, 5.0)
    assert time.perf_counter() - began < 1.0
    sleep_on(word, 3, 0.05)
    assert time.perf_counter() - began >= 0.05
    assert ctypes.sizeof(Word) == 4


# Ranks that nobody supervises


def after_a_death(world: World, reaped: bool) -> list[Any]:
    """This process and a child of it meet; the child is killed."""
    memory = memoryview(mmap.mmap(-1, nbytes(2)))
    child = os.fork()
    if child == 0:
        Barrier(memory, 1, 2)()
        while True:
            signal.pause()
    meeting = Barrier(memory, 0, 2)
    meeting()
    os.kill(child, signal.SIGKILL)
    if reaped:
        os.waitpid(child, 0)
    began = time.perf_counter()
    try:
        meeting()
    except PeerLost as error:
        return [str(error).replace(str(child), "PID"), time.perf_counter() - began]
    finally:
        if not reaped:
            os.waitpid(child, 0)
    return ["nobody was missed", 0.0]


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_rank_is_found_in_about_a_second_and_named(reaped: bool) -> None:
    ((said, seconds),) = on_ranks(after_a_death, 1, reaped)
    assert said == "rank 0 lost rank 1: its process PID has ended"
    assert seconds < 5.0


def test_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    meeting = Barrier(memoryview(mmap.mmap(-1, nbytes(3))), 0, 3, deadline=0.4)
    began = time.perf_counter()
    with pytest.raises(PeerLost, match="rank 0 has waited 0 s for rank 1"):
        meeting()
    assert 0.4 <= time.perf_counter() - began < 5.0


def meet(world: World) -> ProcessGroup:
    return ProcessGroup.connect(rank=world.rank, size=world.size, device=world.device, local_size=world.local_size)


def without_supervisor(world: World, wanted: list[Call]) -> tuple[list[str], bool, list[str]]:
    gloo = meet(world)
    memory = host_memory(gloo)
    assert memory is not None
    memory.flat = gloo
    found = make_calls(replace(world, _groups={"world": memory}), wanted)
    memory.close()
    return found, dist.is_initialized(), os.listdir("/dev/shm")


def descriptors_of_memories(world: World) -> int:
    def many() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = many()
    for number in range(20):
        world.shared(f"memory {number}", 4096)[0] = 1
    return many() - before


def test_memory_that_a_supervisor_hands_out_keeps_the_one_descriptor_of_its_mapping() -> None:
    assert on_ranks(descriptors_of_memories, 2) == [20, 20]


def test_ranks_without_a_supervisor_share_memory_that_has_no_name() -> None:
    kinds = ("all_reduce", "mean", "all_gather", "broadcast")
    wanted = [Call(kind, torch.float32, (300_000,), 1, (1, 0, 2), 5) for kind in kinds]
    before = os.listdir("/dev/shm")
    for found, connected, names in on_ranks(without_supervisor, 3, wanted):
        assert found == [digest(call.by_hand(3)) for call in wanted]
        assert not connected, "what it was set up through is closed with it"
        assert set(names) <= set(before)


def of_the_world(world: World) -> tuple[str, float, bool]:
    own = World.from_env(device="cpu")
    group = own.group()
    tensor = torch.tensor([own.rank + 1.0])
    group.all_reduce(tensor).wait()
    own.close()
    return type(group).__name__, tensor.item(), dist.is_initialized()


def test_a_world_without_a_supervisor_takes_one_group_on_every_rank() -> None:
    answers = on_ranks(of_the_world, 2)
    assert answers[0] == answers[1]
    assert answers[0][1:] == (3.0, False)
    assert answers[0][0] == "SharedMemoryGroup"


class Slow(Group):
    """The same collectives, a little later."""

    def __init__(self, group: Group) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size

    def all_reduce(self, tensor: Tensor) -> Work:
        time.sleep(0.004)
        return self._group.all_reduce(tensor)

    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        self._group.gather_into(rows, own)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        self._group.broadcast(tensor, source=source)

    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        self._group.reduce_scatter(rows, into)

    def send(self, tensor: Tensor, to: int) -> Work:
        return self._group.send(tensor, to)

    def receive(self, into: Tensor, source: int) -> Work:
        return self._group.receive(into, source)

    def barrier(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        pass


def compared(world: World) -> tuple[bool, bool]:
    group = world.group()
    return is_faster(group, Slow(group)), is_faster(Slow(group), group)


def test_the_faster_group_is_found_and_every_rank_finds_the_same() -> None:
    assert on_ranks(compared, 2) == [(True, False)] * 2


def without_descriptors(world: World, lacking: int) -> bool:
    """One rank may open no more files."""
    gloo = meet(world)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if world.rank == lacking:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    memory = host_memory(gloo)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gloo.barrier()
    gloo.close()
    return memory is None


@pytest.mark.parametrize("lacking", [0, 1])
def test_where_one_rank_cannot_map_the_memory_none_uses_it(lacking: int) -> None:
    assert on_ranks(without_descriptors, 2, lacking) == [True, True]
