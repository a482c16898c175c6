"""Compressed sums between hosts: what they send, what they leave out, and that it comes later."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import apart, on_ranks
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion import State, Workload
from apportion.comm.network.hierarchical_group import HierarchicalGroup
from apportion.comm.network.host_exchange import HostExchange, HostsGroup
from apportion.comm.network.network_group import NetworkGroup
from apportion.comm.network.rank_connection import RankConnection
from apportion.comm.network.rendezvous import meet
from apportion.comm.world import World
from apportion.core.value import names, parse
from apportion.parallel.compression.coded_sum import PIECE, CodedSum, Rounded
from apportion.parallel.compression.compression import METHODS, Compression, compression
from apportion.parallel.compression.methods.int8 import _Blocks
from apportion.parallel.compression.methods.top_k import _Largest
from apportion.strategies.data_parallel import DataParallel

EACH = ["fp16", "bf16", "int8", "int8(block=64)", "top_k(fraction=0.1)", "power_sgd", "power_sgd(rank=4)"]
SHAPES = [torch.Size(shape) for shape in ((40, 30), (40,), (8, 3, 5, 5), (2, 2), (1,), (301,))]
TOTAL = sum(shape.numel() for shape in SHAPES)


# Values


def test_the_methods_are_those_that_these_tests_try() -> None:
    assert {text.partition("(")[0] for text in EACH} == set(names(METHODS))


@pytest.mark.parametrize("text", EACH)
def test_a_strategy_takes_a_compression_in_any_form_and_is_written_with_it(text: str) -> None:
    value = parse(text, METHODS)
    strategy = DataParallel(compress=text)
    assert strategy == DataParallel(compress=value) == parse(f"data_parallel(compress={text})", "apportion.strategies")
    assert strategy == parse(f"data_parallel(compress='{text}')", "apportion.strategies")
    assert str(strategy) == f"data_parallel(compress={text})"
    assert not strategy.exact


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("fp61", "unknown compression 'fp61': did you mean fp16?"),
        ("data_parallel", "unknown compression"),
        ("int8(block=0)", "block=0 must be a whole number of at least 8"),
        ("top_k(fraction=0)", "fraction=0 must be above 0"),
        ("top_k(fraction=1.5)", "at most 1"),
        ("power_sgd(rank=0)", "rank=0 must be a whole number"),
        ("power_sgd(min_compression_rate=0.5)", "min_compression_rate=0.5 must be a number of at least 1"),
        (3, "compress=3 must be a compression"),
    ],
)
def test_what_is_no_compression_is_refused(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        DataParallel(compress=given)


def test_replicas_of_several_workers_are_not_compressed() -> None:
    from apportion.strategies.pipeline_parallel import PipelineParallel

    with pytest.raises(ValueError, match="compress="):
        DataParallel(of=PipelineParallel(), compress="fp16")


# Codes

numbers = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=700)


@given(values=numbers, block=st.sampled_from([8, 64, 256]), dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=50, deadline=None)
def test_a_whole_number_is_off_by_half_of_its_blocks_scale(values: list[float], block: int, dtype: torch.dtype) -> None:
    given, codec = torch.tensor(values, dtype=dtype), _Blocks(block)
    code = torch.zeros(-(-codec.nbytes(len(values), dtype.itemsize) // 8) * 8, dtype=torch.uint8)
    codec.encode(given, code)
    found = torch.zeros_like(given)
    codec.add(code, found, times=2.0)
    for part, told in zip(given.split(block), found.split(block), strict=True):
        assert ((part - told / 2).abs() <= part.abs().max() / 127 * 0.5001 + 1e-30).all()


@given(values=numbers, fraction=st.sampled_from([0.01, 0.3, 1.0]))
@settings(max_examples=50, deadline=None)
def test_the_largest_numbers_travel_whole(values: list[float], fraction: float) -> None:
    given, codec = torch.tensor(values), _Largest(fraction)
    code = torch.zeros(-(-codec.nbytes(len(values), 4) // 8) * 8, dtype=torch.uint8)
    codec.encode(given, code)
    found = torch.zeros_like(given)
    codec.add(code, found)
    kept = max(1, round(len(values) * fraction))
    assert sorted(found[found != 0].abs().tolist()) == sorted(
        x for x in given.abs().sort(descending=True).values[:kept].tolist() if x
    )
    assert (found[found != 0] == given[found != 0]).all()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_a_shorter_number_is_rounded(dtype: torch.dtype, most: float) -> None:
    given, codec = torch.randn(1001) * 3, Rounded(dtype)
    code = torch.zeros(2008, dtype=torch.uint8)
    codec.encode(given, code)
    found = torch.zeros(1001)
    codec.add(code, found)
    assert ((found - given).abs() <= given.abs() * most + 1e-7).all()
    assert (found != given).any()


# Sums in one process


class OneHost(HostExchange):
    """A host whose peers send what it sends."""

    host, hosts = 0, 2

    def own(self, flat: Tensor) -> Tensor:
        return flat

    def begin_gather(self, rows: Tensor) -> Callable[[], None]:
        rows[1].copy_(rows[0])
        return lambda: None

    def swap(self, rows: Tensor, into: Tensor) -> None:
        raise AssertionError("two hosts gather")

    def share(self, flat: Tensor) -> None:
        pass

    def add_up(self, flat: Tensor) -> None:
        flat.mul_(2.0)


@pytest.mark.parametrize("text", ["int8", "top_k(fraction=0.1)", "power_sgd"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_once_and_is_over(text: str, bad: float) -> None:
    between, hosts = parse(text, METHODS).between(SHAPES, torch.float32), OneHost()
    for step in range(4):
        flat = torch.randn(TOTAL, generator=torch.Generator().manual_seed(step))
        if step == 1:
            flat[7] = bad
        between(flat, hosts)
        assert bool(flat.isfinite().all()) == (step != 1)


def test_a_matrix_that_factors_would_hardly_make_smaller_travels_whole() -> None:
    given = torch.randn(TOTAL, generator=torch.Generator().manual_seed(0))
    for rate, first_is_whole in ((8.0, False), (9.0, True)):  # 40 x 30 numbers by 2 columns of 40 and of 30 are 8.6
        flat = given.clone()
        method = parse(f"power_sgd(min_compression_rate={rate})", METHODS)
        method.between(SHAPES, torch.float32)(flat, OneHost())
        assert torch.equal(flat[1200:], 2.0 * given[1200:])
        assert torch.equal(flat[:1200], 2.0 * given[:1200]) is first_is_whole
        assert (method.sent(1200, 4) == 4800.0) is first_is_whole


def test_zeros_stay_zeros_and_what_comes_after_them_is_sent() -> None:
    for text in EACH:
        between, hosts = parse(text, METHODS).between(SHAPES, torch.float32), OneHost()
        flat = torch.zeros(TOTAL)
        for _ in range(2):
            between(flat, hosts)
            assert not flat.any(), text
        flat = torch.randn(TOTAL, generator=torch.Generator().manual_seed(0))
        given = flat.clone()
        between(flat, hosts)
        assert flat @ given > 0.1 * given @ given, text


# Sums of ranks


def joined(world: World, hosts: list[int] | None) -> HostsGroup:
    flat = NetworkGroup(meet(world.rank, world.size, one_host=True, insecure=False), range(world.size))
    if hosts is None:
        return flat
    group = HierarchicalGroup.make(flat, hosts, spins=False)
    assert isinstance(group, HierarchicalGroup)
    return group


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(TOTAL, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def sums(world: World, texts: list[str], steps: int, hosts: list[int] | None) -> dict[str, list[Tensor]]:
    """What each compression makes of some steps' gradients, and then of as many of zeros; by the main thread and by a
    lane in turn."""
    group = joined(world, hosts)
    lane, found = group.lane(), {}
    assert isinstance(lane, HostsGroup)
    for text in texts:
        between = parse(text, METHODS).between(SHAPES, torch.float64)
        found[text] = []
        for step in range(2 * steps):
            flat = gradient(world.rank, step) if step < steps else torch.zeros(TOTAL, dtype=torch.float64)
            (lane if step % 2 else group).all_reduce_between(flat, between).wait()
            found[text].append(flat)
    lane.close()
    group.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("hosts", [None, [0, 0, 1], [0, 0, 1, 1], [0, 1, 2], [0, 0, 0, 1, 1, 2]])
@pytest.mark.thorough
def test_all_ranks_have_the_same_bits_and_what_is_left_out_comes_later(hosts: list[int] | None) -> None:
    size, steps = (2, 30) if hosts is None else (len(hosts), 30)
    each = on_ranks(sums, size, EACH, steps, hosts)
    for text in EACH:
        for rank in range(1, size):
            assert all(torch.equal(a, b) for a, b in zip(each[0][text], each[rank][text], strict=True)), (text, rank)
        given = torch.stack([sum(gradient(rank, step) for rank in range(size)) for step in range(steps)])
        told = torch.stack(each[0][text])
        off = (told.sum(0) - given.sum(0)).norm() / given.sum(0).norm()
        first = (told[:steps] - given).norm() / given.norm()
        assert first > 1e-5, f"{text} does not compress"
        if parse(text, METHODS).keeps_errors:
            assert off < 0.02, (text, off)
            assert off < 0.2 * (told[:steps].sum(0) - given.sum(0)).norm() / given.sum(0).norm() + 1e-3, text
        else:
            assert off < 0.004, (text, off)


def large(rank: int, step: int) -> Tensor:
    return torch.randn(3 * PIECE + 77, generator=torch.Generator().manual_seed(100 * step + rank))


def large_sums(world: World, text: str, steps: int, hosts: list[int] | None) -> list[Tensor]:
    """Of tensors that go in several pieces."""
    group, found = joined(world, hosts), []
    lane = group.lane()
    assert isinstance(lane, HostsGroup)
    between = parse(text, METHODS).between([torch.Size((3 * PIECE + 77,))], torch.float32)
    for step in range(steps):
        found.append(large(world.rank, step))
        (lane if step % 2 else group).all_reduce_between(found[-1], between).wait()
    lane.close()
    group.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("hosts", [None, [0, 0, 1, 1], [0, 0, 1], [0, 1, 2]])
@pytest.mark.parametrize(("text", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_large_tensor_is_the_sum_of_its_rounded_numbers(
    text: str, dtype: torch.dtype, hosts: list[int] | None
) -> None:
    """Bit by bit where there are two hosts; the sum of three is rounded once more."""
    of_rank, steps = [0, 1] if hosts is None else hosts, 4
    each = on_ranks(large_sums, len(of_rank), text, steps, hosts)
    for step in range(steps):
        given = [large(rank, step) for rank in range(len(of_rank))]
        hosted = [sum(g for g, at in zip(given, of_rank, strict=True) if at == host) for host in sorted({*of_rank})]
        expected = sum(total.to(dtype).float() for total in hosted if isinstance(total, Tensor))
        for found in each:
            assert torch.equal(found[step], each[0][step])
            if len(hosted) == 2:
                assert torch.equal(found[step], expected)
            else:
                assert (found[step] - expected).norm() < 0.01 * expected.norm()


def count_bytes(world: World, texts: list[str], hosts: list[int] | None) -> dict[str, int]:
    """The bytes that this rank sends through connections for the second of two sums."""
    made: list[RankConnection] = []
    begin = RankConnection.__init__
    RankConnection.__init__ = lambda self, *given: (begin(self, *given), made.append(self))[0]  # type: ignore[method-assign, assignment]
    group, found = joined(world, hosts), {}
    for text in texts:
        between = parse(text, METHODS).between([torch.Size((300, 400))], torch.float32)
        for _ in range(2):
            before = sum(connection.gone for connection in made)
            group.all_reduce_between(torch.ones(120_000), between).wait()
            found[text] = sum(connection.gone for connection in made) - before
    group.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("hosts", "passes"), [([0, 1], 1.0), ([0, 1, 2], 4 / 3), ([0, 0, 1, 1], 1.0)])
def test_a_host_sends_what_the_price_says(hosts: list[int], passes: float) -> None:
    each = on_ranks(count_bytes, len(hosts), EACH, hosts if len(set(hosts)) < len(hosts) else None)
    for text in EACH:
        found = sum(told[text] for rank, told in enumerate(each) if hosts[rank] == 0)
        method = parse(text, METHODS)
        to_all = text.startswith(("top_k", "power_sgd"))  # factors are small messages
        expected = method.sent(120_000, 4) * (len(set(hosts)) - 1 if to_all else passes)
        assert expected * 0.9 <= found <= expected * 1.1 + 64, (text, found, expected)


def test_a_compression_says_what_it_is() -> None:
    assert compression(None) is None
    assert isinstance(compression("fp16"), Compression)
    assert isinstance(parse("fp16", METHODS).between(SHAPES, torch.float32), CodedSum)


# Training


def workload(seed: int = 0) -> Workload:
    data: Any = load_digits()
    x, y = torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)
    return Workload(
        model=lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)),
        data=lambda: TensorDataset(x, y),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=64,
        steps=120,
        seed=seed,
    )


Given = tuple[str | None, list[int], State | None]
"""A compression, the steps after which the state is taken, and the state to begin with."""


def trained(world: World, runs: list[Given]) -> list[tuple[list[State], float, list[str]]]:
    """For each run its states, the mean loss of its last 20 steps, and what was warned of."""
    own, found = apart() if world.size > 1 else World(), []
    for text, stops, start in runs:
        states, losses = [], []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = DataParallel(compress=text).build(workload(), own)
            if start is not None:
                step.load_state_dict(start)
            for stop in stops:
                losses += [step(batch)["loss"].item() for batch in apportion.batches(step, stop=stop)]
                states.append(step.state_dict())
            step.close()
        found.append((states, sum(losses[-20:]) / 20, [str(warning.message) for warning in told]))
    own.close()
    return found


@pytest.mark.processes
@pytest.mark.thorough
def test_a_network_learns_as_well_with_it() -> None:
    ranks = on_ranks(trained, 2, [(text, [120], None) for text in (None, *EACH)])
    (exact, least, _), *others = ranks[0]
    for text, (states, loss, _), (same, _, _) in zip(EACH, others, ranks[1][1:], strict=True):
        assert loss < 1.5 * least + 0.05, (text, loss, least)
        for key, value in states[0].model.items():
            assert torch.equal(value, same[0].model[key]), (text, key)
            assert not torch.equal(value, exact[0].model[key]), f"{text} compressed nothing"


@pytest.mark.processes
@pytest.mark.thorough
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_never_stopped() -> None:
    texts = ["int8", "top_k(fraction=0.1)", "power_sgd"]
    runs = on_ranks(trained, 3, [(text, [20, 40], None) for text in texts])[0]
    halves = [half for (half, _), _, _ in runs]
    assert all(any(name.startswith("compress/") for name in half.optimizer) for half in halves)
    again = on_ranks(trained, 3, [(text, [40], half) for text, half in zip(texts, halves, strict=True)])[0]
    for text, ((_, whole), _, _), ((other,), _, told) in zip(texts, runs, again, strict=True):
        assert not told
        for name, tensor in whole.tensors():
            assert torch.equal(tensor, dict(other.tensors())[name]), (text, name)


@pytest.mark.processes
@pytest.mark.thorough
def test_another_number_of_hosts_begins_with_nothing_left_out_and_says_so() -> None:
    ((state,), _, _) = on_ranks(trained, 3, [("int8", [5], None)])[0][0]
    none_left = replace(state, optimizer={k: v for k, v in state.optimizer.items() if not k.startswith("compress/")})
    assert len(none_left.optimizer) < len(state.optimizer)
    runs = [*((text, [6], state) for text in ("int8", "top_k", None)), ("int8", [6], none_left)]
    first, second = on_ranks(trained, 2, runs)
    assert [told for _, _, told in second] == [[]] * 4, "rank 0 says it"
    (whole,), (other,), nothing, _ = (told for _, _, told in first)
    for key, value in first[3][0][0].model.items():
        assert torch.equal(first[0][0][0].model[key], value), f"{key}: something of other hosts was added"
    assert "saved with compress=int8 on hosts [0, 1, 2], and goes on with compress=int8 on hosts [0, 1]:" in whole
    assert "goes on with compress=top_k on hosts [0, 1]:" in other
    assert not nothing, "without a compression what was left out is not asked for"


@pytest.mark.processes
@pytest.mark.thorough
def test_sums_of_other_numbers_begin_with_nothing_left_out_and_say_so() -> None:
    ((state,), _, _) = on_ranks(trained, 2, [("int8", [5], None)])[0][0]
    assert sum(state.settings["compress"]["numbers"]) == sum(t.numel() for t in state.model.values())
    kept = {"compress": {**state.settings["compress"], "numbers": [12]}}
    other = replace(state, settings={**state.settings, **kept})
    none_left = replace(state, optimizer={k: v for k, v in state.optimizer.items() if not k.startswith("compress/")})
    first, _ = on_ranks(trained, 2, [("int8", [6], other), ("int8", [6], none_left), ("int8", [6], state)])
    (told,) = first[0][2]
    assert "goes on with compress=int8 on hosts [0, 1], whose sums are of [" in told
    assert "and not of [12]:" in told
    assert not first[2][2]
    for key, value in first[1][0][0].model.items():
        assert torch.equal(first[0][0][0].model[key], value), f"{key}: something of other sums was added"


def refused(world: World) -> str:
    own = apart(over="ProcessGroup")
    try:
        DataParallel(compress="int8").build(workload(), own)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.thorough
def test_ranks_that_meet_over_torch_distributed_are_refused() -> None:
    for told in on_ranks(refused, 2):
        assert "compress=int8 is for ranks on CPUs" in told
