"""Ranks that pass tensors of different shapes raise what they are, and read nothing of another's as numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks

from apportion.comm import differentiable
from apportion.comm.group import Group
from apportion.comm.world import World

pytestmark = pytest.mark.processes

LARGE = 300_000
"""More numbers than a piece of the shared memory has."""


def lists(group: Group) -> None:
    for _ in range(2 + group.rank):
        group.all_gather_rows(torch.ones(3))
    group.all_reduce(torch.ones(1)).wait()


UNLIKE: dict[str, tuple[Callable[[Group], object], str]] = {
    "a sum": (lambda g: g.all_reduce(torch.ones(3 + g.rank)), r"all_reduce of \(3,\) torch.float32 on rank 0"),
    "one number of elements": (lambda g: g.all_reduce(torch.ones(2, 3) if g.rank else torch.ones(3, 2)), r"\(3, 2\)"),
    "a type": (lambda g: g.all_reduce(torch.ones(3, dtype=torch.float64 if g.rank else torch.float32)), "float64"),
    "a large sum": (lambda g: g.all_reduce(torch.ones(LARGE * (1 + g.rank))), rf"\({2 * LARGE},\)"),
    "a gather": (lambda g: g.all_gather(torch.ones(LARGE, 1 + g.rank)), r"all_gather of"),
    "a broadcast": (lambda g: g.broadcast(torch.ones(LARGE + g.rank)), "broadcast of"),
    "rows": (lambda g: g.all_gather_rows(torch.ones(4, 2 + g.rank)), r"\(4, 2\) torch.float32 on rank 0"),
    "rows of one length": (
        lambda g: g.all_gather_rows(torch.ones(3, 2, 6) if g.rank else torch.ones(3, 12)),
        r"\(3, 12\) torch.float32 on rank 0",
    ),
    "many rows": (lambda g: g.all_gather_rows(torch.ones(90_000, 4 + g.rank)), r"\(90000, 5\)"),
    "rows with gradients": (
        lambda g: differentiable.gather_rows(torch.ones(5, 3 + g.rank, requires_grad=True), g),
        r"\(5, 3\) torch.float32 on rank 0",
    ),
    "two collectives": (
        lambda g: g.all_reduce(torch.ones(4)) if g.rank else g.all_gather(torch.ones(4)),
        "all_gather of .* on rank 0",
    ),
    "nothing of a gather": (lambda g: g.all_gather(torch.ones(4 * g.rank)), r"all_gather of \(0,\) .* on rank 0"),
    "nothing of a broadcast": (lambda g: g.broadcast(torch.ones(4 * g.rank)), r"broadcast of \(0,\) .* on rank 0"),
    "lists of unequal lengths": (lists, "all_reduce of .* on rank 0"),
}


def said(world: World, name: str) -> str:
    try:
        UNLIKE[name][0](world.group())
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.cases(28)
def test_shapes_that_differ_are_stated_on_every_rank(name: str, size: int) -> None:
    import re

    for text in on_ranks(said, size, name):
        assert re.search(UNLIKE[name][1], text), text
