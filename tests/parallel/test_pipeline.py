"""What pipelines are made of, by itself: where to cut, in which order to compute, and stages that are the network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import networks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import apart, by_value, on_ranks
from torch import Tensor, nn

from apportion.comm.world import World
from apportion.core import tree
from apportion.cost_model.strategies.pipeline import most_in_flight
from apportion.parallel.partition.committed_shards import Version, whole
from apportion.parallel.pipeline.cut_points import (
    SECONDS_PER_BYTE,
    SECONDS_PER_MESSAGE,
    Places,
    balanced,
    calls,
    changing_buffers,
    measured,
    named,
)
from apportion.parallel.pipeline.stage_graph import StageGraph, prove, terms
from apportion.parallel.pipeline.staging import turns
from apportion.parallel.pipeline.transfer import StageReceiver, StageSender
from apportion.parallel.pipeline.whole_batch import (
    BatchRows,
    join_microbatches,
    needs_whole_batch,
    refuse_coupled_stage,
    rows_at,
    split_microbatches,
)
from apportion.parallel.tracing.tracer import follow

# Where to cut

seconds = st.floats(0.0, 9.0).map(lambda x: round(x, 1))


def cost(places: Places, at: Sequence[int]) -> tuple[float, float]:
    """(the longest stage, sent in all)."""
    bounds, cross = [0, *at, len(places.seconds)], [*(c or 0.0 for c in places.crossing), 0.0]
    longest = max(sum(places.seconds[a:b]) + cross[a] + cross[b] for a, b in itertools.pairwise(bounds))
    return longest, sum(cross[a] for a in at)


@given(st.data(), st.integers(1, 8), st.integers(1, 4))
def test_no_other_cuts_have_a_faster_slowest_stage(data: Any, n: int, stages: int) -> None:
    times = data.draw(st.lists(seconds, min_size=n, max_size=n))
    crossing = [0.0, *data.draw(st.lists(st.none() | seconds, min_size=n - 1, max_size=n - 1))]
    places = Places(tuple(map(str, range(n))), tuple(times), tuple(crossing))
    possible = [i for i in range(1, n) if crossing[i] is not None]
    every = list(itertools.combinations(possible, stages - 1))
    if not every:
        with pytest.raises(ValueError, match=f"into {len(possible) + 1} stages? at most.*use .*data_parallel"):
            balanced(places, stages)
        return
    found = balanced(places, stages)
    assert tuple(found) in every
    assert cost(places, found)[0] == pytest.approx(min(cost(places, at)[0] for at in every))


def test_cuts_are_named_by_layers_and_wrong_ones_are_refused() -> None:
    five = ("embed", "a.0.conv", "a.0.bn", "b.conv", "add")
    places = Places(five, (1.0,) * 5, (0.0, 1.0, None, 1.0, 1.0), {2: "it is tied"})
    assert named(places, ("a.0", "b")) == [1, 3]
    assert named(places, ("add",)) == [4]
    with pytest.raises(ValueError, match=r"unknown layer 'c'; a stage may begin with a.0.conv, b.conv, add"):
        named(places, ("c",))
    with pytest.raises(ValueError, match="not in the order of the layers"):
        named(places, ("b", "a"))
    with pytest.raises(ValueError, match="not in the order of the layers"):
        named(places, ("b", "b"))
    with pytest.raises(ValueError, match="the first stage begins with it"):
        named(places, ("embed",))
    with pytest.raises(ValueError, match=r"'a.0.bn', since it is tied"):
        named(places, ("a.0.bn",))


class Packing(nn.Module):
    """Hands on what is no plain tree of tensors, and normalises twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unpack, self.norm, self.last = nn.Linear(6, 6), Unpack(), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return self.last(self.norm(self.unpack(h.max(1, keepdim=True)) + h))


class Unpack(nn.Module):
    def forward(self, found: Any) -> Tensor:
        return found.values  # type: ignore[no-any-return]


def test_where_a_network_cannot_be_cut_is_told_with_the_reason() -> None:
    model, x = Packing(), torch.randn(4, 6)
    places = measured(model, follow(model), x, [])
    assert places.names == ("first", "norm", "max_1", "getattr_1", "add", "norm#2", "last")
    assert [name for name, c in zip(places.names, places.crossing, strict=True) if c is None] == ["getattr_1"]
    with pytest.raises(ValueError, match="'getattr_1', since what max_1 gives is not a tree of tensors and numbers"):
        named(places, ("getattr_1",))
    places = measured(model, follow(model), x, changing_buffers(model, x))
    crossing = dict(zip(places.names, places.crossing, strict=True))
    assert [name for name, c in crossing.items() if c is None] == ["max_1", "getattr_1", "add", "norm#2"]
    with pytest.raises(ValueError, match=r"with 'add', since norm\.\w+, which changes, would be used on both"):
        named(places, ("add",))


class Ladder(nn.Module):
    """Adds a value of long ago to each of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = x * 1.0
        for _ in range(40):
            h = torch.tanh(h + first)
        return h


def test_what_crosses_a_cut_is_counted_as_what_a_stage_is_handed() -> None:
    for model, x in ((Ladder(), torch.randn(4, 6)), (networks.Twice().double(), networks.numbers(5, 6))):
        graph, n = follow(model), 0
        places = measured(model, graph, x, [])
        for at in range(1, len(calls(graph))):
            handed = StageGraph(model, graph, [0, at, len(calls(graph))], 0).module(x)
            nbytes = sum(t.nbytes for t in tree.tensors(handed))
            assert places.crossing[at] == pytest.approx(SECONDS_PER_MESSAGE + nbytes * SECONDS_PER_BYTE, rel=1e-12)
            n += 1
        assert n > 5


def test_a_normalisation_that_is_called_twice_stays_in_one_stage() -> None:
    model, x = networks.Twice().double(), networks.numbers(5, 6)
    assert changing_buffers(model, x) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    places = measured(model, follow(model), x, changing_buffers(model, x))
    can = [name for name, c in zip(places.names, places.crossing, strict=True) if c is not None]
    assert places.names == ("first", "norm", "relu", "second", "norm#2", "relu_1", "last")
    assert can == ["first", "norm", "relu_1", "last"]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(s > 0 for s in places.seconds)


# In which order to compute

sizes = st.integers(1, 6)


@given(sizes, st.integers(1, 12), st.sampled_from(["gpipe", "1f1b"]))
def test_every_schedule_computes_every_micro_batch_and_no_stage_waits_for_ever(
    stages: int, microbatches: int, schedule: str
) -> None:
    orders = [turns(schedule, stage, stages, microbatches) for stage in range(stages)]
    every = {(kind, m) for kind in ("forward", "backward") for m in range(microbatches)}
    assert all(len(order) == len(every) and set(order) == every for order in orders)
    # Forward passes arrive in the order in which they are sent, and so do gradients.
    for one, other in itertools.pairwise(orders):
        for kind in ("forward", "backward"):
            assert [m for k, m in one if k == kind] == [m for k, m in other if k == kind]
    done: set[tuple[int, str, int]] = set()
    at = [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        before = sum(at)
        for s in range(stages):
            while at[s] < len(orders[s]):
                kind, m = orders[s][at[s]]
                needs = (s - 1, kind, m) if kind == "forward" else (s + 1, kind, m)
                own = kind == "forward" or (s, "forward", m) in done
                if not own or (0 <= needs[0] < stages and needs not in done):
                    break
                done.add((s, kind, m))
                at[s] += 1
        assert sum(at) > before, "nobody can go on"


@given(sizes, st.integers(1, 12))
def test_1f1b_keeps_as_many_as_there_are_stages_to_the_last_and_gpipe_all(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        assert most_in_flight(turns("1f1b", stage, stages, microbatches)) == min(stages - stage, microbatches)
        assert most_in_flight(turns("gpipe", stage, stages, microbatches)) == microbatches


# Stages are the network


class Random(nn.Module):
    """Layers that take sums of any of the values before them, some in place, some layers called more than once."""

    def __init__(self, plan: list[tuple[int, list[int], bool]]) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, sources, in_place in self.plan:
            h = self.layers[layer](sum(values[i % len(values)] for i in sources) * self.scale)
            if in_place:
                h += values[sources[0] % len(values)]
            values.append(torch.tanh(h))
        return values[-1] + values[len(values) // 2]


plans = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.booleans()),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(plans, st.data())
def test_stages_cut_anywhere_give_the_networks_outputs_and_gradients(plan: Any, data: Any) -> None:
    torch.manual_seed(0)
    model = Random(plan).double()
    graph, x = follow(model), torch.randn(3, 4, dtype=torch.float64)
    n = len(calls(graph))
    at = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
    bounds = [0, *at, n]
    prove(model, graph, bounds, x)
    expected = model(x)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()), allow_unused=True)
    stages = [StageGraph(model, graph, bounds, number) for number in range(len(bounds) - 1)]
    values: Any = []
    for stage in stages:
        values = stage.module(*stage.select_arguments(graph, x), *values)
    assert torch.equal(values, expected)
    found = torch.autograd.grad(values.square().sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    for stage in stages:
        shared = terms(model, graph, bounds, stage.module)
        for name, p in stage.module.named_parameters():
            holders = sum(any(p is q for q in other.module.parameters()) for other in stages)
            assert (name in shared) == (holders > 1)


def test_what_a_stage_does_not_have_is_not_in_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    graph = follow(model)
    first, last = (StageGraph(model, graph, [0, 2, 4], number) for number in range(2))
    assert list(first.module.state_dict()) == ["0.weight", "0.bias"]
    assert {key.partition(".")[0] for key in last.module.state_dict()} == {"2", "3"}
    assert first.module.get_parameter("0.weight") is model[0].weight


class Alias(nn.Module):
    """Writes in place to a view of what is used again: in stages the two are apart."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        view = h.view(-1)
        view.add_(1.0)
        return h * 2.0


class Unseen(nn.Module):
    """The graph has an addition here, and not that it is in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        view = h.view(-1)
        view += 1.0
        return h * 2.0


def test_stages_that_would_not_be_the_network_are_refused() -> None:
    model, x = Alias(), torch.ones(2, 3)
    graph = follow(model)
    assert [node.name for node in calls(graph)] == ["mul", "view", "add_", "mul_1"]
    prove(model, graph, [0, 3, 4], x)
    with pytest.raises(ValueError, match=r"in stages Alias gives other outputs than as a whole.*cuts= elsewhere"):
        prove(model, graph, [0, 2, 4], x)
    graph = follow(Unseen())
    with pytest.raises(ValueError, match="in stages Unseen gives other outputs than as a whole"):
        prove(Unseen(), graph, [0, 1, len(calls(graph))], x)


# The whole batch of micro-batches


class Crossing(nn.Module):
    """Hands on rows in the second dimension, a row in three places, what has no rows, and numbers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, 4)
        b, t, n = x.size(0), x.size(1), x.numel()
        swapped, flat, place = x.transpose(0, 1) * 2, x.reshape(-1, 4) * 3, self.place * 4
        return (swapped.transpose(0, 1) + flat.reshape(b, t, 4) + place).sum() / n


def test_micro_batches_are_put_together_and_taken_apart_along_their_rows() -> None:
    model, x = Crossing(), torch.randn(7, 3, 4)
    graph = follow(model)
    at = 1 + max(i for i, node in enumerate(calls(graph)) if "mul" in node.name)
    stage = StageGraph(model, graph, [0, at, len(calls(graph))], 0)
    rows = rows_at(model, graph, at, x[:2])
    whole = stage.module(x)
    found = {str(how) for how in rows}
    assert found == {str(how) for how in (BatchRows(), BatchRows(1), BatchRows(12), BatchRows(1, 1), BatchRows(3, 0))}
    counts = [3, 3, 1]
    parts = [stage.module(part) for part in x.split(counts)]
    for some, expected in (
        (join_microbatches(parts, rows), whole),
        *zip(split_microbatches(whole, rows, counts), parts, strict=True),
    ):
        assert len(some) == len(expected)
        for a, b in zip(some, expected, strict=True):
            assert torch.equal(a, b) if isinstance(b, Tensor) else (a == b and type(a) is type(b))
    total = sum(t.sum() for t in tree.tensors(join_microbatches(parts, rows)))
    (gradient,) = torch.autograd.grad(total, [model.place])
    assert torch.equal(gradient, torch.full((3, 4), 4.0)), "what all have alike counts once"


class Interleaved(nn.Module):
    """A row is every second one of what is handed on."""

    def forward(self, x: Tensor) -> Tensor:  # (B, 2, 4)
        return torch.tanh(x.transpose(0, 1).reshape(-1, 4))


def test_rows_that_cannot_be_put_together_are_refused() -> None:
    model = Interleaved()
    with pytest.raises(ValueError, match=r"does not have its rows one after the other.*cuts= elsewhere"):
        rows_at(model, follow(model), 2, torch.randn(4, 2, 4))


class Apart(nn.Module):
    """Rows that see each other after the normalisation, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x)))
        return self.last(h) - self.last(h).mean(0)


def test_rows_that_see_each_other_in_a_stage_of_micro_batches_are_refused() -> None:
    model, x = Apart(), torch.randn(6, 6)
    graph = follow(model)
    assert [node.name for node in calls(graph)][:4] == ["first", "tanh", "norm", "last"]
    bounds = [0, 2, 3, len(calls(graph))]
    refuse_coupled_stage(model, graph, bounds, 0, x, 2)
    with pytest.raises(ValueError, match="microbatches=2 would change what Apart computes, which gives a row other"):
        refuse_coupled_stage(model, graph, bounds, 2, x, 2)
    for network, numbers in ((networks.Twice(), x), (Ladder(), x), (Crossing(), torch.randn(5, 3, 4))):
        graph = follow(network)
        bounds = [0, *range(1, len(calls(graph)) - 1), len(calls(graph))]  # the last of Crossing adds all up
        for number in range(len(bounds) - 2):
            refuse_coupled_stage(network.float(), graph, bounds, number, numbers, 2)


def test_a_stage_needs_the_whole_batch_for_its_statistics_and_for_what_changes() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()), torch.randn(4, 6)
    order = calls(follow(model))
    whole = lambda nodes: needs_whole_batch(model, nodes, changing_buffers(model, x))  # noqa: E731
    assert [whole(order[:1]), whole(order[1:2]), whole(order[2:]), whole(order)] == [False, True, False, True]
    model[1].eval()
    assert not whole(order)
    model[1] = nn.BatchNorm1d(6, track_running_stats=False).eval()
    assert whole(order)
    counting = nn.Sequential(nn.Linear(6, 10), networks.Counting())
    order = calls(follow(counting))
    assert needs_whole_batch(counting, order[1:], changing_buffers(counting, x))


# Messages


def passed(world: World, rounds: list[list[Any]], between_hosts: bool) -> list[list[Any]]:
    """Rank 0 sends, rank 1 sends back what it got."""
    own = apart() if between_hosts else world
    group = own.group().lane() if between_hosts else own.group()
    other = 1 - world.rank
    outlet, inlet = (
        StageSender(group, other, ahead=between_hosts),
        StageReceiver(group, other, world.device, ahead=between_hosts),
    )
    got = []
    for values in rounds:
        if world.rank == 0:
            outlet.send(values)
        got.append(inlet.receive())
        if world.rank == 1:
            outlet.send(got[-1])
    outlet.finish()
    if between_hosts:
        group.close()
        own.close()
    return got


@pytest.mark.processes
@pytest.mark.parametrize("between_hosts", [False, True])
def test_trees_of_tensors_and_numbers_arrive_as_they_were_sent(between_hosts: bool) -> None:
    a = torch.randn(3, 5, dtype=torch.float64)
    rounds: list[list[Any]] = [
        [a, {"mask": a > 0, "n": 3}],
        [a * 2, {"mask": a < 0, "n": 3}],
        [a * 2, {"mask": a < 0, "n": 4}],
        [(a.bfloat16(), None, 2.5), torch.zeros(0, 3), torch.tensor(7)],
        [a.t(), torch.Size([2, 3]), True],
        [],
        [torch.randn(1 << 18), a[:, 1:2]],
        [torch.randn(1 << 18), a[:, 2:3]],
        [torch.randn(1 << 4), a[:, 1:2]],
        [torch.ones(2, requires_grad=True), torch.ones(2)],
    ]
    with by_value(networks):
        for got in on_ranks(passed, 2, rounds, between_hosts):
            for found, expected in zip(got, rounds, strict=True):
                assert len(found) == len(expected)
                pairs = list(zip(tree.tensors(found), tree.tensors(expected), strict=True))
                assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)
                assert [x.requires_grad for x, _ in pairs] == [y.requires_grad for _, y in pairs]
            assert (got[1][1]["n"], got[2][1]["n"]) == (3, 4)
            assert got[3][0][1:] == (None, 2.5)
            assert (got[4][1], got[4][2]) == ((2, 3), True)


# What is kept


def version(slot: int, step: int, rank: int, *, generation: int = 0, size: int = 2) -> Version:
    return Version(0, slot, step % 2, step, generation, 0, rank, size, 64)


def test_the_latest_step_that_all_ranks_have_kept_is_gone_on_from() -> None:
    assert whole([]) is None
    assert whole([version(0, 4, 0)]) is None
    both = [version(0, 3, 0), version(1, 3, 1)]
    assert whole([*both, version(0, 4, 0)]) == both
    assert whole([*both, version(0, 4, 0), version(1, 4, 1)]) == [version(0, 4, 0), version(1, 4, 1)]
    # A rank of the next generation has kept it, the other has not: it is whole in the one before.
    assert whole([version(0, 3, 1), version(1, 3, 0), version(0, 3, 0, generation=2)]) == [
        version(1, 3, 0), version(0, 3, 1),
    ]  # fmt: skip
    smaller = version(1, 5, 0, generation=4, size=1)
    assert whole([*both, smaller]) == [smaller]
