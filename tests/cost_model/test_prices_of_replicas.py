"""What strategies cost whose ranks have rows of their own, by hand: what is moved, by whom, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, ROWS, bookkeeping, chain, layer, machine, network, timed

from apportion.core.strategy import Strategy
from apportion.cost_model import compute
from apportion.cost_model.compute import computed, saved, slowest, suited
from apportion.cost_model.profile import Pass, Profile, Seconds
from apportion.cost_model.strategies.parameter_store import push
from apportion.cost_model.strategies.shared_weights import exchanged
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.fully_sharded import FullySharded
from apportion.strategies.hogwild import Hogwild
from apportion.strategies.local_sgd import LocalSgd
from apportion.strategies.map_reduce import MapReduce
from apportion.strategies.parameter_server import ParameterServer
from apportion.strategies.single_device import SingleDevice

ONE = chain(8.0, parameter_bytes=GB)
"""A layer of 1 GB that takes 24 s, and one slot: an update moves 5 GB."""


def terms(strategy: Strategy, profile: Profile = ONE, **where: Any) -> dict[str, float]:
    return dict(strategy.cost(profile, machine(**where)).terms)


# data_parallel


def test_on_one_host_a_gradient_is_copied_once_and_read_by_all_and_each_updates_its_part() -> None:
    """Copied: read and written, 2 s. Read by every rank: 1 s. Two meetings of a quarter of a second."""
    found = terms(DataParallel(), latency=0.25)
    assert found["computing"] == pytest.approx(12.0)
    assert found["communicating"] == pytest.approx(2.0 + 1.0 + 0.5)
    assert found["updating"] == pytest.approx(5.0 / 2)


def test_between_hosts_a_compression_sends_its_bytes_and_goes_through_the_gradient_more_often() -> None:
    """1 GB takes 1000 s over the cable, and half of it 500 s; 2 passes more take 2 s. Two ranks of a host each have a
    lane of that rate to the other host; what they sum within the host stays whole."""

    def communicating(strategy: Strategy, ranks: int) -> float:
        return terms(strategy, ranks=ranks, hosts=2, bandwidth=1e6)["communicating"]

    assert communicating(DataParallel(), 1) == pytest.approx(1000 + 2)
    assert communicating(DataParallel(compress="fp16"), 1) == pytest.approx(500 + 2 + 2)
    assert communicating(DataParallel(compress="int8"), 1) == pytest.approx(1000 * (0.25 + 1 / 256) + 2 + 6)
    saved = communicating(DataParallel(), 2) - communicating(DataParallel(compress="fp16"), 2)
    assert saved == pytest.approx(250 - 2)
    here = terms(DataParallel(compress="fp16"))["communicating"]
    assert here == terms(DataParallel())["communicating"], "on one host nothing is compressed"


def linear(inputs: int, outputs: int) -> Profile:
    numbers = {"activation_bytes": 4 * ROWS * outputs, "flops": 2.0 * ROWS * inputs * outputs}
    weights = 4 * (inputs * outputs + outputs)
    return network(layer("fc", "x", kind="Linear", parameter_bytes=weights, forward=1.0, **numbers))


def test_what_a_gradient_is_made_of_is_exchanged_where_that_is_less() -> None:
    """100 rows of 10,000 inputs and as many outputs are 8 MB, and their product 400 MB. Each rank copies its half of
    the 8 MB, and reads all; the bias, of 40 kB, goes as gradients do."""
    wide, narrow = linear(10_000, 10_000), linear(100, 100)
    assert exchanged(wide).factored == 400e6
    assert terms(DataParallel(), wide)["communicating"] == pytest.approx((2 * 8e6 / 2 + 8e6 + 3 * 40e3) / 1e9)
    assert exchanged(narrow).factors == 0.0
    # A Linear layer's own gradient is written where all can read it; the bias is copied there.
    assert terms(DataParallel(), narrow)["communicating"] == pytest.approx((40e3 + 400 + 2 * 400) / 1e9)
    without_bias = replace(wide.layers[0], parameter_bytes=4 * 10_000 * 10_000)
    assert exchanged(network(without_bias)).dense == 0.0


def test_products_of_few_rows_have_a_faster_form() -> None:
    wide, rows = linear(10_000, 10_000), (30, 60, 100, 200)
    shares = [suited(wide.layers[0], n) for n in rows]
    assert [s.forward for s in shares] == sorted(s.forward for s in shares)
    assert shares[0].forward < 1.0 == shares[0].backward, "of so few rows only the forward product gains"
    assert shares[2].backward < 1.0 == shares[2].forward
    assert shares[3] == Seconds(1.0, 1.0)
    for other in (linear(100, 100).layers[0], replace(wide.layers[0], kind="Conv2d")):
        assert suited(other, 30) == Seconds(1.0, 1.0)
    (share,) = shares[1:2]
    found = saved(wide.layers, [10.0], [20.0], 60)
    assert found == pytest.approx((10 * (1 - share.forward), 20 * (1 - share.backward)))
    usual = replace(wide, layers=(replace(wide.layers[0], kind="Conv2d"),))
    gain = terms(DataParallel(), usual)["computing"] - terms(DataParallel(), wide)["computing"]
    half = suited(wide.layers[0], 50)
    assert gain == pytest.approx(0.5 * (1 - half.forward) + 1.0 * (1 - half.backward))


@pytest.mark.parametrize("fact", [{"element_wise": False}, {"own_update": True}, {"carries": True}], ids=str)
def test_what_cannot_be_updated_in_parts_is_updated_by_every_rank(fact: dict[str, Any]) -> None:
    assert terms(DataParallel(), replace(ONE, **fact))["updating"] == pytest.approx(5.0)


def test_parts_are_updated_by_fused_kernels_and_copies_by_the_workloads_own() -> None:
    passes = tuple(
        Pass(rows=ROWS, together=n, forward=8.0, backward=16.0, update=6.0, fused_update=3.0) for n in (1, 2)
    )
    seen = replace(ONE, passes=passes)
    assert terms(DataParallel(), seen)["updating"] == pytest.approx(3.0 / 2)
    assert terms(DataParallel(), seen, ranks=1, hosts=2)["updating"] == pytest.approx(6.0)
    assert [terms(SingleDevice(fused=f), seen, ranks=1)["updating"] for f in (False, True)] == [6.0, 3.0]


def test_outputs_that_a_loss_needs_all_of_are_gathered_and_their_gradients_summed() -> None:
    seen = chain(8.0, activation_bytes=GB)
    coupled, cut = (terms(DataParallel(), replace(seen, cut_by_rows=c))["communicating"] for c in (False, True))
    assert coupled - cut == pytest.approx(0.5 + 1.0)
    norms = network(layer("n", "x", kind="BatchNorm2d", parameter_bytes=GB), batch_norm=True)
    more, plain = (terms(DataParallel(), replace(norms, batch_norm=b))["communicating"] for b in (True, False))
    # Two numbers a channel, as many as weights: of two ranks 2 GB are gathered and 1 GB summed.
    assert more - plain == pytest.approx(1.0 + 1.0)


def test_parts_of_a_batch_are_computed_one_after_the_other() -> None:
    assert terms(DataParallel(microbatches=4))["computing"] == pytest.approx(12.0)
    with pytest.raises(ValueError, match="microbatches=4 would cut the batch under update="):
        terms(DataParallel(microbatches=4), replace(ONE, own_update=True))


# What ranks wait for


def test_who_has_more_rows_loads_and_computes_longer() -> None:
    seen = replace(chain(100.0), loading_seconds=1.0)
    found = computed(seen, machine(), [60, 40])
    assert (found.forward, found.backward, found.loading) == pytest.approx((50.0, 100.0, 50.0))
    assert found.waiting == pytest.approx(0.6 * 300 + 60 - 150 - 50)


@pytest.mark.parametrize("turn", [1, -1])
def test_of_unequal_devices_the_slowest_counts(turn: int) -> None:
    """One of them has half the other's memory rate, a call of a second, and its times vary."""
    layout = machine(1, hosts=2)
    quick, slow = layout.cluster.devices
    rate = replace(slow.rates[0], bytes_per_second=0.5e9)
    slow = replace(slow, model="slow", rates=(rate,), call_seconds=1.0, spread=0.5)
    mixed = replace(layout, cluster=replace(layout.cluster, devices=(quick, slow)), devices=layout.devices[::turn])
    assert compute.memory_rate(mixed) == 0.5e9
    assert compute.call_seconds(mixed) == 1.0
    assert compute.updating(ONE, mixed) == pytest.approx(10.0 + 1.0)
    seen = replace(ONE, layers=(replace(ONE.layers[0], flops=2e9, timings=()),))
    certain = replace(mixed, cluster=replace(mixed.cluster, devices=(quick, replace(slow, spread=0.0))))
    late, usual = (computed(seen, layout_, [50, 50]).waiting for layout_ in (mixed, certain))
    assert late - usual > 0.25 * computed(seen, certain, [50, 50]).both, "it is later by chance than it usually is"


def test_who_shares_a_device_takes_longer_than_who_has_one() -> None:
    layout = replace(machine(2, hosts=2), devices=("h0/cpu0", "h0/cpu0", "h1/cpu0"))
    timings = tuple(timed(seconds, together=n) for n, seconds in ((1, 1.0), (2, 2.0)))
    found = computed(network(layer("a", "x", timings=timings)), layout, [ROWS] * 3)
    assert (found.both, found.waiting) == pytest.approx((5.0, 1.0))


def test_another_batch_has_as_many_products_and_bytes_more() -> None:
    seen = network(layer("a", "x", flops=8.0, activation_bytes=80, kept_bytes=40))
    (half,) = compute.of_rows(seen, ROWS / 2).layers
    assert (half.flops, half.activation_bytes, half.kept_bytes) == (4.0, 40, 20)


def test_layers_share_a_time_by_what_they_take_alone() -> None:
    forward, backward = compute.layer_seconds(chain(1.0, 3.0), machine(), ROWS, 8.0, 2.0)
    assert (forward, backward) == (pytest.approx([2.0, 6.0]), pytest.approx([0.5, 1.5]))
    assert compute.layer_seconds(chain(0.0, 0.0), machine(), ROWS, 8.0, 2.0) == ([4.0, 4.0], [1.0, 1.0])


@pytest.mark.parametrize(("n", "expected"), [(1, 0.0), (2, 0.564), (10, 1.539), (100, 2.508)])
def test_the_slowest_of_n_is_as_late_as_statistics_tell(n: int, expected: float) -> None:
    """Expected largest of n normal values (Harter, "Expected Values of Normal Order Statistics", 1961)."""
    assert slowest(n, 0.5) - 1 == pytest.approx(0.5 * expected, abs=0.02)


# local_sgd


def test_every_replica_takes_a_whole_batch_and_a_step_has_its_python() -> None:
    assert terms(LocalSgd())["computing"] == pytest.approx(24.0)
    assert bookkeeping(LocalSgd(every=10**6), ONE, machine()) > 10


def test_an_average_costs_more_with_slots_an_outer_step_and_more_replicas() -> None:
    plain = terms(LocalSgd(every=1))["communicating"]
    assert plain > 10.0, "each of two writes 1 GB and a slot, all of it is added up, and each takes both"
    assert terms(LocalSgd(every=1, slots="averaged"))["communicating"] == pytest.approx(plain + 2.0)
    assert terms(LocalSgd(every=1, outer="nesterov"))["communicating"] >= plain + 5.0
    four = terms(LocalSgd(every=1), ranks=4)["communicating"]
    assert four - plain >= 2 * (3.0 + 6.0 + 4.0), "two more to be added up, and two more that take it in turn"
    assert terms(LocalSgd(every=1), latency=0.25)["communicating"] == pytest.approx(plain + 2 * 0.25)
    none = terms(LocalSgd(every=1), replace(ONE, slots=0))["communicating"]
    assert plain - none > 10.0


def test_a_replica_holds_its_round_besides_and_more_of_it_elsewhere() -> None:
    def held(strategy: Strategy, **where: Any) -> float:
        return strategy.cost(ONE, machine(**where)).memory_bytes / GB

    assert held(LocalSgd()) > held(SingleDevice(), ranks=1) + 4
    assert held(LocalSgd(outer="nesterov")) > held(LocalSgd()) + 2
    there = held(LocalSgd(), ranks=1, hosts=2)
    assert there == pytest.approx(held(SingleDevice(), ranks=1) + 3 * 2, abs=0.1), "two averages and a contribution"
    assert held(LocalSgd(outer="nesterov"), ranks=1, hosts=2) == pytest.approx(there + 2)
    assert held(LocalSgd(overlap=True), ranks=1, hosts=2) == pytest.approx(there + 1), "what its round began with"


def between(strategy: Strategy, profile: Profile = ONE, **where: Any) -> float:
    """Seconds between two hosts, over a wire of 1 MB/s."""
    return terms(strategy, profile, **{"ranks": 1, "hosts": 2, "bandwidth": 1e6, **where})["communicating"]


def test_between_hosts_the_weights_are_summed_once_and_slots_where_they_are_averaged() -> None:
    """1 GB of weights and as much of a slot go round in a ring of hosts: 2 (n - 1) / n of them cross each wire."""
    two, four = (between(LocalSgd(every=1), hosts=n) for n in (2, 4))
    assert two == pytest.approx(1e3, rel=0.03)
    assert four == pytest.approx(1.5e3, rel=0.03)
    assert between(LocalSgd(every=1, slots="averaged")) == pytest.approx(2 * two, rel=0.03)
    layers = chain(*[1.0] * 10, parameter_bytes=GB // 10)
    assert between(LocalSgd(every=1), layers) == pytest.approx(two, rel=1e-3), "as many bytes"
    assert between(LocalSgd(every=1, outer="nesterov")) > 5 + two


def test_a_sum_beside_the_next_round_costs_what_that_does_not_hide() -> None:
    """A step takes 24 s and its update 5 s."""
    plain, hidden = (between(LocalSgd(every=1, overlap=o)) for o in (False, True))
    assert plain - hidden == pytest.approx(24.0 + 5.0, abs=5.0)
    assert between(LocalSgd(every=50, overlap=True)) < 1.0, "50 steps take longer than the sum"
    assert terms(LocalSgd(every=1, overlap=True))["communicating"] >= 1.0, "on one host nothing goes on beside"


# Stores


def test_a_push_drafts_weights_and_slots_and_a_pull_copies_the_weights() -> None:
    locked, free = (push(ONE, machine(), locks=locks) for locks in (True, False))
    assert locked.pull == locked.gather == free.gather == pytest.approx(2.0), "read and written"
    assert locked.push - free.push == pytest.approx(1.0), "the new slots are drafted before they are put in place"
    assert free.push >= 5.0, "an update"
    half = push(ONE, machine(), part=0.5)
    assert (half.push, half.pull, half.gather) == pytest.approx((locked.push / 2, 1.0, 1.0))
    assert half.shards == pytest.approx(locked.shards / 2, abs=1)


def test_nobody_waits_in_hogwild_and_what_others_wrote_is_read_again() -> None:
    found = terms(Hogwild(), spread=0.5)
    assert found.get("waiting", 0.0) == 0.0
    assert found["computing"] == pytest.approx(24.0)
    assert found["communicating"] == pytest.approx(2.0 / 2), "half of the weights and slots is the other's"
    assert found["updating"] == pytest.approx(5.0)


def test_map_reduce_sums_once_and_keeps_what_was_where_ranks_may_die_together() -> None:
    here, there = terms(MapReduce(part=10)), terms(MapReduce(part=10), ranks=1, hosts=2)
    assert here["communicating"] == there["communicating"] == pytest.approx(1.0)
    assert there["updating"] == pytest.approx(5.0)
    assert here["updating"] - there["updating"] >= 2 * 2.0, "weights and slots are copied"


# Python


TEN = chain(*[1.0] * 10, parameter_bytes=GB // 10)


@pytest.mark.parametrize(
    ("strategy", "many", "least"),
    [
        (SingleDevice(), {"ranks": 1}, 5),
        (DataParallel(), {}, 20),
        (DataParallel(), {"ranks": 1, "hosts": 2}, 20),
        (FullySharded(), {}, 100),
        (LocalSgd(every=1), {}, 50),
        (Hogwild(), {}, 50),
        (ParameterServer(), {}, 100),
        (MapReduce(part=10), {}, 10),
    ],
    ids=str,
)
def test_every_step_has_its_python_and_more_layers_more_of_it(
    strategy: Strategy, many: dict[str, Any], least: float
) -> None:
    """Layers were measured: what grows with the time of a call is bookkeeping."""
    found = bookkeeping(strategy, TEN, machine(**many))
    assert found > least
    if not isinstance(strategy, SingleDevice | MapReduce):
        assert found > bookkeeping(strategy, chain(10.0, parameter_bytes=GB), machine(**many))


def test_python_grows_with_linear_layers_pieces_parts_and_norms() -> None:
    here = machine()
    kinds = (linear(100, 100), replace(linear(100, 100), layers=(replace(linear(100, 100).layers[0], kind="Conv2d"),)))
    assert bookkeeping(DataParallel(), kinds[0], here) > bookkeeping(DataParallel(), kinds[1], here)
    assert bookkeeping(DataParallel(), ONE, here) > 100 + bookkeeping(
        DataParallel(), chain(8.0, parameter_bytes=8), here
    )
    assert bookkeeping(DataParallel(), chain(8.0, parameter_bytes=8), here) > 10, "however small"
    assert bookkeeping(DataParallel(), chain(8.0, parameter_bytes=8), machine(1, hosts=2)) > 10
    assert bookkeeping(MapReduce(part=5), ONE, here) > bookkeeping(MapReduce(part=50), ONE, here) + 10
    assert bookkeeping(FullySharded(microbatches=4), TEN, here) > 2 * bookkeeping(FullySharded(), TEN, here)
    norms = network(*(layer(f"n{i}", "x", kind="BatchNorm2d", parameter_bytes=8) for i in range(3)), batch_norm=True)
    assert bookkeeping(DataParallel(), norms, here) >= 6 + bookkeeping(
        DataParallel(), replace(norms, batch_norm=False), here
    )
