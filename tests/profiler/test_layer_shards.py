"""What is timed as a rank's part of a layer is as large as that rank's part is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apportion.profiler.layer_splits import part_of, window

IMAGE = (2, 4, 8, 6)
"""Rows, channels, height, width."""


def part(call: Callable[..., Any], way: str, ranks: int, *given: tuple[int, ...]) -> Any:
    """(share, the shapes that it is given, the shape of what it makes); None: there is no part."""
    torch.manual_seed(0)
    args = tuple(torch.ones(shape).requires_grad_() for shape in given)
    made = part_of(call, (args, {}), way, ranks, copies=True)
    if made is None:
        return None
    share, cut = made
    forward, backward = cut.run()
    assert min(forward, backward) > 0.0
    own: Any = cut
    outputs = own._call(*own._given[0])
    return share, [tuple(t.shape) for t in own._given[0]], tuple(outputs.shape)


@pytest.mark.parametrize(
    ("call", "way", "ranks", "given", "made"),
    [
        (nn.Linear(10, 8), "units", 2, (4, 10), (4, 4)),
        (nn.Linear(10, 8), "inputs", 2, (4, 5), (4, 8)),
        (nn.Conv2d(4, 6, 3, padding=1), "units", 2, (2, 4, 8, 6), (2, 3, 8, 6)),
        (nn.Conv2d(4, 6, 3, padding=1), "inputs", 2, (2, 2, 8, 6), (2, 6, 8, 6)),
        (nn.Conv2d(4, 8, 3, padding=1, groups=4), "units", 2, (2, 2, 8, 6), (2, 4, 8, 6)),
        # Of 8 rows of outputs 4, which look at 6 rows; of 3 with a stride of 2 two, which look at 5.
        (nn.Conv2d(4, 6, 3, padding=1), "height", 2, (2, 4, 6, 6), (2, 6, 4, 6)),
        (nn.Conv2d(4, 6, 3, padding="same"), "height", 2, (2, 4, 6, 6), (2, 6, 4, 6)),
        (nn.Conv2d(4, 6, (3, 5), padding=(0, 2), stride=2), "height", 2, (2, 4, 5, 6), (2, 6, 2, 3)),
        (nn.MaxPool2d(2), "height", 2, (2, 4, 4, 6), (2, 4, 2, 3)),
        (nn.ReLU(), "units", 2, (2, 2, 8, 6), (2, 2, 8, 6)),
        (nn.ReLU(), "height", 3, (2, 4, 3, 6), (2, 4, 3, 6)),
        (nn.ReLU(), "units", 3, (4, 4), (4, 4)),
    ],
    ids=str,
)
def test_a_part_is_given_and_makes_what_a_rank_is_given_and_makes(
    call: nn.Module, way: str, ranks: int, given: tuple[int, ...], made: tuple[int, ...]
) -> None:
    whole = IMAGE if len(given) == 4 else (4, 10)
    assert part(call, way, ranks, whole) == (1 / ranks, [given], made)


def test_what_is_broadcast_is_cut_where_it_has_as_many() -> None:
    assert part(torch.add, "units", 2, IMAGE, (4, 1, 1))[1] == [(2, 2, 8, 6), (2, 1, 1)]
    assert part(torch.add, "units", 2, IMAGE, (1,))[1] == [(2, 2, 8, 6), (1,)]
    assert part(torch.add, "height", 2, IMAGE, (8, 6))[1] == [(2, 4, 4, 6), (4, 6)]


def test_what_is_too_small_has_no_part() -> None:
    with pytest.raises(RuntimeError):  # whoever times it takes that for an answer
        part(nn.Conv2d(4, 1, 3), "units", 2, IMAGE)
    assert part(nn.Conv2d(4, 1, 7, padding=3), "height", 2, IMAGE) is None, "4 rows of outputs look at 10, of 8"
    assert part(nn.LSTM(6, 8, 2), "layer", 3, (12, 4, 6)) is None, "two layers for three ranks"


def test_a_layer_of_a_stack_is_its_part_and_a_chunk_a_part_of_that() -> None:
    x, net = torch.ones(64, 4, 6), nn.LSTM(6, 8, 2)
    layer = part_of(net, ((x,), {}), "layer", 2, copies=False)
    chunk = part_of(net, ((x,), {}), "chunk", 2, copies=False)
    assert layer is not None
    assert chunk is not None
    assert layer[0] == 0.5
    assert 0 < chunk[0] <= 0.25
    assert (chunk[0] * 2 * 64).is_integer(), "so many moments of 64"
    assert all(seconds > 0 for made in (layer, chunk) for seconds in made[1].run())


def test_a_window_is_as_high_as_it_reaches() -> None:
    assert window(nn.Conv2d(1, 1, 3, dilation=2)) == (5, 1)
    assert window(nn.Conv2d(1, 1, (3, 5), stride=(1, 2)), 1) == (5, 2)
    assert window(nn.MaxPool2d(3)) == (3, 3)
    assert window(nn.ReLU()) is None
