"""Messages between ranks, and the parts of a world: real processes."""

from __future__ import annotations

from typing import Any

import torch
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
