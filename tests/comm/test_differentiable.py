"""Collectives that gradients flow through, against the same function on one process; on real processes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import apart, on_ranks
from torch import Tensor

from apportion.comm.differentiable import (  # fmt: skip
    all_gather,
    copy_to,
    gather_from,
    gather_rows,
    halo,
    received,
    reduce_from,
    reduce_scatter,
    scatter_to,
    sent,
)
from apportion.comm.group import broadcast_message, broadcast_tensors
from apportion.comm.world import World

pytestmark = pytest.mark.processes


def function(rows: Tensor) -> Tensor:
    """Couples every row with every other."""
    return (torch.tanh(rows @ rows.t()).square().sum(1) * torch.linspace(1, 2, len(rows), dtype=rows.dtype)).sum()


def share(rank: int, sizes: tuple[int, ...]) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def gathered_gradient(world: World, whole: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    own = whole[share(world.rank, sizes)].clone().requires_grad_()
    value = function(gather_rows(own, world.group()))
    value.backward()
    assert own.grad is not None
    return value.detach(), own.grad


@pytest.mark.parametrize("sizes", [(3, 3), (4, 1, 2), (2, 0, 3), (0, 1)])
def test_gathered_rows_have_the_gradient_of_one_process(sizes: tuple[int, ...]) -> None:
    whole = torch.randn(sum(sizes), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = whole.clone().requires_grad_()
    value = function(alone)
    value.backward()
    assert alone.grad is not None
    for rank, (found, gradient) in enumerate(on_ranks(gathered_gradient, len(sizes), whole, sizes)):
        torch.testing.assert_close(found, value.detach(), rtol=1e-14, atol=0)
        torch.testing.assert_close(gradient, alone.grad[share(rank, sizes)], rtol=1e-13, atol=1e-15)


def numeric_gradient(world: World) -> bool:
    own = torch.randn(2 + world.rank, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank))
    own.requires_grad_()
    group, error = world.group(), 0.0
    function(gather_rows(own, group)).backward()
    for rank in range(group.size):  # one element at a time is moved, on one rank, while all take part
        for place in range((2 + rank) * 3):
            values = []
            for moved in (1e-6, -1e-6):
                probe = own.detach().clone()
                if world.rank == rank:
                    probe.view(-1)[place] += moved
                values.append(function(gather_rows(probe, group)).item())
            if world.rank == rank:
                assert own.grad is not None
                error = max(error, abs((values[0] - values[1]) / 2e-6 - own.grad.view(-1)[place].item()))
    return error < 1e-6


def test_the_gradient_is_that_of_finite_differences() -> None:
    assert on_ranks(numeric_gradient, 3) == [True] * 3


# Every function by torch's own gradcheck: each rank differentiates the same whole function, in lockstep


def checked(world: World, which: str, sizes: tuple[int, ...], dim: int) -> bool:
    """Of one value that is a function of every rank's inputs, which all ranks know."""
    group, rank = world.group(), world.rank
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def shape(rows: int) -> tuple[int, ...]:
        return (rows, 2) if dim == 0 else (2, rows)

    whole, own = shape(sum(sizes)), shape(sizes[rank])
    weights = [random(*whole) for _ in range(group.size)]

    def local(x: Tensor) -> Tensor:
        """A function that differs between ranks, and uses its argument twice."""
        weight = weights[rank].view(-1)[: x.numel()].view(x.shape)
        return (torch.tanh(x * weight) * x).sum()

    def alike(x: Tensor) -> Tensor:
        return (torch.tanh(x * weights[0]) * x).sum()

    def parts_of(flat: Tensor) -> Tensor:
        """This rank's part, out of all ranks' parts one behind the other."""
        start = sum(sizes[:rank]) * 2
        return copy_to(flat, group)[start : start + sizes[rank] * 2].view(own)

    def each_whole(stack: Tensor) -> Tensor:
        return copy_to(stack, group)[rank]

    functions: dict[str, tuple[Any, Tensor]] = {
        "copy_to": (lambda x: reduce_from(local(copy_to(x, group)), group), random(*whole)),
        "reduce_from": (lambda x: alike(reduce_from(each_whole(x), group)), random(group.size, *whole)),
        "scatter_to": (lambda x: reduce_from(local(scatter_to(x, group, dim, sizes)), group), random(*whole)),
        "gather_from": (lambda x: alike(gather_from(parts_of(x), group, dim, sizes)), random(sum(sizes) * 2)),
        "all_gather": (
            lambda x: reduce_from(local(all_gather(parts_of(x), group, dim, sizes)), group), random(sum(sizes) * 2),
        ),
        "reduce_scatter": (
            lambda x: reduce_from(local(reduce_scatter(each_whole(x), group, dim, sizes)), group),
            random(group.size, *whole),
        ),
    }  # fmt: skip
    function, x = functions[which]
    twice = lambda x: function(x) + 0.5 * function(x)  # noqa: E731
    return torch.autograd.gradcheck(twice, (x.requires_grad_(),))


SIZES = [(2, 2), (3, 1), (0, 2), (1, 1, 1), (2, 0, 1), (0, 0, 2)]
FUNCTIONS = ["copy_to", "reduce_from", "scatter_to", "gather_from", "all_gather", "reduce_scatter"]


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_function_has_the_gradient_of_finite_differences(sizes: tuple[int, ...], dim: int) -> None:
    assert on_ranks(all_checked, len(sizes), FUNCTIONS, sizes, dim) == [[]] * len(sizes)


def all_checked(world: World, names: list[str], sizes: tuple[int, ...], dim: int) -> list[str]:
    return [name for name in names if not checked(world, name, sizes, dim)]


# Halos


@dataclass(frozen=True)
class Around:
    """Every rank's rows, and how many more each wants."""

    sizes: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def of(self, rank: int) -> slice:
        start = sum(self.sizes[:rank])
        return slice(start - self.before[rank], start + self.sizes[rank] + self.after[rank])


@st.composite
def arounds(draw: Any, ranks: int) -> Around:
    sizes = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    starts = [sum(sizes[:rank]) for rank in range(ranks)]
    before = [draw(st.integers(0, start)) for start in starts]
    after = [draw(st.integers(0, sum(sizes) - start - size)) for start, size in zip(starts, sizes, strict=True)]
    return Around(tuple(sizes), tuple(before), tuple(after))


def coupled(x: Tensor, rank: int, dim: int) -> Tensor:
    """A function of neighbouring rows, which differs between ranks."""
    return (torch.tanh(x.cumsum(dim)) * (x + 0.1 * rank)).sum()


def with_halos(world: World, cases: list[Around], dim: int) -> list[str]:
    """What is wrong, in values or gradients, against slices of the whole."""
    group, rank, wrong = world.group(), world.rank, []
    for case in cases:
        shape = [2, 3, 2]
        shape[dim] = sum(case.sizes)
        whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
        lengths = [slice(None)] * 3
        start = sum(case.sizes[:rank])
        lengths[dim] = slice(start, start + case.sizes[rank])
        own = whole.detach()[tuple(lengths)].clone().requires_grad_()
        found = halo(own, group, dim, case.before, case.after)
        (coupled(found, rank, dim) + coupled(own, 5, dim)).backward()
        parts = [list(lengths) for _ in case.sizes]
        total = whole.new_zeros(())
        for other, part in enumerate(parts):
            first = sum(case.sizes[:other])
            part[dim] = slice(first, first + case.sizes[other])
            total = total + coupled(whole[tuple(part)], 5, dim)
            part[dim] = case.of(other)
            total = total + coupled(whole[tuple(part)], other, dim)
        total.backward()
        assert whole.grad is not None
        assert own.grad is not None
        if not torch.equal(found, whole[tuple(parts[rank])]):
            wrong.append(f"{case}: rows")
        if not torch.allclose(own.grad, whole.grad[tuple(lengths)], rtol=1e-12, atol=1e-13):
            wrong.append(f"{case}: gradients")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 4])
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_halo_is_a_slice_of_the_whole_in_values_and_gradients(ranks: int, data: Any) -> None:
    """Over several ranks too, and where ranks have no rows."""
    cases = data.draw(st.lists(arounds(ranks), min_size=8, max_size=15))
    dim = data.draw(st.sampled_from([0, 1, 2, -2]))
    assert on_ranks(with_halos, ranks, cases, dim % 3) == [[]] * ranks


def refused(world: World, around: Around) -> str:
    try:
        halo(torch.zeros(around.sizes[world.rank], 2), world.group(), 0, around.before, around.after)
    except ValueError as error:
        return str(error)
    return "sent"


def test_rows_before_the_first_are_refused_on_every_rank() -> None:
    for told in on_ranks(refused, 2, Around((2, 3), (1, 0), (0, 0))):
        assert told == (
            "halo: rank 0 has rows 0..1 of 5 and wants before=1, after=0: at most 0 lie before and 3 after; pad at the "
            "border instead"
        )


# Messages


def through_stages(world: World, depth: int) -> list[Tensor]:
    """Each rank is a stage; a second message takes the same way, and one skips all stages between."""
    group, rank = world.group(), world.rank
    weight = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3).requires_grad_()
    x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    like, last = torch.empty(2, 3, dtype=torch.float64), world.size - 1
    loss = x.new_zeros(())
    for number in range(depth):
        come = (x * (number + 1)) if rank == 0 else received(like, group, rank - 1)
        made = torch.tanh(come @ weight) + come
        if rank == last:
            skipped = received(like, group, 0) if last else x.sin()
            loss = loss + (made * skipped).sum()
            continue
        loss = loss + sent(made, group, rank + 1)
        if rank == 0:
            loss = loss + sent(x.sin(), group, last)
    loss.backward()
    assert weight.grad is not None
    return [loss.detach(), weight.grad, x.grad if x.grad is not None else x.new_zeros(())]


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_take_the_way_of_the_messages_back(ranks: int) -> None:
    x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    weights = [torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3).requires_grad_() for _ in range(ranks)]
    loss = x.new_zeros(())
    for number in range(3):
        made = x * (number + 1)
        for weight in weights:
            made = torch.tanh(made @ weight) + made
        loss = loss + (made * x.sin()).sum()
    loss.backward()
    answers = on_ranks(through_stages, ranks, 3)
    torch.testing.assert_close(answers[-1][0], loss.detach())
    torch.testing.assert_close(answers[0][2], x.grad)
    for (_, found, _), weight in zip(answers, weights, strict=True):
        torch.testing.assert_close(found, weight.grad)


def without_gradient(world: World) -> list[float]:
    """What nobody differentiates sends one message; what only one side differentiates sends its gradient all the
    same, so the next message finds its own."""
    group, found = world.group(), []
    with torch.no_grad():
        if world.rank == 0:
            sent(torch.ones(2), group, 1)
            sent(torch.arange(3), group, 1)
        else:
            found += [received(torch.empty(2), group, 0).sum().item()]
            found += [float(received(torch.empty(3, dtype=torch.int64), group, 0).sum())]
    if world.rank == 0:
        sent(torch.full((2,), 3.0), group, 1).backward()
        into = torch.zeros(1)
        group.receive(into, 1).wait()
        return [into.item()]
    (received(torch.empty(2), group, 0) * 2.0).sum().backward()
    group.send(torch.tensor([7.0]), 0).wait()
    return found


def test_messages_without_gradients_and_gradients_that_nobody_needs_keep_the_order() -> None:
    assert on_ranks(without_gradient, 2) == [[7.0], [2.0, 3.0]]


LARGE = (5 << 20,)
"""Numbers of a message that is larger than what may be under way."""


def leaves_at_once(world: World, with_gradient: bool) -> bool:
    """Whoever sends last waits for nothing any more. Was everything taken all the same?"""
    group, done = world.group(), np.frombuffer(world.shared("done", 64), dtype=np.int64)
    last = 1 if with_gradient else 0
    with torch.set_grad_enabled(with_gradient):
        x = torch.ones(LARGE, requires_grad=with_gradient)
        passed = sent(x, group, 1) if world.rank == 0 else received(torch.empty(LARGE), group, 0).sum()
        if with_gradient:
            passed.backward()
    done[world.rank] = 1
    until = time.monotonic() + 5.0
    while world.rank == last and not done[1 - last] and time.monotonic() < until:
        time.sleep(0.01)
    taken = bool(done[1 - last]) or world.rank != last
    group.barrier()
    return taken


@pytest.mark.parametrize("with_gradient", [True, False])
def test_what_was_sent_last_needs_nobody_to_wait_for_it_however_large(with_gradient: bool) -> None:
    assert on_ranks(leaves_at_once, 2, with_gradient) == [True, True]


def send_before_they_receive(world: World) -> bool:
    group, rank = world.group(), world.rank
    x = torch.full(LARGE, float(rank), requires_grad=True)
    given = sent(x, group, 1 - rank)
    come = received(torch.empty(LARGE), group, 1 - rank)
    ((come * (rank + 2.0)).sum() + given).backward()
    assert x.grad is not None
    return bool(come.eq(1 - rank).all() and x.grad.eq(3 - rank).all())


def test_ranks_may_all_send_before_they_receive_however_large() -> None:
    assert on_ranks(send_before_they_receive, 2) == [True, True]


def between_hosts(world: World, over: str, sizes: tuple[int, ...], cases: list[Around]) -> tuple[list[str], list[str]]:
    own = apart(over=over)
    wrong = all_checked(own, FUNCTIONS, sizes, 1), with_halos(own, cases, 1)
    own.close()
    return wrong


@pytest.mark.parametrize("over", ["NetworkGroup", "ProcessGroup"])
def test_every_function_is_the_same_between_hosts(over: str) -> None:
    cases = [Around((2, 0, 3), (0, 2, 1), (1, 1, 0)), Around((1, 1, 2), (0, 1, 2), (3, 2, 0))]
    assert on_ranks(between_hosts, 3, over, (2, 0, 1), cases) == [([], [])] * 3


TYPES = ("float64", "float32", "bfloat16", "float16", "bool", "int64", "int16", "uint8", "complex64")


def rows_of_every_type(world: World) -> list[tuple[str, bool]]:
    answers = []
    for name in TYPES:
        whole = (torch.arange(12).view(6, 2) % 3).to(getattr(torch, name))
        own = whole[share(world.rank, (1, 0, 5))]
        answers.append((name, torch.equal(torch.cat(world.group().all_gather_rows(own)), whole)))
        flat = torch.cat(world.group().all_gather_rows(own[:, 0].contiguous()))
        answers.append((name, torch.equal(flat, whole[:, 0])))
    return answers


def test_rows_of_every_type_are_gathered() -> None:
    for answers in on_ranks(rows_of_every_type, 3):
        assert all(right for _, right in answers), answers


def told(world: World) -> tuple[Any, dict[str, Tensor]]:
    group = world.group()
    message = {"text": "äß", "list": [1, 2.5, None]} if world.rank == 1 else None
    tensors = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    received = broadcast_tensors(tensors if world.rank == 0 else None, group)
    return broadcast_message(message, group, source=1), received


def test_messages_and_tensors_reach_every_rank() -> None:
    answers = on_ranks(told, 3)
    for message, tensors in answers:
        assert message == {"text": "äß", "list": [1, 2.5, None]}
        assert {k: (t.dtype, t.shape) for k, t in tensors.items()} == {
            k: (t.dtype, t.shape) for k, t in answers[0][1].items()
        }
        assert all(torch.equal(t, answers[0][1][k]) for k, t in tensors.items())
        assert tensors["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert tensors["scalar"].item() == 2.5


def same_sums(world: World) -> bytes:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(world.rank))
    world.group().all_reduce(x).wait()
    return x.numpy().tobytes()


def test_a_sum_has_the_same_bits_on_every_rank_and_every_time() -> None:
    first, second = on_ranks(same_sums, 3), on_ranks(same_sums, 3)
    assert len({*first, *second}) == 1
