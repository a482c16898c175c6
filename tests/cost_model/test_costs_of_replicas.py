"""What strategies cost that keep the network whole: prices, memory, and what they refuse. No clock is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from priced import cpus, gpus, layer, on, profile, resnet50
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload
from apportion.core.strategy import Strategy
from apportion.cost_model.cluster import Placement
from apportion.cost_model.compute import computed, dealt, of_rows
from apportion.cost_model.cost import Cost, MemoryUse
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies import data_parallel as exchange
from apportion.cost_model.strategies import shared_weights
from apportion.cost_model.strategies.parameter_store import across_hosts
from apportion.planner.candidate import misfit
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.fully_sharded import FullySharded
from apportion.strategies.hogwild import Hogwild
from apportion.strategies.local_sgd import LocalSgd
from apportion.strategies.map_reduce import MapReduce
from apportion.strategies.parameter_server import ParameterServer
from apportion.strategies.single_device import SingleDevice

EXACT: list[Strategy] = [DataParallel(), FullySharded(), MapReduce()]
APPROXIMATE: list[Strategy] = [LocalSgd(every=4), Hogwild(), ParameterServer(), ParameterServer(mode="ordered")]
ACROSS: list[Strategy] = [*EXACT, LocalSgd(every=4)]


def ids(strategy: Strategy) -> str:
    return str(strategy)


# What a cost is


@settings(max_examples=60, deadline=None)
@given(
    strategy=st.sampled_from([*EXACT, *APPROXIMATE]),
    ranks=st.sampled_from([1, 2, 3, 64]),
    parameters=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=5).filter(any),
    rows=st.integers(64, 999),
    slots=st.integers(0, 2),
)
def test_terms_are_seconds_that_add_up_and_everything_held_is_named(
    strategy: Strategy, ranks: int, parameters: list[int], rows: int, slots: int
) -> None:
    layout = on(cpus(cores=64), ranks)
    cost = strategy.cost(profile(*parameters, rows=rows, slots=slots, loading_seconds=1e-6), layout)
    assert all(seconds >= 0 for seconds in cost.terms.values())
    assert cost.step_seconds == pytest.approx(sum(cost.terms.values()))
    assert cost.terms["computing"] > 0
    assert cost.terms["loading"] > 0
    assert cost.memory["weights"] > 0
    assert cost.memory["activations"] > 0
    assert cost.memory.get("slots", 0) >= 0
    assert bool(cost.memory.get("slots")) == bool(slots)


@settings(max_examples=40, deadline=None)
@given(
    strategy=st.sampled_from(ACROSS),
    hosts=st.sampled_from([2, 3, 64]),
    each=st.integers(1, 2),
    faster=st.floats(1.0, 1e3),
    parameters=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=5),
)
def test_more_bandwidth_is_never_slower(
    strategy: Strategy, hosts: int, each: int, faster: float, parameters: list[int]
) -> None:
    seen = profile(*parameters, rows=256)
    slow = strategy.cost(seen, on(cpus(hosts), each))
    fast = strategy.cost(seen, on(cpus(hosts, bandwidth=1.25e8 * faster), each))
    assert fast.step_seconds <= slow.step_seconds
    assert fast.memory == slow.memory


@settings(max_examples=60, deadline=None)
@given(
    strategy=st.sampled_from([*EXACT, *APPROXIMATE]),
    ranks=st.sampled_from([1, 2, 3, 64]),
    rows=st.integers(64, 500),
    more=st.integers(0, 500),
    on_gpus=st.booleans(),
)
def test_more_rows_are_never_cheaper(strategy: Strategy, ranks: int, rows: int, more: int, on_gpus: bool) -> None:
    if on_gpus and strategy not in ACROSS:
        return
    layout = on(gpus(each=ranks)) if on_gpus else on(cpus(cores=64), ranks)
    few, many = (strategy.cost(profile(rows=n, loading_seconds=1e-7), layout) for n in (rows, rows + more))
    assert few.step_seconds <= many.step_seconds * (1 + 1e-9)
    assert few.memory_bytes <= many.memory_bytes


@settings(max_examples=40, deadline=None)
@given(strategy=st.sampled_from(EXACT), ranks=st.sampled_from([2, 3, 64]), spread=st.floats(0.001, 0.3))
def test_whoever_is_slower_by_chance_is_waited_for(strategy: Strategy, ranks: int, spread: float) -> None:
    seen = profile(rows=192)
    even, uneven = (strategy.cost(seen, on(cpus(cores=64, spread=s), ranks)) for s in (0.0, spread))
    assert uneven.terms["waiting"] - even.terms["waiting"] >= 0.5 * spread * even.terms["computing"]
    assert uneven.terms["computing"] == even.terms["computing"]


def test_rows_that_do_not_divide_are_waited_for() -> None:
    layout = on(cpus(cores=3, spread=0.0), 3)
    assert DataParallel().cost(profile(rows=63), layout).terms["waiting"] == pytest.approx(0.0)
    uneven = DataParallel().cost(profile(rows=64), layout)
    longest = computed(profile(rows=64), layout, [22] * 3)
    assert uneven.terms["waiting"] + uneven.terms["computing"] == pytest.approx(longest.both)
    assert uneven.terms["waiting"] > 0


def test_measured_shares_do_not_wait_for_the_slower_device() -> None:
    cluster = cpus(2, spread=0.0)
    slow = replace(
        cluster.devices[1], model="old", rates=tuple(replace(r, flops=r.flops / 4) for r in cluster.devices[1].rates)
    )
    layout = on(replace(cluster, devices=(cluster.devices[0], slow)))
    seen = profile(1000, rows=1000)
    even, measured = (DataParallel(shares=shares).cost(seen, layout) for shares in ("equal", "measured"))
    assert measured.terms["waiting"] < even.terms["waiting"] / 3
    assert measured.step_seconds < even.step_seconds


# One process


def test_one_process_has_no_price_but_its_passes_and_its_update() -> None:
    cost = SingleDevice().cost(profile(), on(cpus(), threads=2))
    assert set(cost.terms) == {"computing", "updating", "loading"}
    assert cost.examples == 64
    with pytest.raises(ValueError, match=r"single_device runs in one process, not in 2: use workers=1"):
        SingleDevice().cost(profile(), on(cpus(), 2))


@pytest.mark.parametrize("strategy", EXACT, ids=ids)
def test_a_world_of_one_sends_nothing_to_another_host(strategy: Strategy) -> None:
    alone = strategy.cost(profile(), on(cpus()))
    assert alone.examples == 64
    assert alone.terms["waiting"] == 0
    link = cpus().links[0]
    assert alone.terms["communicating"] <= 4 * profile().parameter_bytes / 1e9 + 4 * link.latency


# Exact strategies


def test_many_weights_and_little_to_compute_on_a_slow_network_are_not_worth_dividing() -> None:
    """10M weights, 128 rows, over 100 Mb/s: 80 MB go out and in for 0.5 s of computing saved."""
    seen = profile(10_000_000, rows=128)
    both = DataParallel().cost(seen, on(cpus(2, cores=1, bandwidth=1.25e7)))
    alone = SingleDevice().cost(seen, on(cpus(1, cores=1)))
    assert both.terms["communicating"] > 0.9 * 40e6 / 1.25e7
    assert alone.step_seconds < both.step_seconds
    # Few weights and much to compute are.
    few = replace(
        seen, layers=tuple(replace(each, parameter_bytes=4000, flops=each.flops * 1e4) for each in seen.layers)
    )
    both, alone = DataParallel().cost(few, on(cpus(2, cores=1, bandwidth=1.25e7))), SingleDevice().cost(few, on(cpus()))
    assert both.step_seconds < 0.6 * alone.step_seconds


def test_the_update_is_divided_on_one_host_and_made_by_every_rank_on_several() -> None:
    seen = profile(20_000_000, rows=64)
    alone = SingleDevice().cost(seen, on(cpus(cores=1)))
    here, there = DataParallel().cost(seen, on(cpus(), 2)), DataParallel().cost(seen, on(cpus(2, cores=1)))
    assert here.terms["updating"] == pytest.approx(alone.terms["updating"] * 1e10 / 1.5e10, rel=0.1)
    assert there.terms["updating"] == pytest.approx(alone.terms["updating"], rel=0.1)


def test_linear_layers_of_few_rows_exchange_what_their_gradient_is_made_of() -> None:
    def linear(rows: int) -> Profile:
        sizes = {"activation_bytes": 4 * 2048 * rows, "flops": 2 * 3072 * 2048 * rows, "kind": "Linear"}
        return profile(rows=rows, layers=(layer("fc", 3072 * 2048 + 2048, rows, **sizes),))

    few, many = shared_weights.exchanged(linear(128)), shared_weights.exchanged(linear(4096))
    assert few.factors == 128 * (3072 + 2048) * 4
    assert few.dense == 2048 * 4
    assert many.factors == 0
    assert many.dense == (3072 * 2048 + 2048) * 4
    dense = profile(rows=128, layers=(replace(linear(128).layers[0], kind="Conv2d"),))
    here = on(cpus(), 2)
    assert (
        DataParallel().cost(linear(128), here).terms["communicating"]
        < 0.2 * DataParallel().cost(dense, here).terms["communicating"]
    )


def test_batch_normalisation_asks_all_ranks_in_every_layer() -> None:
    norm = layer("norm", 512, 64, kind="BatchNorm2d")
    seen = profile(rows=64, batch_norm=True, layers=(norm, norm, norm))
    plain = replace(seen, batch_norm=False)
    here = on(cpus(2, latency=1e-3))
    more = (
        DataParallel().cost(seen, here).terms["communicating"] - DataParallel().cost(plain, here).terms["communicating"]
    )
    assert 3 * 3 * 1e-3 <= more <= 3 * 4 * 1e-3
    assert DataParallel().cost(seen, on(cpus())).terms == DataParallel().cost(plain, on(cpus())).terms


def test_a_loss_that_couples_examples_has_the_outputs_gathered() -> None:
    here, seen = on(cpus(2)), profile(rows=4096)
    coupled, cut = (
        DataParallel().cost(replace(seen, cut_by_rows=c), here).terms["communicating"] for c in (False, True)
    )
    outputs = seen.layers[-1].activation_bytes
    assert coupled - cut >= outputs / 2 / 1.25e8


def test_shards_cost_half_as_much_again_on_the_wire_and_hold_less() -> None:
    seen, here = profile(3_000_000, 3_000_000, 3_000_000, slots=2), on(cpus(8))
    whole, shards = DataParallel().cost(seen, here), FullySharded().cost(seen, here)
    sent = 2 * 7 / 8 * seen.parameter_bytes / 1.25e8
    assert whole.terms["communicating"] == pytest.approx(sent, rel=0.1)
    assert shards.terms["communicating"] == pytest.approx(1.5 * sent, rel=0.1)
    for what in ("weights", "gradients", "slots"):
        assert shards.memory[what] < whole.memory[what]
    assert shards.memory["slots"] == pytest.approx(whole.memory["slots"] / 8)


def test_gpus_gather_the_next_layer_while_they_compute_this_one() -> None:
    seen = profile(*[1_000_000] * 20, rows=64)
    seen = replace(seen, layers=tuple(replace(each, flops=each.flops * 1e6) for each in seen.layers))
    here = on(gpus(2, 1, bandwidth=1e10))
    cost = FullySharded().cost(seen, here)
    assert cost.terms["communicating"] < 0.2 * 3 * seen.parameter_bytes / 2 / 1e10
    assert {span.kind for span in cost.timeline} == {"computing", "communicating"}


def test_microbatches_hold_less_and_take_longer() -> None:
    seen, here = profile(rows=64), on(cpus(), 2)
    for strategy in (DataParallel, FullySharded):
        once, often = strategy().cost(seen, here), strategy(microbatches=4).cost(seen, here)
        assert often.memory["activations"] == pytest.approx(once.memory["activations"] / 4, rel=0.01)
        assert often.step_seconds > once.step_seconds


@pytest.mark.parametrize(
    ("hosts", "parameters"),
    [
        (1, (100, 100)),
        (1, (1000, 200_000, 5000)),
        (1, (10_000_000,)),
        (2, (100, 100)),
        (2, (1000, 200_000, 5000)),
        (2, (5_000_000, 5_000_000)),
    ],
)
def test_a_step_by_map_reduce_is_never_cheaper_than_the_same_sum_by_data_parallel(
    hosts: int, parameters: tuple[int, ...]
) -> None:
    seen, here = profile(*parameters), on(cpus(hosts), 2)
    least = 0.99 if hosts == 1 else 0.98  # data_parallel copies what leaves early
    assert MapReduce().cost(seen, here).step_seconds >= least * DataParallel().cost(seen, here).step_seconds


def test_map_reduce_holds_one_part_of_a_batch_of_any_size() -> None:
    here = on(cpus(), 2)
    memory = [MapReduce(part=32).cost(profile(rows=rows), here).memory_bytes for rows in (64, 64_000)]
    assert memory[0] == memory[1]


# Gradients that are sent while the backward pass goes on


@pytest.mark.parametrize(("gigabits", "hidden"), [(50, True), (25, True), (10, False), (5, False)])
def test_gradients_of_resnet50_on_256_gpus_hide_behind_a_backward_pass_of_120_ms(gigabits: float, hidden: bool) -> None:
    """100 MB, of which twice as much goes through each port: 0.2 GB in 120 ms are 13.6 Gb/s."""
    seen, here = resnet50(), on(gpus(256, 1, bandwidth=gigabits * 1e9 / 8))
    assert seen.parameter_bytes == pytest.approx(100e6, rel=0.05)
    cost = DataParallel().cost(seen, here)
    assert cost.terms["computing"] == pytest.approx(0.18)
    assert (cost.terms["communicating"] < 0.1 * 0.18) == hidden
    assert {span.kind for span in cost.timeline} == {"computing", "communicating"}


def test_what_cannot_be_hidden_and_what_slows_computing_is_counted() -> None:
    seen, cluster = resnet50(), gpus(4, 1, bandwidth=6.25e9)
    backward = [0.001] * len(seen.layers)
    sent = exchange.buckets(seen, 25e6)

    def beyond(**change: Any) -> float:
        links = tuple(replace(link, **change) for link in cluster.links)
        return exchange.during(on(replace(cluster, links=links)), 0.05, backward, sent)[0]

    assert beyond() < beyond(hidden=0.5) < beyond(hidden=0.0)
    assert beyond() < beyond(slowdown=0.2) < beyond(slowdown=0.5)
    assert sum(bucket.nbytes for bucket in sent) == seen.parameter_bytes


# Approximate strategies


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_approximate_strategies_say_how_many_examples_their_step_is_of(ranks: int) -> None:
    here = on(cpus(cores=64), ranks)
    for strategy in (LocalSgd(every=8), Hogwild(), ParameterServer()):
        assert strategy.cost(profile(), here).examples == 64 * ranks
    assert ParameterServer(mode="ordered").cost(profile(), here).examples == 64


def test_an_average_every_so_many_steps_costs_its_part_of_each() -> None:
    here = on(cpus(4))
    once, rarely = (LocalSgd(every=every).cost(profile(), here).terms for every in (1, 32))
    assert rarely["communicating"] == pytest.approx(once["communicating"] / 32)
    assert rarely["waiting"] == pytest.approx(once["waiting"] / 32**0.5)
    assert rarely["computing"] == once["computing"]


def test_a_slow_network_is_the_place_for_few_averages() -> None:
    seen, here = profile(10_000_000, rows=128), on(cpus(2, cores=1, bandwidth=1.25e7))
    exact, averaged = DataParallel().cost(seen, here), LocalSgd(every=32).cost(seen, here)
    assert averaged.seconds_per_example < exact.seconds_per_example


def test_one_server_for_many_workers_is_a_queue() -> None:
    seen = profile(20_000_000, rows=64)
    here = [on(cpus(cores=64), workers + 1) for workers in (1, 8, 32)]
    few, more, many = (ParameterServer(servers=1).cost(seen, layout) for layout in here)
    assert few.terms["waiting"] == 0
    assert many.terms["waiting"] > more.terms["waiting"]
    assert many.examples == 32 * 64
    # What a full server serves in a second does not grow with those who ask, and a second one doubles it.
    push = many.terms["updating"]
    assert many.step_seconds == pytest.approx(32 * push)
    two = ParameterServer(servers=2).cost(seen, on(cpus(cores=64), 34))
    assert two.seconds_per_example == pytest.approx(many.seconds_per_example / 2, rel=0.1)


def test_pushing_and_pulling_less_often_costs_less() -> None:
    seen, here = profile(20_000_000, rows=64), on(cpus(), 2)
    often, rarely = (ParameterServer(push_every=n).cost(seen, here) for n in (1, 4))
    assert rarely.terms["updating"] == pytest.approx(often.terms["updating"] / 4)


# Replicas


@dataclass(frozen=True, repr=False)
class Halves(Strategy):
    """A split that has a price for every network: a millisecond an example. ``asked``: what it was asked for."""

    asked: list[tuple[Profile, Placement]] = field(default_factory=list)
    splits = True
    exact = True

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        self.asked.append((profile, layout))
        terms = {"computing": 1e-3 * profile.batch_size, "communicating": 1e-3}
        return Cost(terms=terms, memory={"weights": 10}, examples=profile.batch_size)

    def build(self, workload: Workload, world: Any) -> Any:
        raise AssertionError("it has a price alone")

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Any:
        raise AssertionError("it has a price alone")


class TestReplicas:
    seen: Profile = profile(4_000_000, 4_000_000, rows=64)

    def test_a_replica_computes_its_part_of_the_batch_beside_the_others(self) -> None:
        asked: list[tuple[Profile, Placement]] = []
        cost = DataParallel(of=Halves(asked), replicas=2).cost(self.seen, on(cpus(cores=4), 4))
        [(share, part)] = asked  # replicas that sit alike are asked once
        assert share.batch_size == 32
        assert share.layers[0].activation_bytes == self.seen.layers[0].activation_bytes // 2
        assert part.ranks == 2
        assert part.together(0) == 4
        assert cost.examples == 64
        assert cost.terms["computing"] == pytest.approx(32e-3)

    def test_each_rank_sums_what_it_holds_with_its_like(self) -> None:
        here = on(cpus(4, cores=1))
        whole = DataParallel().cost(self.seen, here).terms["communicating"]
        groups = DataParallel(of=Halves(), replicas=2).cost(self.seen, here).terms["communicating"] - 1e-3
        # Rings of two over half of the gradient: 1/2 of it through each port, instead of 3/2.
        assert groups == pytest.approx(whole / 3, rel=0.1)

    def test_a_server_takes_a_batch_of_each_group(self) -> None:
        cost = ParameterServer(of=Halves(), replicas=2).cost(self.seen, on(cpus(cores=4), 4))
        assert cost.examples == 128
        assert cost.terms["computing"] == pytest.approx(64e-3)

    def test_groups_that_do_not_share_the_workers_evenly_are_refused(self) -> None:
        with pytest.raises(ValueError, match="cannot share 3 workers evenly"):
            DataParallel(of=Halves(), replicas=2).cost(self.seen, on(cpus(cores=3), 3))
        with pytest.raises(ValueError, match="update= sees the loss of its own rows"):
            DataParallel(of=Halves(), replicas=2).cost(replace(self.seen, own_update=True), on(cpus(cores=4), 4))
        with pytest.raises(ValueError, match="batch_size=1 cannot feed 2 replicas"):
            DataParallel(of=Halves(), replicas=2).cost(of_rows(self.seen, 1), on(cpus(cores=4), 4))


# Memory


def test_what_a_host_has_in_common_is_counted_once_a_host() -> None:
    held = MemoryUse(own={"weights": 10, "activations": 5}, shared={"weights": 100, "slots": 40})
    assert held.a_worker(4) == {"weights": 35, "slots": 10, "activations": 5}
    assert 4 * sum(held.a_worker(4).values()) == 4 * 15 + 140  # what a host holds


def test_data_parallel_has_two_versions_of_the_weights_on_a_host_and_a_copy_a_rank_elsewhere() -> None:
    seen = profile(1_000_000, slots=2)
    here, there = DataParallel().cost(seen, on(cpus(cores=64), 64)), DataParallel().cost(seen, on(cpus(64)))
    assert here.memory["weights"] * 64 == 2 * seen.parameter_bytes
    assert here.memory["slots"] * 64 == 2 * 2 * seen.parameter_bytes
    assert there.memory["weights"] == seen.parameter_bytes
    assert here.memory["gradients"] == there.memory["gradients"] == seen.parameter_bytes


# Candidates


def test_candidates_are_few_and_data_parallel_is_among_them() -> None:
    two, one = on(cpus(), 2), on(cpus())
    assert list(DataParallel.candidates(profile(), two)) == [DataParallel()]
    assert list(LocalSgd.candidates(profile(), two)) == [LocalSgd(every=n) for n in (1, 8, 32)]
    assert list(MapReduce.candidates(profile(), two)) == [MapReduce()], "its step is exact at any batch"
    for kind in (DataParallel, FullySharded, MapReduce, LocalSgd, Hogwild, ParameterServer):
        assert list(kind.candidates(profile(examples=64), one)) == []
    assert list(SingleDevice.candidates(profile(), one)) == [SingleDevice(), SingleDevice(fused=True)]


def test_microbatches_are_a_candidate_where_activations_do_not_fit_at_once() -> None:
    tight = on(cpus(memory_bytes=4_000_000), 2)
    found = list(DataParallel.candidates(profile(1000, rows=4096), tight))
    assert found == [DataParallel(), DataParallel(microbatches=2)]
    whole, parts = (kind.cost(profile(1000, rows=4096), tight) for kind in found)
    assert misfit(whole, tight).startswith("does not fit")
    assert misfit(parts, tight) == ""


# Refusals: in the words that they have when built


class _World:
    """As much of one as is looked at before anything is built."""

    def __init__(self, size: int) -> None:
        self.size = self.slots = self.local_size = size
        self.rank = self.slot = 0
        self.channel = None
        self.device = torch.device("cpu")


def workload(**other: Any) -> Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 2),
        "data": lambda: TensorDataset(torch.zeros(8, 2), torch.zeros(8, 2)),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "loss": nn.functional.mse_loss,
        "batch_size": 8,
    }
    return Workload(**{**given, **other})


@pytest.mark.parametrize(
    ("strategy", "told", "known"),
    [
        (SingleDevice(), {}, {}),
        (DataParallel(), {"batch_size": 1}, {"rows": 1}),
        (DataParallel(microbatches=2), {"count": None}, {"cut_by_rows": False}),
        (MapReduce(), {"count": None}, {"cut_by_rows": False}),
        (FullySharded(), {"update": lambda step, batch: {}, "loss": None}, {"own_update": True}),
        (FullySharded(microbatches=2), {"count": None}, {"cut_by_rows": False}),
        (ParameterServer(servers=2), {}, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, Strategy) else "",
)
def test_a_plan_refuses_in_the_words_of_the_build(
    strategy: Strategy, told: dict[str, Any], known: dict[str, Any]
) -> None:
    world: Any = _World(2)
    with pytest.raises(ValueError) as built:  # noqa: PT011 (compared below)
        strategy.build(workload(**told), world)
    with pytest.raises(ValueError) as priced:  # noqa: PT011
        strategy.cost(profile(**known), on(cpus(), 2))
    assert str(priced.value) == str(built.value)


@pytest.mark.parametrize(
    ("strategy", "known", "words"),
    [
        (DataParallel(microbatches=2), {"batch_norm": True}, "statistics of a part of the batch"),
        (DataParallel(shares="measured"), {"carries": True}, 'use shares="equal"'),
        (MapReduce(), {"batch_norm": True}, "statistics of a part of the batch"),
        (MapReduce(), {"carries": True}, "a recurrent state that is carried along"),
        (FullySharded(), {"element_wise": False}, "not known to update each weight by itself"),
        (FullySharded(), {"whole_updates": True}, "its optimizer has fused=True.*use fused=False, Adam or AdamW"),
        (LocalSgd(), {"carries": True}, "use data_parallel"),
        (Hogwild(), {"carries": True}, "does not go with asynchronous workers"),
        (Hogwild(), {"own_update": True}, "does not go with asynchronous workers"),
        (ParameterServer(), {"element_wise": False}, "use data_parallel"),
    ],
    ids=str,
)
def test_what_a_strategy_cannot_run_has_no_price(strategy: Strategy, known: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strategy.cost(profile(**known), on(cpus(), 2))


@pytest.mark.parametrize("strategy", [Hogwild(), ParameterServer()], ids=ids)
def test_a_store_is_memory_of_one_host(strategy: Strategy) -> None:
    with pytest.raises(ValueError, match="workers on 2 hosts do not share memory"):
        strategy.cost(profile(), on(cpus(2)))
    with pytest.raises(ValueError, match='device="cuda": a parameter store is memory of the host'):
        strategy.cost(profile(), on(gpus(each=2)))


def test_servers_on_other_hosts_cost_what_their_cables_carry() -> None:
    known, layout = profile(), on(cpus(4))
    link, nbytes = layout.cluster.joining(layout.devices), known.parameter_bytes
    one, two = (across_hosts(known, layout, workers=2, servers=n, copies=0) for n in (1, 2))
    assert one.alone == two.alone == pytest.approx(2 * nbytes / link.bandwidth + 4 * link.latency)
    assert one.busy == pytest.approx(2 * nbytes / link.bandwidth) == 2 * two.busy
    copied = across_hosts(known, layout, workers=2, servers=2, copies=1)
    assert copied.busy == pytest.approx(2 * two.busy)
    terms = ParameterServer(servers=1).cost(known, layout).terms
    assert terms["communicating"] >= one.alone
    assert [str(c) for c in ParameterServer.candidates(known, layout)] == ["parameter_server(servers=1)"]


def test_rows_are_priced_as_they_are_dealt() -> None:
    assert dealt(61, 3) == [21, 20, 20]
