"""Examples are dealt: every one exactly once an epoch, whatever their number, the batch and the workers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.core.rng import mix
from apportion.core.sampler import DataShard, Sampler, split

sizes = st.integers(1, 300)
ranks = st.integers(1, 9)
orders = st.sampled_from(["shuffled", "sequential"])


@given(examples=sizes, batch=st.integers(1, 70), workers=ranks, order=orders, seed=st.integers(0, 2**40), epoch=ranks)
def test_every_example_is_dealt_once_an_epoch(
    examples: int, batch: int, workers: int, order: str, seed: int, epoch: int
) -> None:
    deal = Sampler(examples, batch, order=order, seed=seed)  # type: ignore[arg-type]
    dealt: list[int] = []
    for step in range(epoch * deal.batches, (epoch + 1) * deal.batches):
        assert deal.place(step) == (epoch, step - epoch * deal.batches)
        whole = deal.index(step)
        assert len(whole) == deal.size(step)
        parts = [whole[deal.shard(step, DataShard(rank, workers))[1]] for rank in range(workers)]
        assert np.array_equal(np.concatenate(parts), whole)
        dealt += whole.tolist()
    assert sorted(dealt) == list(range(examples))


@given(examples=sizes, lanes=st.integers(1, 70), workers=ranks)
def test_every_lane_walks_through_its_own_stretch(examples: int, lanes: int, workers: int) -> None:
    deal = Sampler(examples, lanes, order="sequential", lanes=True)
    walks: dict[int, list[int]] = {}
    owner: dict[int, int] = {}
    for step in range(deal.batches):
        whole = deal.index(step)
        assert len(whole) == deal.size(step)
        for lane, example in enumerate(whole.tolist()):
            walks.setdefault(lane, []).append(example)
        for rank in range(workers):
            _, rows = deal.shard(step, DataShard(rank, workers))
            for lane in range(rows.start, rows.stop):
                assert owner.setdefault(lane, rank) == rank, "a lane stays with its rank"
    assert sorted(e for walk in walks.values() for e in walk) == list(range(examples))
    assert all(b == a + 1 for walk in walks.values() for a, b in pairwise(walk))
    lengths = [len(walk) for walk in walks.values()]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(rows=st.integers(0, 500), workers=ranks)
def test_equal_shares_are_contiguous_and_differ_by_one_row_at_most(rows: int, workers: int) -> None:
    slices = [DataShard(rank, workers).rows(rows) for rank in range(workers)]
    assert slices[0].start == 0
    assert slices[-1].stop == rows
    assert all(a.stop == b.start for a, b in pairwise(slices))
    lengths = [s.stop - s.start for s in slices]
    assert max(lengths) - min(lengths) <= 1


@given(
    rows=st.integers(0, 500), shares=st.lists(st.floats(0, 10), min_size=1, max_size=8).filter(lambda s: sum(s) > 0.1)
)
def test_unequal_shares_take_their_part(rows: int, shares: list[float]) -> None:
    made = [DataShard(i, len(shares), shares=tuple(shares)) for i in range(len(shares))]
    slices = [shard.rows(rows) for shard in made]
    assert slices[0].start == 0
    assert slices[-1].stop == rows
    assert all(a.stop == b.start for a, b in pairwise(slices))
    for taken, share in zip(slices, shares, strict=True):
        assert abs((taken.stop - taken.start) - rows * share / sum(shares)) <= 1.001


@given(examples=sizes, batch=st.integers(1, 40), workers=ranks)
def test_whole_batches_are_dealt_out_in_turn(examples: int, batch: int, workers: int) -> None:
    deal, dealt = Sampler(examples, batch, seed=5), []
    for step in range(deal.batches):
        for rank in range(workers):
            number, rows = deal.shard(step, DataShard(rank, workers, whole_batches=True))
            assert rows == slice(0, deal.size(number))
            dealt.append(number)
    assert dealt == list(range(deal.batches * workers))


def test_the_order_is_a_function_of_seed_and_step() -> None:
    straight, jumping = Sampler(1000, 64, seed=7), Sampler(1000, 64, seed=7)
    expected = [straight.index(step).tolist() for step in range(48)]
    for step in (47, 3, 17, 16, 15, 31, 0, 32):
        assert jumping.index(step).tolist() == expected[step]
    assert Sampler(1000, 64, seed=8).index(0).tolist() != expected[0]
    assert expected[16] != expected[0], "every epoch has an order of its own"


def test_the_shuffle_is_even() -> None:
    """How often each of 20 examples comes in each place, over 4000 epochs: chi-squared with 361 degrees of freedom."""
    counts, epochs = np.zeros((20, 20)), 4000
    deal = Sampler(20, 20, seed=11)
    for epoch in range(epochs):
        counts[np.arange(20), deal.index(epoch)] += 1
    expected = epochs / 20
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 361) < 5 * np.sqrt(2 * 361)


@given(n=st.integers(0, 100), parts=st.integers(1, 20))
def test_a_split_leaves_no_row_and_no_empty_part(n: int, parts: int) -> None:
    pieces = split(n, parts)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(n))
    assert all(piece.stop > piece.start for piece in pieces)
    assert len(pieces) == min(n, parts)


def test_mix_tells_numbers_apart() -> None:
    seeds = {mix(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(1, 2) == 6804074658870690613, "the same on every machine, and in every version: runs resume"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"index": 2, "of": 2}, "index must be in 0..1"),
        ({"index": 0, "of": 2, "shares": (1.0,)}, "must be 2 numbers"),
        ({"index": 0, "of": 2, "shares": (1.0, -1.0)}, "at least 0"),
        ({"index": 0, "of": 2, "shares": (0.0, 0.0)}, "one of them above 0"),
    ],
)
def test_a_share_that_is_none_is_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DataShard(**fields)  # type: ignore[arg-type]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        Sampler(0, 4)
