"""Which rows a rank makes and needs, against every window walked through one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from apportion.parallel.spatial.geometry import (
    Bounds,
    RowRange,
    Transposed,
    Window,
    equal,
    halo_of,
    insides,
    mirrored,
    outputs_of,
    sizes,
    strip,
    wanted_by,
)

windows = st.builds(
    Window, st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.integers(0, 5)
)  # kernel, stride, dilation, before
transposed = st.builds(Transposed, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4))


@st.composite
def strips(draw: st.DrawFn, most: int = 30) -> Bounds:
    """Any strips: of very different sizes, some of no row."""
    length, ranks = draw(st.integers(1, most)), draw(st.integers(1, 6))
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1)))
    return (0, *inner, length)


def read(window: Window, output: int) -> list[int]:
    return [output * window.stride - window.before + j * window.dilation for j in range(window.kernel)]


@given(st.integers(0, 50), st.integers(1, 9))
def test_equal_strips_cover_every_row_once_and_differ_by_one(length: int, ranks: int) -> None:
    parts = sizes(equal(length, ranks))
    assert sum(parts) == length
    assert max(parts) - min(parts) <= 1


@given(windows, strips(), st.integers(0, 6), st.booleans())
def test_the_rows_that_outputs_read_are_those_of_their_windows(
    window: Window, bounds: Bounds, after: int, ceil: bool
) -> None:
    length = bounds[-1]
    outputs = window.outputs(length, after, ceil=ceil)
    made = outputs_of(window, bounds, outputs)
    assert made[0] == 0
    assert made[-1] == outputs
    assert min(sizes(made)) >= 0
    for rank, wanted in enumerate(wanted_by(window, bounds, made)):
        rows = strip(made, rank)
        walked = {row for o in range(*rows) for row in read(window, o)}
        reads = window.reads(rows)
        assert reads == (RowRange(min(walked), max(walked) + 1) if walked else RowRange(reads.start, reads.start))
        real = {row for row in walked if 0 <= row < length}
        assert real <= set(range(*wanted))
        assert wanted.n <= max(reads.n, 0)
        assert 0 <= wanted.start <= wanted.stop <= length


@given(windows, st.integers(1, 40), st.integers(0, 6))
def test_the_number_of_outputs_is_torchs(window: Window, length: int, after: int) -> None:
    if window.extent > length + window.before + after:
        assert window.outputs(length, after) == 0
        return
    x = F.pad(torch.zeros(1, 1, length), (window.before, after))
    made = F.conv1d(x, torch.zeros(1, 1, window.kernel), stride=window.stride, dilation=window.dilation)
    assert window.outputs(length, after) == made.shape[-1]


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.booleans())
def test_pooling_windows_are_torchs(
    length: int, kernel: int, stride: int, padding: int, ceil: bool, padded: bool
) -> None:
    padding = min(padding, kernel // 2)
    window = Window(kernel, stride, 1, padding)
    outputs = window.outputs(length, padding, ceil=ceil)
    if outputs == 0 or length + 2 * padding < kernel:
        return
    pool = nn.AvgPool1d(kernel, stride, padding, ceil, padded)
    means = pool(torch.ones(1, 1, length, dtype=torch.float64))[0, 0]
    assert outputs == len(means)
    counts = window.counts(RowRange(0, outputs), length, padding, padded=padded)
    real = [sum(0 <= row < length for row in read(window, o)) for o in range(outputs)]
    assert torch.allclose(means, torch.tensor([n / of for n, of in zip(real, counts, strict=True)]).double())


@given(transposed, strips())
def test_the_rows_that_a_transposed_convolution_needs_are_all_that_reach_its_outputs(
    layer: Transposed, bounds: Bounds
) -> None:
    length = bounds[-1]
    outputs = (length - 1) * layer.stride - 2 * layer.before + layer.extent
    if outputs < 1:
        return
    made = outputs_of(layer, bounds, outputs)
    assert sum(sizes(made)) == outputs
    for rank, wanted in enumerate(wanted_by(layer, bounds, made)):
        own = set(range(*strip(made, rank)))
        for row in range(length):
            reached = {row * layer.stride - layer.before + j * layer.dilation for j in range(layer.kernel)}
            assert not reached & own or row in range(*wanted)


@given(windows, strips(), st.integers(0, 4))
def test_a_halo_reaches_from_the_own_rows_to_those_that_are_wanted(window: Window, bounds: Bounds, after: int) -> None:
    made = outputs_of(window, bounds, window.outputs(bounds[-1], after))
    wanted = wanted_by(window, bounds, made)
    plan = halo_of(bounds, wanted)
    for rank, rows in enumerate(wanted):
        own = strip(bounds, rank)
        there = range(own.start - plan.before[rank], own.stop + plan.after[rank])
        assert set(range(*rows)) <= set(there)
        assert there.start >= 0
        assert there.stop <= bounds[-1]


@given(windows, strips(), st.integers(0, 5))
def test_own_rows_and_edges_together_are_the_convolution(window: Window, bounds: Bounds, after: int) -> None:
    """What ``strips_overlap`` does, with whole numbers for weights and rows."""
    length = bounds[-1]
    made = outputs_of(window, bounds, window.outputs(length, after))
    found = insides(window, bounds, made)
    if found is None:
        return
    image, weights = [row + 1 for row in range(length)], [7 * j + 1 for j in range(window.kernel)]

    def convolved(rows: dict[int, int], starts: list[int]) -> list[int]:
        return [sum(w * rows.get(start + j * window.dilation, 0) for j, w in enumerate(weights)) for start in starts]

    for rank, inside in enumerate(found):
        own, outputs = strip(bounds, rank), strip(made, rank)
        starts = [o * window.stride - window.before for o in range(*outputs)]
        assert starts[0] == own.start - inside.padding
        result = convolved({row: image[row] for row in range(*own)}, starts)
        for edge, begin in ((inside.above, None), (inside.below, own.stop)):
            if edge is None:
                continue
            first = own.start - edge.rows if begin is None else begin
            place = starts[edge.outputs.start] + edge.offset
            assert place == first
            assert starts[edge.outputs.stop - 1] + window.extent - starts[edge.outputs.start] == edge.length
            added = convolved(
                {row: image[row] for row in range(first, first + edge.rows)},
                starts[edge.outputs.start : edge.outputs.stop],
            )
            for at, value in zip(range(*edge.outputs), added, strict=True):
                result[at] += value
        assert result == convolved(dict(enumerate(image)), starts)


def test_a_same_convolution_on_even_strips_needs_only_neighbours() -> None:
    found = insides(Window(3, 1, 1, 1), (0, 128, 256), (0, 128, 256))
    assert found is not None
    assert found[0].above is None
    assert found[0].below is not None
    assert found[0].below.rows == 1
    assert found[1].below is None


def test_strips_stay_where_they_are_through_layers_that_keep_the_image() -> None:
    bounds = equal(256, 3)
    assert outputs_of(Window(3, 1, 1, 1), bounds, 256) == bounds
    halves = outputs_of(Window(3, 2, 1, 1), bounds, 128)
    assert max(sizes(halves)) <= 43


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 8))
def test_padding_comes_from_where_torch_takes_it(mode: str, length: int, before: int, after: int) -> None:
    most = {"reflect": length - 1, "circular": length, "replicate": 99}[mode]
    before, after = min(before, most), min(after, most)
    x = torch.arange(length, dtype=torch.float64).view(1, 1, -1)
    expected = F.pad(x, (before, after), mode=mode)[0, 0].tolist()
    assert mirrored(RowRange(-before, length + after), length, mode) == expected
