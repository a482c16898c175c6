"""Messages between ranks, and the parts of a world: real processes."""

from __future__ import annotations

import math
import mmap
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import apart, on_ranks
from torch import Tensor

from apportion.comm import barrier as meeting
from apportion.comm import shared_memory_group
from apportion.comm.group import DONE, Alone, Group, WaitClock
from apportion.comm.host_memory import host_memory
from apportion.comm.membership import Membership
from apportion.comm.p2p import PIECE, RING, Receiver, Sender, nbytes
from apportion.comm.process_group import ProcessGroup, _Buffered
from apportion.comm.shared_memory_group import SharedMemoryGroup, links_in
from apportion.comm.sync import CACHE_LINE
from apportion.comm.world import World
from apportion.errors import MembershipChanged, PeerLost

pytestmark = pytest.mark.processes


def made(seed: int, nbytes: int) -> Tensor:
    """Bytes that are drawn eight at a time: one by one they took longer than the messages."""
    words = torch.empty((nbytes + 7) // 8, dtype=torch.int64)
    return words.random_(generator=torch.Generator().manual_seed(seed)).view(torch.uint8)[:nbytes].clone()


# Messages of every size in every order


@dataclass(frozen=True)
class Exchange:
    """Messages of these sizes from every rank to every other. ``orders``: when each rank begins to receive and when it
    waits, by turns: 0 at the end; 1 begins now, waits at the end; 2 now."""

    sizes: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...], ...]

    def on(self, group: Group) -> list[str]:
        """What did not arrive as it was sent."""
        others = [rank for rank in range(group.size) if rank != group.rank]
        turns = [(other, number) for number in range(len(self.sizes[0])) for other in others]
        sending, receiving = [], []
        late = False
        for turn, (other, number) in enumerate(turns):
            sending.append(group.send(self.message(group.rank, other, number), other))
            order = self.orders[group.rank][turn % len(self.orders[0])]
            late = late or not order  # whose message waits, all others wait behind it
            into = torch.zeros(self.sizes[other][number], dtype=torch.uint8)
            receiving.append((None if late else group.receive(into, other), into))
            if order == 2 and not late:
                receiving[-1][0].wait()
        for (other, _), (work, into) in zip(turns, receiving, strict=True):
            (work or group.receive(into, other)).wait()
        for work in reversed(sending):
            work.wait()
        return [
            f"message {number} of rank {other}"
            for (other, number), (_, into) in zip(turns, receiving, strict=True)
            if not torch.equal(into, self.message(other, group.rank, number))
        ]

    def message(self, source: int, to: int, number: int) -> Tensor:
        return made(10_000 * source + 100 * to + number, self.sizes[source][number])


@st.composite
def exchanges(draw: Any, ranks: int) -> Exchange:
    near = st.integers(-CACHE_LINE - 1, CACHE_LINE + 1)
    size = st.one_of(
        st.integers(0, 300),
        st.builds(lambda pieces, more: pieces * PIECE + more, st.integers(1, 3), near),
        st.sampled_from([RING - CACHE_LINE, RING - CACHE_LINE + 1, RING, RING + PIECE]),
    )
    many = draw(st.integers(1, 6))
    sizes = tuple(tuple(draw(size) for _ in range(many)) for _ in range(ranks))
    orders = tuple(tuple(draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))) for _ in range(ranks))
    return Exchange(sizes, orders)


def make_exchanges(world: World, wanted: list[Exchange]) -> list[str]:
    group = world.group()
    return [f"{one}: {wrong}" for one in wanted for wrong in one.on(group)]


@pytest.mark.parametrize("ranks", [2, 3])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_message_arrives_as_it_was_sent_whatever_is_waited_for_first(ranks: int, data: Any) -> None:
    """Also where all send more than may be under way before anyone receives."""
    wanted = data.draw(st.lists(exchanges(ranks), min_size=3, max_size=6))
    assert on_ranks(make_exchanges, ranks, wanted) == [[]] * ranks


def of_every_type(world: World) -> list[bool]:
    group, other, right = world.group(), 1 - world.rank, []
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for shape in ((3, 5), (), (0, 4)):
            sends = (torch.arange(15.0)[: max(1, math.prod(shape))] % 3 * (world.rank + 1)).to(dtype)
            sends = sends.new_empty(shape) if not math.prod(shape) else sends.view(shape)
            wanted = (torch.arange(15.0)[: max(1, math.prod(shape))] % 3 * (other + 1)).to(dtype)
            into = torch.empty(shape, dtype=dtype)
            group.send(sends, other).wait()
            group.receive(into, other).wait()
            right.append(torch.equal(into.view(-1), wanted[: into.numel()]))
    return right


def test_messages_of_every_type_arrive() -> None:
    for right in on_ranks(of_every_type, 2):
        assert right == [True] * 15


# What waits meanwhile


def send_and_meet(world: World, through: str) -> list[bool]:
    """Rank 0 sends more than may be under way and waits for something else, rank 1 receives first."""
    parts = world.split("pair", [[0, 1], [2]])
    world.group().barrier()
    message = made(1, 3 * RING)
    if world.rank == 0:
        work = parts.group().send(message, 1)
        if through == "a message":
            world.group().receive(torch.empty(1), 2).wait()
    elif world.rank == 1:
        into = torch.empty_like(message)
        parts.group().receive(into, 0).wait()
        if through == "a message":
            world.group().send(torch.ones(1), 2).wait()
    elif through == "a message":
        world.group().receive(torch.empty(1), 1).wait()
        world.group().send(torch.ones(1), 0).wait()
    world.group().barrier()
    if world.rank == 0:
        work.wait()
    return [torch.equal(into, message)] if world.rank == 1 else []


@pytest.mark.parametrize("through", ["a barrier", "a message"])
def test_a_large_message_goes_on_while_its_sender_waits_in_another_group(through: str) -> None:
    assert on_ranks(send_and_meet, 3, through) == [[], [True], []]


def send_and_wait_elsewhere(world: World, over: str, through: str) -> bool:
    """Rank 0 sends more through memory than may be under way, and waits in a group between hosts for rank 1, which
    takes that first."""
    own = apart(over=over)
    group = own.group()
    memory = host_memory(group, spins=False, deadline=5.0)
    assert memory is not None
    message, into, small = made(1, 3 * RING), torch.empty(3 * RING, dtype=torch.uint8), torch.zeros(1)
    if world.rank == 0:
        work = memory.send(message, 1)
        group.receive(small, 1).wait() if through == "a message" else group.barrier()
        work.wait()
    else:
        memory.receive(into, 0).wait()
        group.send(torch.ones(1), 0).wait() if through == "a message" else group.barrier()
    group.barrier()
    memory.close()
    own.close()
    return world.rank == 0 or torch.equal(into, message)


@pytest.mark.parametrize("over", ["NetworkGroup", "ProcessGroup"])
@pytest.mark.parametrize("through", ["a barrier", "a message"])
def test_a_large_message_goes_on_while_its_sender_waits_between_hosts(over: str, through: str) -> None:
    assert on_ranks(send_and_wait_elsewhere, 2, over, through) == [True] * 2


def never_asleep(world: World) -> bool:
    """Rank 0 has sent more than may be under way and goes on with rank 2, which is always there before it."""
    taken = np.frombuffer(world.shared("taken", 64), dtype=np.int64)
    part = world.split("pair", [[0, 2], [1]])
    message, into = made(1, 3 * RING), torch.empty(3 * RING, dtype=torch.uint8)
    if world.rank == 0:
        work = world.group().send(message, 1)
    elif world.rank == 1:
        world.group().receive(into, 0).wait()
        taken[0] = 1
    moved = world.rank == 1
    for _ in range(0 if world.rank == 1 else 2000):
        time.sleep(0.002 * (world.rank == 0))  # its work
        seen = torch.tensor([float(taken[0] * (world.rank == 0))])
        part.group().all_reduce(seen).wait()
        if moved := bool(seen):
            break
    if world.rank == 0:
        work.wait()
    world.group().barrier()
    return moved


def test_a_large_message_goes_on_where_its_sender_meets_others_without_waiting_for_them() -> None:
    assert on_ranks(never_asleep, 3) == [True] * 3


def in_a_circle(world: World) -> bool:
    """Each waits for the rank before it, and has asked for what the rank behind it sends: that has to be taken in for
    the circle to move."""
    group, rank = world.group(), world.rank
    before, behind = (rank - 1) % 3, (rank + 1) % 3
    large = torch.empty(2 * RING, dtype=torch.uint8)
    taking = group.receive(large, behind)
    giving = group.send(made(rank, 2 * RING), before)
    if rank == 0:
        giving.wait()
        group.send(torch.ones(1), behind).wait()
    small = torch.empty(1)
    group.receive(small, before).wait()
    if rank != 0:
        giving.wait()
        group.send(torch.ones(1), behind).wait()
    giving.wait()
    taking.wait()
    return torch.equal(large, made(behind, 2 * RING))


def test_what_is_to_be_received_is_taken_in_while_something_else_is_waited_for() -> None:
    assert on_ranks(in_a_circle, 3) == [True] * 3


def disagree(world: World) -> str:
    if world.rank == 0:
        world.group().send(torch.zeros(3), 1).wait()
        return ""
    try:
        world.group().receive(torch.zeros(4), 0).wait()
    except AssertionError as error:
        return str(error)
    return "received"


def test_a_message_of_another_size_than_is_received_is_an_error() -> None:
    said = on_ranks(disagree, 2)[1]
    assert said.startswith("a message of 12 bytes was sent and one of 16 bytes is received: the ranks do not agree")


def to_itself(world: World) -> list[str]:
    told = []
    for rank in (world.rank, 2, -1):
        for call in (world.group().send, world.group().receive):
            with pytest.raises(ValueError, match="other ranks") as raised:
                call(torch.zeros(1), rank)
            told.append(str(raised.value))
    return told


def test_messages_go_to_other_ranks() -> None:
    assert on_ranks(to_itself, 2)[1][0] == "rank 1 of 2 sends to and receives from other ranks, not rank 1"
    with pytest.raises(ValueError, match="a group of one has no other rank to send to"):
        Alone().send(torch.zeros(1), 0)


# The ring


def ends(sent: int = 0) -> tuple[Sender, Receiver, memoryview]:
    """Both ends in one process; as if so many lines had gone through."""
    memory = memoryview(mmap.mmap(-1, nbytes))

    def wait(word: Any, asleep: Any, holds: Any) -> None:
        assert holds(), "it would wait for ever"

    sender, receiver = Sender(memory, 0, WaitClock(), wait), Receiver(memory, 0, WaitClock(), wait)
    for end in (sender, receiver):
        end._lines = end._base = end._own.value = sent
    return sender, receiver, memory


@pytest.mark.parametrize("sent", [2**31 - 50_000, 2**32 - 50_000, 2**32 - 1])
def test_the_count_of_lines_may_wrap_around(sent: int) -> None:
    sender, receiver, _ = ends(sent)
    for number in range(40):
        message, into = made(number, PIECE + 777 * number), torch.zeros(PIECE + 777 * number, dtype=torch.uint8)
        sender.send(message).wait()
        receiver.receive(into).wait()
        assert torch.equal(into, message)


def test_a_place_where_the_ring_once_began_anew_is_a_line_like_others_later() -> None:
    """The count comes back to it after 2**32 lines; between two messages that are both under way, nothing begins."""
    sender, receiver, _ = ends(5)
    sender._begins.value = 5 + 2
    for number in range(3):
        sender.send(made(number, CACHE_LINE))
    for number in range(3):
        into = torch.zeros(CACHE_LINE, dtype=torch.uint8)
        receiver.receive(into).wait()
        assert torch.equal(into, made(number, CACHE_LINE))


def touched(memory: memoryview) -> int:
    """Bytes of it that are not zero as they were, in pages."""
    pages = np.frombuffer(memory, dtype=np.uint8)[: nbytes // 4096 * 4096].reshape(-1, 4096)
    return int(pages.any(1).sum()) * 4096


def test_no_more_memory_is_touched_than_was_under_way() -> None:
    sender, receiver, memory = ends()
    message, into = torch.full((1 << 20,), 1, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    for _ in range(50):
        sender.send(message).wait()
        receiver.receive(into).wait()
    assert 1 << 20 <= touched(memory) <= (1 << 20) + PIECE + 8192
    for _ in range(7):
        assert sender.send(message) is DONE
    assert sender.send(message) is not DONE, "it is full"
    assert touched(memory) > 7 << 20
    for _ in range(8):
        receiver.receive(into).wait()
        sender._push()


def nap_and_send(world: World, rounds: int) -> float:
    """The longest round trip. Nobody looks again by itself for seconds: whoever is not woken shows."""
    meeting.SLEEP_SECONDS = meeting.NAP_SECONDS = 5.0
    group, naps, longest = world.group(), random.Random(world.rank), 0.0
    group.meeting._spin = 0.0
    into, message = torch.empty(8), torch.zeros(8)
    large, larger = torch.empty(RING), torch.zeros(RING)  # floats: four times what may be under way
    for number in range(rounds):
        for _ in range(naps.choice((0, 0, 0, 10, 100, 1000))):
            pass
        began = time.perf_counter()
        a, b = (large, larger) if number % 2000 == 0 else (into, message)
        if world.rank == 0:
            group.send(b, 1).wait()
            group.receive(a, 1).wait()
        else:
            group.receive(a, 0).wait()
            group.send(b, 0).wait()
        longest = max(longest, time.perf_counter() - began)
    return longest


@pytest.mark.parametrize("rounds", [8_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_wake_up_of_a_message_is_lost(rounds: int) -> None:
    assert max(on_ranks(nap_and_send, 2, rounds)) < 3.0


def wait_long(world: World) -> float:
    """Processor seconds of the wait for a message."""
    group, into = world.group(), torch.empty(1)
    group.barrier()
    began = time.process_time()
    if world.rank == 0:
        time.sleep(1.0)
        group.send(into, 1).wait()
    else:
        group.receive(into, 0).wait()
    return time.process_time() - began


def test_who_waits_for_a_message_sleeps() -> None:
    assert max(on_ranks(wait_long, 2)) < 0.1


# Ranks that die


def after_a_death(world: World, sends: bool) -> list[Any]:
    """This process and a child of it exchange messages; the child sends one more, and is killed."""
    memory = memoryview(mmap.mmap(-1, shared_memory_group.nbytes(2) + 4 * nbytes))
    links = links_in(memory[shared_memory_group.nbytes(2) :], 2)
    child = os.fork()
    group = SharedMemoryGroup(memory[: shared_memory_group.nbytes(2)], int(child == 0), 2, links=links)
    other, small = 1 - group.rank, torch.zeros(1)
    group.send(small, other)
    group.receive(small, other).wait()
    if child == 0:
        group.send(torch.ones(1), other)
        group.barrier()
        while True:
            signal.pause()
    group.barrier()
    os.kill(child, signal.SIGKILL)
    group.receive(small, other).wait()
    assert small.item() == 1.0, "what was sent before is there"
    began = time.perf_counter()
    try:
        (group.send(torch.zeros(RING), other) if sends else group.receive(small, other)).wait()
    except PeerLost as error:
        return [str(error).replace(str(child), "PID"), time.perf_counter() - began]
    finally:
        os.waitpid(child, 0)
    return ["nobody was missed", 0.0]


@pytest.mark.parametrize("sends", [True, False])
def test_a_killed_rank_ends_a_wait_for_a_message_in_about_a_second_and_is_named(sends: bool) -> None:
    ((said, seconds),) = on_ranks(after_a_death, 1, sends)
    assert said == "rank 0 lost rank 1: its process PID has ended"
    assert seconds < 5.0


def with_deadline(world: World) -> SharedMemoryGroup:
    links = links_in(world.shared("links", 4 * nbytes), 2)
    return SharedMemoryGroup(
        world.shared("meet", shared_memory_group.nbytes(2)), world.rank, 2, links=links, deadline=0.5
    )


def waits_in_vain(world: World) -> list[float]:
    group, seconds = with_deadline(world), []
    for call in (group.receive, group.send) if world.rank == 0 else ():
        began = time.perf_counter()
        with pytest.raises(PeerLost, match="rank 0 has waited 0 s for rank 1"):
            call(torch.zeros(RING), 1).wait()
        seconds.append(time.perf_counter() - began)
    world.group().barrier()
    return seconds


def test_a_message_that_never_comes_and_one_that_nobody_takes_end_at_the_deadline() -> None:
    seconds, _ = on_ranks(waits_in_vain, 2)
    assert len(seconds) == 2
    assert all(0.5 <= s < 2.0 for s in seconds)


def takes_its_time(world: World) -> float:
    """The wait of rank 0 for the last of its messages to be taken, of which rank 1 takes one at a time."""
    group, message = with_deadline(world), torch.zeros(1 << 20, dtype=torch.uint8)
    if world.rank == 1:
        for _ in range(14):
            time.sleep(0.2)
            group.receive(message, 0).wait()
        return 0.0
    works = [group.send(message, 1) for _ in range(14)]
    began = time.perf_counter()
    works[-1].wait()
    return time.perf_counter() - began


@pytest.mark.thorough
def test_a_rank_that_is_slow_but_at_work_may_take_longer_than_the_deadline() -> None:
    assert on_ranks(takes_its_time, 2)[0] > 1.0


def until_changed(world: World, sends: bool) -> float:
    """Rank 1 changes the membership while rank 0 waits for it: when it was changed, or when that was noticed."""
    members = Membership(world.shared("page", Membership.nbytes(2)), 2)
    group = replace(world, members=members).group()
    group.barrier()
    if world.rank == 1:
        time.sleep(0.3)  # rank 0 is well asleep
        changed = time.perf_counter()
        members.open_change()
        return changed
    try:
        (group.send(torch.zeros(RING), 1) if sends else group.receive(torch.zeros(1), 1)).wait()
    except MembershipChanged:
        return time.perf_counter()
    raise AssertionError("nobody came, and yet the wait has ended")


@pytest.mark.parametrize("sends", [True, False])
def test_a_change_of_the_membership_ends_the_wait_for_a_message_within_tens_of_milliseconds(sends: bool) -> None:
    noticed, changed = on_ranks(until_changed, 2, sends)
    assert 0.0 <= noticed - changed < 0.08


def lost_over_torch(world: World) -> str:
    group = ProcessGroup.connect(rank=world.rank, size=2, device=world.device, local_size=2)
    group.barrier()
    if world.rank == 1:
        dist.destroy_process_group()  # its sockets close, as those of a process that dies
        return ""
    try:
        group.receive(torch.zeros(1), 1).wait()
    except PeerLost as error:
        return str(error)
    return "received"


def test_a_lost_rank_ends_the_wait_for_a_message_of_gloo() -> None:
    assert on_ranks(lost_over_torch, 2)[0].startswith("rank 0 lost another rank in a collective: ")


def between_hosts(world: World, over: str, wanted: list[Exchange]) -> list[str]:
    own = apart(over=over)
    found = make_exchanges(own, wanted)
    own.close()
    return found


@pytest.mark.parametrize("over", ["NetworkGroup", "ProcessGroup"])
def test_messages_are_the_same_between_hosts(over: str) -> None:
    sizes = ((0, 1, 64, 1000, 70_000), (3, 0, 65, 7, 100), (1 << 20, 8, 9 << 20, 10, 11))
    wanted = [Exchange(sizes, ((1, 2, 1), (1, 1, 2), (2, 1, 0))), Exchange(sizes, ((0, 0, 0),) * 3)]
    assert on_ranks(between_hosts, 3, over, wanted) == [[]] * 3


def test_whoever_closes_waits_until_its_messages_are_let_go() -> None:
    """A thread that did so while Python ends would take the process down."""
    received = threading.Event()

    class Sent:
        def wait(self) -> None:
            assert received.wait(10.0)

    buffered = _Buffered()
    buffered.add(Sent(), 1)
    threading.Timer(0.1, received.set).start()
    buffered.close()
    assert received.is_set()
    assert buffered.nbytes == 0
