"""What strategies cost that give ranks layers of their own, by hand: who computes what, what is on the way, what a rank
holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from by_hand import GB, ROWS, bookkeeping, chain, layer, machine, network, seconds, terms, timed

from apportion.core.strategy import Strategy
from apportion.cost_model import partitioning
from apportion.cost_model.cluster import Cluster, Device, Link, Placement, Rate
from apportion.cost_model.compute import slowest
from apportion.cost_model.profile import Pass
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.tensor_parallel import TensorParallel

# The whole and its layers


def test_layers_take_together_what_the_whole_network_took() -> None:
    """Timed one by one 4 s and 8 s, as a whole 1 s and 3 s: each layer's part of that."""
    whole = (Pass(rows=ROWS, forward=1.0, backward=3.0, update=7.0),)
    seen = replace(chain(1.0, 3.0), passes=whole)
    assert terms(LayerPlacement(), seen, ranks=1)["computing"] == pytest.approx(4.0)


def uneven(slower: float) -> Placement:
    """Two ranks that share a host, and one that has a host of its own; who shares reaches less."""
    rates = tuple(Rate(threads=1, together=n, flops=1e9 / n**slower, bytes_per_second=1e9) for n in (1, 2))
    device = Device(
        name="h0/cpu", host="h0", kind="cpu", model="made", memory_bytes=1 << 50, rates=rates, cores=2, spread=0.0,
        call_seconds=0.0,
    )  # fmt: skip
    devices = (device, replace(device, name="h1/cpu", host="h1"))
    link = Link(kind="wire", devices=("h0/cpu", "h1/cpu"), latency=0.0, bandwidth=1e9)
    return Placement(cluster=Cluster(name="c", devices=devices, links=(link,)), devices=("h0/cpu", "h0/cpu", "h1/cpu"))


@pytest.mark.parametrize("slower", [0, 1])
def test_ranks_that_sit_otherwise_take_other_times_and_are_waited_for(slower: float) -> None:
    rows = (timed(1.0, together=1), timed(2.0, together=2))
    seen = network(*(layer(f"l{i}", "x", ways=("units",), kind="LSTM", timings=rows) for i in range(3)))
    placed = LayerPlacement().cost(seen, uneven(slower))
    assert placed.step_seconds == pytest.approx(2 * 6.0 + 3.0)
    sliced = TensorParallel().cost(seen, uneven(slower)).terms
    assert sliced["computing"] + sliced["waiting"] == pytest.approx(3 * 6.0 / 3)
    assert sliced["waiting"] > 0


@pytest.mark.parametrize("strategy", [LayerPlacement(), TensorParallel()], ids=str)
def test_chance_and_loading_are_part_of_a_step(strategy: Strategy) -> None:
    seen = network(*(layer(f"l{i}", "x", kind="LSTM", ways=("units",)) for i in range(4)), loading_seconds=0.25)
    even, uneven_ = (terms(strategy, seen, spread=spread) for spread in (0.0, 0.5))
    assert even["loading"] == ROWS * 0.25
    assert uneven_["waiting"] == pytest.approx(even["waiting"] + even["computing"] * (slowest(2, 0.5) - 1))


def test_a_part_has_two_copies_besides_on_one_host_that_outlive_its_rank() -> None:
    seen = network(
        *(layer(f"l{i}", "x", kind="LSTM", ways=("units",), parameter_bytes=GB) for i in range(2)),
        slots=2,
        buffer_bytes=100,
    )
    here, there = (TensorParallel().cost(seen, machine(**where)).memory for where in ({}, {"ranks": 1, "hosts": 2}))
    assert here == {"weights": 3 * GB, "gradients": GB, "slots": 6 * GB, "activations": 0, "buffers": 300}
    assert there == {"weights": GB, "gradients": GB, "slots": 2 * GB, "activations": 0, "buffers": 100}


# Stages


FOUR = chain(1.0, 1.0, 1.0, 1.0, activation_bytes=GB)


def test_what_crosses_a_cut_takes_its_time_in_both_directions() -> None:
    """2 s, 1 s on the way, 2 s; and back 4 s, 1 s on the way, 4 s. What cannot go on by itself is half each rank's
    own; what slows computing down is both ranks'."""
    assert seconds(LayerPlacement(), FOUR) == pytest.approx(14.0)
    hidden, exposed = (terms(LayerPlacement(), FOUR, hidden=h) for h in (1.0, 0.0))
    assert sum(exposed.values()) == pytest.approx(14.0)
    assert hidden["communicating"] == pytest.approx(2.0)
    assert exposed["computing"] == hidden["computing"] == pytest.approx(6.0)
    assert exposed["communicating"] == pytest.approx(1.0), "its own halves; in the others' it is idle"
    assert seconds(LayerPlacement(), FOUR, slowdown=0.5) == pytest.approx(14.0 + 4 * 0.5)


@pytest.mark.parametrize(("crossing", "longest"), [(4, 6.0), (16, 9.0)])
def test_stages_are_cut_by_the_times_of_a_micro_batch(crossing: int, longest: float) -> None:
    """Four layers of 3 s. Nothing crosses behind the third, so many GB behind the second; the times and the bytes of a
    micro-batch are both a quarter. Cuts are judged at 2 GB/s: 6 + 2 s are less than 9 s, and 6 + 8 s are more."""
    many = {"activation_bytes": crossing * GB}
    layers = (layer("a", "x", **many), layer("b", "a", **many), layer("c", "b"), layer("d", "c"))
    cost = PipelineParallel(microbatches=4).cost(network(*layers), machine())
    assert cost.terms["computing"] == pytest.approx(longest)


def test_the_largest_stage_updates_longest_with_fused_kernels_and_the_loss_is_told() -> None:
    seen = network(layer("a", "x", parameter_bytes=GB), layer("b", "a", parameter_bytes=3 * GB))
    assert terms(PipelineParallel(microbatches=1), seen)["updating"] == pytest.approx(3 * 5.0)
    told = [terms(PipelineParallel(microbatches=1), seen, latency=latency)["communicating"] for latency in (0.0, 1.0)]
    assert told[1] - told[0] == pytest.approx(2 * 1.0, abs=0.1)
    passes = (Pass(rows=ROWS, together=2, forward=2.0, backward=4.0, update=40.0, fused_update=20.0),)
    fused, own = (terms(s, replace(seen, passes=passes))["updating"] for s in (PipelineParallel(), LayerPlacement()))
    assert (fused, own) == pytest.approx((15.0, 30.0))


def test_a_stage_holds_what_came_in_and_what_its_layers_keep_of_the_micro_batches_under_way() -> None:
    """Of four micro-batches two are under way in the first stage and one in the second, of 1F1B; all of GPipe."""
    seen = network(layer("a", "x", kept_bytes=4 * GB, activation_bytes=8 * GB), layer("b", "a", kept_bytes=40 * GB))
    held = {
        schedule: PipelineParallel(microbatches=4, schedule=schedule, recompute=again).cost(seen, machine()).memory
        for schedule, again in (("gpipe", False), ("1f1b", False))
    }
    assert held["gpipe"]["activations"] == 48 * GB
    assert held["1f1b"]["activations"] == 12 * GB
    again = PipelineParallel(microbatches=4, schedule="gpipe", recompute=True).cost(seen, machine()).memory
    assert again["activations"] == (8 + 10) * GB, "all that came, and what one micro-batch keeps"


def test_a_stage_that_computes_the_whole_batch_holds_all_of_it() -> None:
    norm = layer("b", "a", kind="BatchNorm2d", kept_bytes=40 * GB)
    seen = network(layer("a", "x", kept_bytes=4 * GB), norm, batch_norm=True)
    cost = PipelineParallel(microbatches=4, batch_norm="whole").cost(seen, machine())
    assert cost.memory["activations"] == 40 * GB
    # Its rows come in four messages, and the other stage does not compute meanwhile: 1 + 3 + 2 s.
    assert cost.step_seconds == pytest.approx(6.0)
    sent = network(replace(seen.layers[0], activation_bytes=4 * GB), norm, batch_norm=True)
    cost = PipelineParallel(microbatches=4, batch_norm="whole").cost(sent, machine(hidden=0.0))
    # Half a second of each of four messages is each rank's own: 3 s, 1 + 2 s, 2 + 2 s, 4 s.
    assert cost.step_seconds == pytest.approx(14.0)


def test_named_cuts_are_layers_or_what_holds_them() -> None:
    seen = network(*(layer(name, "x") for name in ("a.0", "a.1", "b.0", "b.1")))
    by_block = PipelineParallel(cuts=("b",), microbatches=1).cost(seen, machine())
    assert by_block.step_seconds == pytest.approx(12.0)
    with pytest.raises(ValueError, match="no stage can begin with 'b'"):
        PipelineParallel(cuts=("b.1", "b"), microbatches=1).cost(seen, machine(3))


@pytest.mark.parametrize("models", [("new", "old"), ("made", "made")], ids=str)
def test_slower_devices_are_as_slow_in_every_stage_that_they_have(models: tuple[str, str]) -> None:
    layout = machine(ranks=1, hosts=2)
    first, second = layout.cluster.devices
    slow = replace(second, model=models[1], rates=(Rate(threads=1, together=1, flops=1e9 / 2, bytes_per_second=1e9),))
    cluster = replace(layout.cluster, devices=(replace(first, model=models[0]), slow))
    seen = network(*(layer(f"l{i}", "x", flops=1e9, timings=()) for i in range(2)))
    found = LayerPlacement(cuts=("l1",)).cost(seen, replace(layout, cluster=cluster))
    assert found.step_seconds == pytest.approx(3.0 + 6.0)


def test_the_device_with_most_chance_counts() -> None:
    layout = machine(ranks=1, hosts=2)
    devices = (replace(d, model=d.host, spread=s) for d, s in zip(layout.cluster.devices, (0.1, 0.5), strict=True))
    spread = replace(layout, cluster=replace(layout.cluster, devices=tuple(devices)))
    found = LayerPlacement().cost(replace(FOUR, device="h0"), spread).terms
    even = LayerPlacement().cost(replace(FOUR, device="h0"), layout).terms
    assert found["waiting"] - even["waiting"] > 0.4 * found["computing"] * (slowest(2, 1.0) - 1)


def test_small_micro_batches_and_messages_cost_calls_and_linear_layers_of_few_rows_less() -> None:
    here = machine()
    few, many = (bookkeeping(PipelineParallel(microbatches=m), FOUR, here) for m in (2, 20))
    assert many > 5 * few
    assert bookkeeping(PipelineParallel(microbatches=2), FOUR, machine(1)) == 0.0, "one stage tells nobody"
    # Two passes and their messages, one way and back, on a path through both stages.
    assert bookkeeping(LayerPlacement(), FOUR, here) > 40
    wide = chain(1.0, 1.0, kind="Linear", parameter_bytes=GB)
    usual = chain(1.0, 1.0, parameter_bytes=GB)
    gains = [terms(PipelineParallel(microbatches=m), usual)["computing"] for m in (1, 10)]
    assert terms(PipelineParallel(microbatches=10), wide)["computing"] < 0.95 * gains[1]


def test_each_pass_and_each_message_has_its_python() -> None:
    """Of two stages four passes and four ends of messages follow each other, of three six and eight."""
    two, three = (bookkeeping(LayerPlacement(), FOUR, machine(n)) for n in (2, 3))
    assert (2 * two - three) / 2 >= 5, "a pass"
    assert (2 * three - 3 * two) / 4 >= 5, "an end of a message"


def test_a_pipeline_too_long_to_be_simulated_takes_what_a_formula_says() -> None:
    """400 micro-batches of 60 ms through each of two stages; 2.5 ms on the way there, and as much back."""
    found = terms(PipelineParallel(microbatches=400, schedule="gpipe"), replace(FOUR, batch_size=4 * ROWS))
    assert found["computing"] == pytest.approx(24.0)
    assert found["bubble"] == pytest.approx(0.06)
    assert found["communicating"] == pytest.approx(0.005, abs=1e-6)


def test_a_chain_changes_where_that_costs_least() -> None:
    price = {1: 1.0, 2: 5.0}
    costs = [[0.0, 9.0], [0.0, 0.0], [9.0, 0.0]]
    assert partitioning.chain(costs, lambda i, a, b: 0.0 if a == b else price.get(i, 0.0)) == (1.0, [0, 1, 1])
