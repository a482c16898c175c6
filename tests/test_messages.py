"""Messages between ranks, and the parts of a world: real processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from apportion.comm.group import Group
from apportion.comm.link import PIECE, RING
from apportion.world import World

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def made(seed: int, nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# The order of what a rank does is drawn: sends and receives of every pair mixed.


def exchange(world: World, sizes: list[list[int]], mixed: list[int], group: Group | None = None) -> bool:
    """Every rank sends every other the messages of these sizes, in order, and receives theirs; is all of it right?"""
    group = world.group() if group is None else group
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [(to, i) for i in range(len(sizes[0])) for to in others]
    works, expected, receives = [], [], []
    for turn, (to, i) in enumerate(sends):
        message = made(1000 * group.rank + 10 * to + i, sizes[group.rank][i])
        works.append(group.send(message, to))
        if mixed[turn % len(mixed)]:
            into = torch.zeros(sizes[to][i], dtype=torch.uint8)
            receives.append((group.receive(into, to), into))
            expected.append(made(1000 * to + 10 * group.rank + i, sizes[to][i]))
            if mixed[turn % len(mixed)] > 1:
                receives[-1][0].wait()
        else:
            receives.append((None, torch.zeros(sizes[to][i], dtype=torch.uint8)))
            expected.append(made(1000 * to + 10 * group.rank + i, sizes[to][i]))
    return finished(group, sends, works, receives) and all(
        torch.equal(into, message) for (_, into), message in zip(receives, expected, strict=True)
    )


def finished(group: Group, sends: Any, works: Any, receives: Any) -> bool:
    for (to, _), (work, into) in zip(sends, receives, strict=True):
        (work or group.receive(into, to)).wait()
    for work in works:
        work.wait()
    return True


def test_it() -> None:
    sizes = [[0, 1, 64, 1000, PIECE, 3 * PIECE + 5], [3, 0, 65, RING // 2, 7, 100], [RING + 77, 8, 9, 10, 11, 12]]
    assert on_ranks(exchange, 3, sizes, [1]) == [True] * 3


# Parts of a world


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


def over_torch(world: World, memory: bool, function: Any, *arguments: Any) -> tuple[Any, str]:
    """The function where nobody hands out memory; ``memory``: the ranks may find some of their own."""
    own = World.from_env(device="cpu")
    own = own if memory else replace(own, local_size=1)  # as if each were on a host of its own
    found = function(own, *arguments)
    group = type(own.group()).__name__
    own.close()
    assert not dist.is_initialized()
    return found, group


@pytest.mark.parametrize("memory", [False, True])
def test_parts_of_a_world_are_the_same_over_torch_distributed(memory: bool) -> None:
    expected = on_ranks(in_parts, 4)
    for (found, group), same in zip(on_ranks(over_torch, 4, memory, in_parts), expected, strict=True):
        assert found == same
        assert memory or group == "ProcessGroup"


def test_messages_are_the_same_over_torch_distributed() -> None:
    sizes = [[0, 1, 64, 1000, 70_000], [3, 0, 65, 7, 100], [1 << 20, 8, 9, 10, 11]]
    assert on_ranks(over_torch, 3, False, exchange, sizes, [1]) == [(True, "ProcessGroup")] * 3
