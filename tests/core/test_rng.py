"""Draws for augmentation: the same however the batch is split, and well distributed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.core.rng import RngState, fork_host_rng, plain_rng_states, seed_host
from apportion.core.sampler import Draws


def draws(index: object, *, seed: int = 1, epoch: int = 0, dtype: torch.dtype = torch.float64) -> Draws:
    return Draws(seed, epoch, np.asarray(index, dtype=np.int64), dtype=dtype)


@given(
    index=st.lists(st.integers(0, 2**40), min_size=1, max_size=30),
    cut=st.integers(0, 30),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 1000),
)
def test_a_split_batch_draws_what_the_whole_one_does(index: list[int], cut: int, seed: int, epoch: int) -> None:
    whole = draws(index, seed=seed, epoch=epoch)
    parts = [draws(part, seed=seed, epoch=epoch) for part in (index[:cut], index[cut:])]
    for ask in (
        lambda d: d.uniform(2, 3),
        lambda d: d.normal(),
        lambda d: d.integers(-3, 9, 4),
        lambda d: d.bernoulli(0.3, 2),
        lambda d: d.uniform(),
    ):
        assert torch.equal(ask(whole), torch.cat([ask(part) for part in parts]))


def test_every_key_gives_numbers_of_its_own() -> None:
    index = np.arange(50)
    drawn = [draws(index, seed=seed, epoch=epoch).uniform(20) for seed in range(4) for epoch in range(4)]
    assert len(torch.stack(drawn).unique()) == 4 * 4 * 50 * 20
    one = draws(index)
    calls = torch.stack([one.uniform(20) for _ in range(5)])
    assert len(calls.unique()) == 5 * 50 * 20


def test_uniform_has_the_moments_of_a_uniform() -> None:
    u = draws(np.arange(20000)).uniform(10).flatten()
    n = len(u)
    for power in range(1, 5):
        spread = np.sqrt((1 / (2 * power + 1) - 1 / (power + 1) ** 2) / n)
        assert abs(u.pow(power).mean().item() - 1 / (power + 1)) < 5 * spread
    counts = torch.histc(u, 100, 0, 1)
    assert abs(((counts - n / 100) ** 2 / (n / 100)).sum().item() - 99) < 5 * np.sqrt(2 * 99)


def test_normal_has_the_moments_of_a_normal() -> None:
    z = draws(np.arange(20000)).normal(10).flatten()
    n = len(z)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(z.pow(power).mean().item() - moment) < 5 * np.sqrt(variance / n)
    assert z.isfinite().all()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_examples_calls_epochs_and_seeds_are_uncorrelated() -> None:
    n, many = 5000, 8
    made = draws(np.arange(n))
    first, second = made.uniform(many), made.uniform(many)
    bound = 5 / np.sqrt(n * many)
    assert abs(correlation(first, second)) < bound
    assert abs(correlation(first[:-1], first[1:])) < bound  # neighbours in the data set
    assert abs(correlation(first[:, :-1], first[:, 1:])) < bound
    assert abs(correlation(first, draws(np.arange(n), epoch=1).uniform(many))) < bound
    assert abs(correlation(first, draws(np.arange(n), seed=2).uniform(many))) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_uniform_stays_below_1_in_every_type(dtype: torch.dtype) -> None:
    u = draws(np.arange(4000), dtype=dtype).uniform(100)
    assert u.dtype == dtype
    assert (u >= 0).all()
    assert (u < 1).all()
    assert u.double().max() > 0.99


@given(low=st.integers(-1000, 1000), width=st.integers(1, 2000))
def test_integers_keep_their_range(low: int, width: int) -> None:
    drawn = draws(np.arange(200)).integers(low, low + width, 3)
    assert drawn.dtype == torch.int64
    assert drawn.shape == (200, 3)
    assert drawn.min() >= low
    assert drawn.max() < low + width


def test_integers_and_bernoulli_are_even() -> None:
    counts = torch.bincount(draws(np.arange(10000)).integers(0, 6, 6).flatten(), minlength=6).double()
    assert abs(((counts - 10000) ** 2 / 10000).sum().item() - 5) < 5 * np.sqrt(10)
    share = draws(np.arange(10000)).bernoulli(0.2, 4).double().mean().item()
    assert abs(share - 0.2) < 5 * np.sqrt(0.16 / 40000)


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="high must be above low"):
        draws([0]).integers(3, 3)


def test_the_numbers_never_change() -> None:
    """A run that is resumed with a later version draws the same."""
    assert draws([5, 7], seed=3, epoch=2).integers(0, 1000, 3).tolist() == NUMBERS


NUMBERS = [[432, 269, 301], [417, 98, 170]]


@pytest.mark.parametrize(
    "draw", [random.random, random.gauss, np.random.rand, np.random.randn, lambda: torch.rand(1)],
    ids=["random", "gauss", "rand", "randn", "torch"],
)  # fmt: skip
def test_what_the_generators_are_at_is_the_same_until_one_of_them_draws(draw: Callable[..., object]) -> None:
    with fork_host_rng():
        seed_host(3)
        before, plain = RngState.now(), plain_rng_states()
        assert RngState.now().fingerprint() == before.fingerprint()
        assert plain_rng_states() == plain
        draw()
        assert RngState.now().fingerprint() != before.fingerprint()
        assert (plain_rng_states() != plain) == (not isinstance(draw(), torch.Tensor))
        before.restore()
        assert RngState.now().fingerprint() == before.fingerprint()
        assert plain_rng_states() == plain


def test_another_kind_of_numpys_generators_is_seen_to_draw_too() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        before = plain_rng_states()
        assert plain_rng_states() == before
        np.random.rand()
        assert plain_rng_states() != before
    finally:
        np.random.set_bit_generator(usual)
