"""What images cost of which each rank has a strip, or some of the channels, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, bookkeeping, conv, layer, machine, network, terms

from apportion.cost_model.profile import LayerProfile
from apportion.cost_model.strategies import spatial
from apportion.strategies.conv_parallel import ConvParallel


def strip(*layers: LayerProfile, **where: Any) -> dict[str, float]:
    return terms(ConvParallel(), network(*layers), **{"memory_rate": 1e15, **where})


TWO = (conv("a", "x"), conv("b", "a"))


def test_a_row_of_each_neighbour_travels_forward_and_backward() -> None:
    """The first layer looks at the images, which every rank has. A rank in the middle has two neighbours at once."""
    assert strip(*TWO, hidden=0.0)["communicating"] == pytest.approx(0.2)
    assert strip(*TWO, hidden=0.0, ranks=4)["communicating"] == pytest.approx(0.4)
    wide = (TWO[0], conv("b", "a", image=(8, 5, 1)))
    assert strip(*wide, hidden=0.0)["communicating"] == pytest.approx(0.4), "two rows"
    # While it travels the inside is computed.
    assert strip(*TWO)["communicating"] == pytest.approx(0.0)
    assert strip(*TWO, bandwidth=1e7)["communicating"] > 2 * 10.0 - 6.0


def test_the_rank_with_most_rows_is_shown_and_edges_are_computed_by_themselves() -> None:
    """Of 8 rows three ranks have 3, 3 and 2: both layers 3/8 of 6 s; and of each row at an edge, one third again."""
    own = 6.0 * 3 / 8
    assert strip(*TWO, ranks=3)["computing"] == pytest.approx(own * (1 + 2 / 3))
    assert strip(*TWO)["computing"] == pytest.approx(6.0 / 2 * (1 + 1 / 4)), "one edge each of two"


def test_what_is_beside_the_strips_is_laid_together_in_memory() -> None:
    """The second layer's inputs, 0.4 GB a rank, some times each way at 1 GB/s."""
    slow, fast = (strip(*TWO, memory_rate=rate)["computing"] for rate in (1e9, 1e15))
    assert 4 * 0.4 <= slow - fast <= 16 * 0.4
    assert bookkeeping(ConvParallel(), network(*TWO), machine(memory_rate=1e15)) > 4 * 20, "and in Python"


def test_weights_of_strips_are_summed_and_statistics_are_told() -> None:
    heavy = (replace(TWO[0], parameter_bytes=GB), TWO[1])
    assert strip(*heavy)["communicating"] == pytest.approx(1.0)
    norm = layer("n", "a", kind="BatchNorm2d", activation_bytes=8 * GB // 10)
    normed = (TWO[0], norm, conv("b", "n"))
    told = strip(*normed, latency=0.5)["communicating"] - strip(*TWO, latency=0.5)["communicating"]
    assert told == pytest.approx(2 * 2 * 0.5), "forward and backward, a sum of two messages"


def fc(source: str) -> LayerProfile:
    return layer("fc", source, kind="Linear", activation_bytes=GB, parameter_bytes=6 * GB, kept_bytes=10)


def test_a_layer_behind_the_image_takes_its_inputs_in_parts_and_sums_its_outputs() -> None:
    flat = layer("flat", "b", kind="flatten", activation_bytes=8 * GB // 10, kept_bytes=100)
    joined = strip(*TWO, flat, fc("flat"), hidden=0.0)
    assert joined["communicating"] == pytest.approx(0.2 + 1.0)
    pool = layer("pool", "b", kind="AdaptiveAvgPool2d", activation_bytes=8)
    assert strip(*TWO, pool, fc("pool"), hidden=0.0)["communicating"] == pytest.approx(0.2)
    seen = network(*TWO, flat, fc("flat"))
    held = ConvParallel().cost(seen, machine(ranks=1, hosts=2)).memory
    assert held["weights"] == 3 * GB, "each rank has the columns of its own inputs"
    assert held["activations"] == 50 + 10


def channels(*layers: LayerProfile) -> dict[str, float]:
    return terms(ConvParallel(split="channel"), network(*layers), memory_rate=1e15)


def test_channels_are_summed_after_every_second_convolution() -> None:
    """Cut by filters, then by what it looks at: outputs of the second are summed, and so are the gradients of what the
    third is given. The first looks at the images, whose gradient nobody needs."""
    four = [conv(n, s, parameter_bytes=4) for n, s in (("a", "x"), ("b", "a"), ("c", "b"), ("d", "c"))]
    found = channels(*four)
    assert found["communicating"] == pytest.approx(0.8 + 0.8 + 0.8)
    assert found["computing"] == pytest.approx(12.0 / 2, rel=1e-3)
    one = channels(four[0], layer("flat", "a", kind="flatten"), fc("flat"))
    assert one["communicating"] == pytest.approx(1.0), "a layer behind it goes on with its inputs in parts"
    slow = terms(ConvParallel(split="channel"), network(*four), memory_rate=1e9)["computing"]
    assert slow - 6.0 >= 3 * 0.8, "what is summed is copied"
    held = ConvParallel(split="channel").cost(network(*four), machine(ranks=1, hosts=2)).memory
    assert held["weights"] == 8


def test_only_what_moves_over_an_image_in_that_way_is_cut() -> None:
    only_height = network(conv("a", "x", ways=("height",)))
    assert spatial.images(only_height, "height") is not None
    assert spatial.images(only_height, "units") is None
    seen = network(
        conv("a", "x"), layer("act", "a", kind="ReLU"), conv("b", "act"), layer("v", "b", kind="view"), fc("v")
    )
    found = spatial.images(seen, "height")
    assert found is not None
    assert (found.cut, found.first, found.joined) == (4, 0, 4)
