"""The collectives of ranks that are joined by connections, alone and with memory within hosts: real processes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_calls import KINDS, Call, by_slices, calls, digest, in_ring
from commands import free_port
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import on_ranks

from apportion.comm.group import Group
from apportion.comm.network.hierarchical_group import PIECE_BYTES as HOSTS_PIECE_BYTES
from apportion.comm.network.hierarchical_group import HierarchicalGroup
from apportion.comm.network.network_group import RING_BYTES, SMALL_BYTES, NetworkGroup
from apportion.comm.network.rank_connection import RankConnection
from apportion.comm.network.rendezvous import meet
from apportion.comm.network.ring import PIECE_BYTES
from apportion.comm.world import World
from apportion.core.value import parse
from apportion.errors import PeerLost
from apportion.parallel.compression.compression import METHODS

pytestmark = pytest.mark.processes

OF_ALL = [kind for kind in KINDS if kind != "mean"]


def joined(world: World, secret: str | None = None) -> NetworkGroup:
    """The ranks over sockets of this host, or over TCP with a secret."""
    if secret is not None:
        os.environ["APPORTION_SECRET_FILE"] = secret
    meeting = meet(world.rank, world.size, one_host=secret is None, insecure=False)
    return NetworkGroup(meeting, range(world.size))


def make_calls(world: World, wanted: list[Call], hosts: list[int] | None, secret: str | None = None) -> list[str]:
    flat = joined(world, secret)
    group: Group = flat if hosts is None else HierarchicalGroup.make(flat, hosts, spins=False)
    assert hosts is None or isinstance(group, HierarchicalGroup)
    found = [digest(call.on(group)) for call in wanted]
    lane = group.lane()
    works = []
    tensors = [call.tensor(world.rank, world.size) for call in wanted if call.kind == "all_reduce"]
    for tensor in tensors:  # under way together, while the group's own go on
        works.append(lane.all_reduce(tensor))
        group.barrier()
    assert lane.all_gather(torch.tensor([world.rank])).flatten().tolist() == list(range(world.size)), "after the sums"
    for work in works:
        work.wait()
    lane.close()
    group.close()
    return [*found, *(digest([tensor]) for tensor in tensors)]


def expected(wanted: list[Call], size: int, rank: int, hosts: list[int] | None) -> list[str]:
    by_host = [[r for r, h in enumerate(hosts) if h == host] for host in sorted(set(hosts))] if hosts else []
    summed = [call for call in wanted if call.kind == "all_reduce"]
    return [digest(call.by_hand(size, rank, by_host, RING_BYTES)) for call in (*wanted, *summed)]


def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("size", [2, 3, 4])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(calls(OF_ALL), min_size=10, max_size=25))
def test_every_collective_gives_the_same_bits_as_by_hand_on_every_rank(size: int, wanted: list[Call]) -> None:
    for rank, found in enumerate(on_ranks(make_calls, size, wanted, None)):
        assert found == expected(wanted, size, rank, None), f"rank {rank}"


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 2], [0, 0, 0, 1, 1]])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(calls(OF_ALL), min_size=10, max_size=25))
@pytest.mark.thorough
def test_hosts_of_several_ranks_give_the_same_bits_as_by_hand(hosts: list[int], wanted: list[Call]) -> None:
    for rank, found in enumerate(on_ranks(make_calls, len(hosts), wanted, hosts)):
        assert found == expected(wanted, len(hosts), rank, hosts), f"rank {rank}"


def test_connections_of_tcp_that_have_proved_themselves_carry_the_same(tmp_path: Path) -> None:
    wanted = [Call(kind, torch.float32, (n,), 1, (2, 1, 3), 7) for kind in OF_ALL for n in (5, 300_000)]
    for rank, found in enumerate(on_ranks(make_calls, 3, wanted, None, secret_file(tmp_path))):
        assert found == expected(wanted, 3, rank, None), f"rank {rank}"


def sum_large(world: World, sizes: list[int], secret: str | None) -> list[str]:
    group = joined(world, secret)
    tensors = [Call("all_reduce", torch.float32, (n,), 0, (), n).tensor(world.rank, world.size) for n in sizes]
    for work in [group.all_reduce(tensor) for tensor in tensors]:
        work.wait()
    group.close()
    return [digest([tensor]) for tensor in tensors]


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_large_sum_goes_round_in_a_ring_and_has_the_same_bits_everywhere(
    size: int, tcp: bool, tmp_path: Path
) -> None:
    least, piece = size * (RING_BYTES // 4), PIECE_BYTES // 4
    sizes = [least, least + 1, size * piece, size * piece + 1, 3 * size * piece + size - 1, 1_000_003]
    expected = []
    for n in sizes:
        call = Call("all_reduce", torch.float32, (n,), 0, (), n)
        expected.append(digest([in_ring([call.tensor(rank, size) for rank in range(size)])]))
    for found in on_ranks(sum_large, size, sizes, secret_file(tmp_path) if tcp else None):
        assert found == expected


def sum_large_on_hosts(world: World, sizes: list[int], hosts: list[int]) -> list[str]:
    """Of tensors under way together in a lane, beside the group's own small sums."""
    group = HierarchicalGroup.make(joined(world), hosts, spins=False)
    lane = group.lane()
    tensors = [Call("all_reduce", torch.float32, (n,), 0, (), n).tensor(world.rank, world.size) for n in sizes]
    for work in [lane.all_reduce(tensor) for tensor in tensors]:
        group.barrier()
        work.wait()
    own = tensors[-1].clone()
    group.all_reduce(own).wait()  # in the thread that asks for it
    lane.close()
    group.close()
    return [digest([tensor]) for tensor in (*tensors, own)]


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1], [0, 0, 1, 2]])
def test_hosts_sum_a_large_tensor_in_pieces_and_have_the_bits_of_the_whole(hosts: list[int]) -> None:
    piece, ranks = HOSTS_PIECE_BYTES // 4, len(hosts)
    sizes = [piece, piece + 1, 2 * piece - 1, 3 * piece + 2, 1_000_003]
    by_host = [[rank for rank, own in enumerate(hosts) if own == host] for host in sorted(set(hosts))]
    calls = [Call("all_reduce", torch.float32, (n,), 0, (), n) for n in sizes]
    sums = [call.by_hand(ranks, 0, by_host, RING_BYTES)[0] for call in calls]
    doubled = by_slices([sums[-1] * len(own) for own in by_host], min(map(len, by_host)), RING_BYTES)
    expected = [digest([total]) for total in (*sums, doubled)]
    for found in on_ranks(sum_large_on_hosts, ranks, sizes, hosts):
        assert found == expected


@pytest.mark.parametrize("size", [3, 4])
def test_a_sum_that_is_too_small_for_a_ring_is_in_rank_order(size: int) -> None:
    sizes = [SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 20_000, size * (RING_BYTES // 4) - 1]
    calls = [Call("all_reduce", torch.float32, (n,), 0, (), n) for n in sizes]
    for found in on_ranks(sum_large, size, sizes, None):
        assert found == [digest(call.by_hand(size)) for call in calls]


def sum_with_a_slow_reader(world: World) -> bool:
    """Rank 1 reads nothing for a while, so that rank 0 has all of rank 1's numbers before its own have gone."""
    group = joined(world)
    group.barrier()
    pull, end = RankConnection._pull, time.monotonic() + 0.3
    if world.rank == 1:
        RankConnection._pull = lambda self: time.monotonic() > end and pull(self)  # type: ignore[method-assign]
    tensor = torch.full((4_000_000,), world.rank + 1.0)
    group.all_reduce(tensor).wait()
    RankConnection._pull = pull  # type: ignore[method-assign]
    group.barrier()
    group.close()
    return bool((tensor == 3.0).all())


def test_numbers_are_not_added_to_before_they_have_gone() -> None:
    assert on_ranks(sum_with_a_slow_reader, 2) == [True, True]


# Bytes


def count_bytes(world: World, numbers: int, hosts: list[int] | None) -> int:
    """The bytes that this rank sends to others through connections in one all-reduce."""
    flat = joined(world)
    group: Any = flat if hosts is None else HierarchicalGroup.make(flat, hosts, spins=False)
    group.all_reduce(torch.zeros(numbers)).wait()
    over = flat if hosts is None else group._across
    before = sum(peer.gone for peer in over._peers.values()) if over is not None else 0
    group.all_reduce(torch.zeros(numbers)).wait()
    after = sum(peer.gone for peer in over._peers.values()) if over is not None else 0
    group.barrier()
    group.close()
    return after - before


@pytest.mark.parametrize(
    ("hosts", "of_a_host"),
    [([0, 1], 1.0), ([0, 1, 2], 4 / 3), ([0, 1, 2, 3], 1.5), ([0, 0, 1, 1], 1.0), ([0, 0, 1], 1.0)],
)
def test_a_host_sends_no_more_than_a_ring_of_hosts_would(hosts: list[int], of_a_host: float) -> None:
    numbers, several = 600_000, len(set(hosts)) < len(hosts)
    sent = on_ranks(count_bytes, len(hosts), numbers, hosts if several else None)
    for host in set(hosts):
        own = sum(count for count, of in zip(sent, hosts, strict=True) if of == host)
        assert own == pytest.approx(of_a_host * 4 * numbers, rel=0.01)


# Messages


def exchange_messages(world: World, hosts: list[int] | None) -> list[float]:
    """Each rank sends to each other one, before anybody receives, and large ones go on while others are waited for."""
    flat = joined(world)
    group: Group = flat if hosts is None else HierarchicalGroup.make(flat, hosts, spins=False)
    others = [rank for rank in range(world.size) if rank != world.rank]
    small = [group.send(torch.full((1000,), float(world.rank)), to) for to in others]
    group.barrier()
    large = torch.full((5_000_000,), float(world.rank))
    works = [group.send(large, to) for to in others]
    got = []
    for source in others:
        first, second = torch.empty(1000), torch.empty(5_000_000)
        ends = [group.receive(first, source), group.receive(second, source)]
        for end in reversed(ends):
            end.wait()
        got += [first.mean().item(), second[0].item(), second[-1].item()]
    for work in (*small, *works):
        work.wait()
    group.barrier()
    group.close()
    return got


@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_messages_arrive_in_order_whoever_receives_first(hosts: list[int] | None) -> None:
    for rank, got in enumerate(on_ranks(exchange_messages, 3, hosts)):
        assert got == [float(other) for other in range(3) if other != rank for _ in range(3)]


def disagree(world: World) -> str:
    group = joined(world)
    try:
        group.all_reduce(torch.zeros(100 + world.rank)).wait()
    except (AssertionError, PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group.close()
    return "summed"


def test_ranks_that_do_not_agree_on_a_shape_find_out() -> None:
    told = on_ranks(disagree, 2)
    assert any("the ranks do not agree on the order of their messages, or on a shape" in each for each in told)
    assert all(each != "summed" for each in told)


def meet_again(world: World, port: int, secret: str) -> list[float]:
    """One meeting after the other at one port, of which rank 0 leaves each a little later than the others."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    sums = []
    for _ in range(5):
        group = joined(world, secret)
        sums.append(group.total(torch.ones(1)).item())
        if world.rank == 0:
            time.sleep(0.1)
        group.close()
    return sums


def test_a_rank_that_meets_again_waits_for_one_that_has_not_left_the_meeting_before(tmp_path: Path) -> None:
    assert on_ranks(meet_again, 3, free_port(), secret_file(tmp_path)) == [[3.0] * 5] * 3


# Waits that end


def wait_and_be_told(world: World, kind: str) -> float:
    """Rank 0 waits for a rank that never comes, and is told to stop: the seconds until it has."""
    flat = joined(world)
    group: Group = HierarchicalGroup.make(flat, [0, 0, 1], spins=False) if kind == "hosts" else flat
    group.barrier()
    if world.rank:
        world.group().barrier()
        return 0.0
    told: list[float] = []

    def interrupt() -> None:
        told.append(time.perf_counter())
        group.interrupt()  # type: ignore[attr-defined]

    timer = threading.Timer(0.3, interrupt)
    timer.start()
    waits = {
        "receive": lambda: group.receive(torch.zeros(10), 1).wait(),
        "thread": lambda: group.all_reduce(torch.zeros(100_000)).wait(),
        "broadcast": lambda: group.broadcast(torch.zeros(10), source=2),
        "hosts": group.barrier,
    }
    with pytest.raises(PeerLost, match="it was closed here"):
        waits[kind]()
    ended = time.perf_counter()
    world.group().barrier()
    return ended - told[0]


@pytest.mark.parametrize("kind", ["receive", "thread", "broadcast", "hosts"])
def test_a_wait_ends_when_another_thread_says_so(kind: str) -> None:
    assert max(on_ranks(wait_and_be_told, 3, kind)) < 0.5


def wait_often(world: World, rounds: int) -> list[float]:
    """In each round rank 0 waits in another collective of a lane of its own, whose other ranks do not come: they leave
    it where its number is even, and else are as if they were frozen, and rank 0 is told to stop. The seconds until it
    has."""
    flat, found = joined(world), []
    group = HierarchicalGroup.make(flat, [0, 0, 1], spins=False)
    assert isinstance(group, HierarchicalGroup)
    between = parse("int8", METHODS).between([torch.Size([100_000])], torch.float32)
    for number in range(rounds):
        lane: Any = group.lane()
        whole, few = torch.zeros(100_000), torch.zeros(3, 10)
        waits = [
            lambda lane=lane, whole=whole: lane.all_reduce(whole).wait(),
            lambda lane=lane, whole=whole: lane.all_reduce_between(whole, between).wait(),
            lambda lane=lane, few=few: lane.gather_into(few, torch.zeros(10)),
            lambda lane=lane, whole=whole: lane.broadcast(whole, source=2),
            lambda lane=lane, few=few: lane.reduce_scatter(few, torch.zeros(10)),
            lambda lane=lane, few=few: lane.receive(few, 2).wait(),
            lambda lane=lane: lane.barrier(),
        ]
        group.barrier()
        if world.rank == 0:
            told: list[float] = []
            timer = threading.Timer(
                0.02, lambda lane=lane, told=told: (told.append(time.perf_counter()), lane.interrupt())
            )
            timer.start()
            with pytest.raises(PeerLost):
                waits[number // 2 % len(waits)]()
            ended = time.perf_counter()
            timer.join()
            found.append(ended - told[0])
        elif number % 2 == 0:
            lane.interrupt()
        group.barrier()
        lane.close()
    group.close()
    return found


def test_fifty_waits_for_ranks_that_are_frozen_or_gone_end_at_once() -> None:
    found = on_ranks(wait_often, 3, 50)[0]
    assert len(found) == 50
    assert max(found) < 0.5


def lose(world: World) -> str:
    group = joined(world)
    group.barrier()
    if world.rank == 1:
        group.close()  # as when its process ends
        world.group().barrier()
        return "gone"
    try:
        group.all_reduce(torch.zeros(100_000)).wait()
    except PeerLost as error:
        return str(error)
    finally:
        world.group().barrier()
    return "summed"


def test_whoever_waits_for_a_rank_that_has_gone_learns_it_at_once() -> None:
    first, second, third = on_ranks(lose, 3)
    assert second == "gone"
    assert "the connection to rank" in first
    assert "was lost" in third


def ask_ahead(world: World) -> str:
    """Rank 0 asks rank 1 for a message that never comes, waits for one of rank 2 while rank 1 leaves, and then for the
    first after all."""
    group, large = joined(world), torch.zeros(5_000_000)  # more than a connection holds, so that it is waited for
    if world.rank == 0:
        coming = group.receive(torch.empty(1), 1)
        world.group().barrier()
        group.receive(large, 2).wait()
        with pytest.raises(PeerLost, match=f"the connection to {group.describe(1)} was lost: it ended"):
            coming.wait()
    elif world.rank == 1:
        group.send(torch.empty(0), 0)  # makes the connection
        group.close()
        world.group().barrier()
    else:
        world.group().barrier()
        group.send(large.add_(1), 0).wait()
    group.close()
    return str(large[-1].item())


def test_a_message_that_was_asked_for_ahead_is_not_missed_before_somebody_waits_for_it() -> None:
    assert on_ranks(ask_ahead, 3)[0] == "1.0"


def test_a_rank_that_waits_for_a_connection_while_messages_go_on_can_be_called_out() -> None:
    """Whom it waits for has died, and a message of its own is still asked for."""

    class Empty:
        """A meeting to which nobody comes."""

        rank, polls = 0, 0

        def poll(self, rank: int, name: str, seconds: float) -> None:
            self.polls += 1
            assert self.polls < 10, "it waits on"
            if self.polls == 3:
                group.interrupt()

        def take(self, rank: int, name: str, interrupted: Any) -> None:
            assert interrupted()
            raise PeerLost("it was closed here")

        def wake(self) -> None:
            pass

    meeting: Any = Empty()
    group = NetworkGroup(meeting, [0, 1])
    group.all_waits.moving[0] = lambda: True
    with pytest.raises(PeerLost, match="closed here"):
        group._connect(1, "world", group.all_waits, dials=False)
    assert meeting.polls == 3
