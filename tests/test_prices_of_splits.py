"""What strategies cost that divide the network, by hand: who computes what, what is on the way, what a rank holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, ROWS, bookkeeping, chain, layer, machine, network

from apportion.cluster import Cluster, Device, Link, Rate
from apportion.pricing import strips
from apportion.pricing.layout import Layout
from apportion.pricing.slowest import slowest
from apportion.profile import LayerProfile, Pass, Profile, Timing
from apportion.strategies.conv_parallel import ConvParallel
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.tensor_parallel import TensorParallel
from apportion.strategies.wavefront_parallel import WavefrontParallel
from apportion.strategy import Strategy


def seconds(strategy: Strategy, profile: Profile, **where: Any) -> float:
    return strategy.cost(profile, machine(**where)).step_seconds


def terms(strategy: Strategy, profile: Profile, **where: Any) -> dict[str, float]:
    return dict(strategy.cost(profile, machine(**where)).terms)


# The whole and its layers


def test_layers_take_together_what_the_whole_network_took() -> None:
    """Timed one by one 4 s and 8 s, as a whole 1 s and 3 s: each layer's part of that."""
    whole = (Pass(rows=ROWS, forward=1.0, backward=3.0, update=7.0),)
    seen = replace(chain(1.0, 3.0), passes=whole)
    assert terms(LayerPlacement(), seen, ranks=1)["computing"] == pytest.approx(4.0)


def uneven() -> Layout:
    """Two ranks that share a host, and one that has a host of its own; who shares takes twice as long."""
    rates = tuple(Rate(threads=1, together=n, flops=1e9 / n, bytes_per_second=1e9) for n in (1, 2))
    device = Device(
        name="h0/cpu", host="h0", kind="cpu", model="made", memory_bytes=1 << 50, rates=rates, cores=2, spread=0.0,
        call_seconds=0.0,
    )  # fmt: skip
    devices = (device, replace(device, name="h1/cpu", host="h1"))
    link = Link(kind="wire", devices=("h0/cpu", "h1/cpu"), latency=0.0, bandwidth=1e9)
    return Layout(cluster=Cluster(name="c", devices=devices, links=(link,)), devices=("h0/cpu", "h0/cpu", "h1/cpu"))


def test_ranks_that_sit_otherwise_take_other_times_and_are_waited_for() -> None:
    rows = (timed(1.0, together=1), timed(2.0, together=2))
    seen = network(*(layer(f"l{i}", "x", ways=("units",), kind="LSTM", timings=rows) for i in range(3)))
    placed = LayerPlacement().cost(seen, uneven())
    assert placed.step_seconds == pytest.approx(2 * 6.0 + 3.0)
    sliced = TensorParallel().cost(seen, uneven()).terms
    assert sliced["computing"] + sliced["waiting"] == pytest.approx(3 * 6.0 / 3)
    assert sliced["waiting"] > 0


def timed(forward: float, **facts: Any) -> Timing:
    return Timing(**{"rows": ROWS, "forward": forward, "backward": 2 * forward, **facts})


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


def test_named_cuts_are_layers_or_what_holds_them() -> None:
    seen = network(*(layer(name, "x") for name in ("a.0", "a.1", "b.0", "b.1")))
    by_block = PipelineParallel(cuts=("b",), microbatches=1).cost(seen, machine())
    assert by_block.step_seconds == pytest.approx(12.0)
    with pytest.raises(ValueError, match="no stage can begin with 'b'"):
        PipelineParallel(cuts=("b.1", "b"), microbatches=1).cost(seen, machine(3))


def test_slower_devices_are_as_slow_in_every_stage_that_they_have() -> None:
    layout = machine(ranks=1, hosts=2)
    first, second = layout.cluster.devices
    slow = replace(second, model="old", rates=(Rate(threads=1, together=1, flops=1e9 / 2, bytes_per_second=1e9),))
    cluster = replace(layout.cluster, devices=(replace(first, model="new"), slow))
    seen = network(*(layer(f"l{i}", "x", flops=1e9, timings=()) for i in range(2)))
    found = LayerPlacement(cuts=("l1",)).cost(seen, replace(layout, cluster=cluster))
    assert found.step_seconds == pytest.approx(3.0 + 6.0)


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


# Slices


def sliced(*layers: LayerProfile, **where: Any) -> float:
    """Seconds of communication, among two."""
    return terms(TensorParallel(), network(*layers), **where)["communicating"]


def dense(name: str, source: str, ways: tuple[str, ...] = ("units", "inputs")) -> LayerProfile:
    """Of 1000 features in and out, of which 1 GB goes over the wire in a second; two ranks sum it in that."""
    return layer(
        name, source, kind="Linear", parameter_bytes=4 * 1000 * 1001, activation_bytes=4 * ROWS * 1000,
        flops=2.0 * ROWS * 1000 * 1000, ways=ways,
    )  # fmt: skip


SLOW = {"bandwidth": 4.0 * ROWS * 1000}
"""So that outputs of 1000 features are summed in a second, and gathered in half of one."""


def other(name: str, source: str, kind: str, **facts: Any) -> LayerProfile:
    return layer(name, source, kind=kind, activation_bytes=4 * ROWS * 1000, **facts)


def test_a_pair_sums_its_outputs_and_the_gradients_of_its_inputs() -> None:
    pair = (dense("up", "x"), other("act", "up", "ReLU"), dense("down", "act"))
    last = other("end", "down", "Softmax")
    assert sliced(*pair, last, **SLOW) == pytest.approx(1.0), "the network's own inputs need no gradient"
    first = other("norm", "x", "LayerNorm")
    assert sliced(first, replace(pair[0], inputs=("norm",)), *pair[1:], last, **SLOW) == pytest.approx(2.0)


def test_a_layer_alone_gathers_its_outputs_and_the_last_has_a_loss_of_its_slices() -> None:
    first = other("norm", "x", "LayerNorm")
    alone = sliced(first, dense("fc", "norm"), other("end", "fc", "Softmax"), **SLOW)
    assert alone == pytest.approx(0.5 + 1.0)
    logits = sliced(first, dense("fc", "norm"), **SLOW)
    assert 1.0 < logits < 1.1, "a few numbers a row instead of the logits"


def test_what_is_used_elsewhere_too_is_no_pair() -> None:
    up, act, down = dense("up", "x"), other("act", "up", "ReLU"), dense("down", "act")
    both = layer("both", "down", "act", kind="add")
    # ``up`` alone (0.5, nothing back), ``down`` alone (0.5 and 1 back).
    assert sliced(up, act, down, both, **SLOW) == pytest.approx(0.5 + 1.5)


def test_embeddings_attention_blocks_and_recurrent_layers_send_what_they_have_to() -> None:
    first, ways = other("norm", "x", "LayerNorm"), ("units",)
    words = other("words", "x", "Embedding", parameter_bytes=4 * 1000 * 5000, ways=ways)
    assert sliced(words, **SLOW) == pytest.approx(1.0)
    heads = other("heads", "norm", "MultiheadAttention", ways=ways)
    assert sliced(first, heads, **SLOW) == pytest.approx(1.0 + 1.0)
    block = other("block", "norm", "TransformerEncoderLayer", ways=ways)
    assert sliced(first, block, **SLOW) == pytest.approx(2 * (1.0 + 1.0))
    lstm = other("lstm", "norm", "LSTM", ways=ways, stack=3, length=5)
    # A fifth of the outputs at each of 5 moments of 3 layers, forward and backward.
    assert sliced(first, lstm, **SLOW) == pytest.approx(2 * 3 * 0.5)
    assert sliced(first, lstm, **SLOW, latency=1.0) == pytest.approx(2 * 3 * 0.5 + 2 * 3 * 5 * 1.0)


def test_what_lies_between_the_layers_of_a_pair_is_sliced_with_them() -> None:
    up = replace(dense("up", "x"), kept_bytes=100)
    act = other("act", "up", "ReLU", kept_bytes=200)
    down = replace(dense("down", "act"), kept_bytes=400)
    last = other("end", "down", "Softmax", kept_bytes=800)
    cost = TensorParallel().cost(network(up, act, down, last), machine(ranks=1, hosts=2))
    assert cost.terms["computing"] == pytest.approx(3 * 3.0 / 2 + 3.0)
    assert cost.memory["activations"] == 700 / 2 + 800
    assert cost.memory["weights"] == 4 * 1000 * 1001


def test_parts_that_were_timed_are_of_their_own_kind() -> None:
    """A row of a pair is cut by its inputs, everything else by its units."""
    times = (timed(1.0), timed(0.6, way="units", share=0.5), timed(0.8, way="inputs", share=0.5))
    pair = [replace(dense(n, s), timings=times) for n, s in (("up", "x"), ("down", "act"))]
    seen = network(
        pair[0], other("act", "up", "ReLU", forward=0.0), pair[1], other("end", "down", "Softmax", forward=0)
    )
    assert terms(TensorParallel(), seen)["computing"] == pytest.approx(3 * (0.6 + 0.8))


def test_each_slice_has_its_python() -> None:
    pair = network(dense("up", "x"), other("act", "up", "ReLU"), dense("down", "act"), other("end", "down", "Softmax"))
    assert bookkeeping(TensorParallel(), pair, machine()) > 20


def test_narrow_layers_are_sliced_where_there_are_no_others() -> None:
    narrow = layer(
        "fc", "x", kind="Linear", parameter_bytes=4 * 8 * 9, activation_bytes=4 * ROWS * 8, flops=2.0 * ROWS * 64,
        ways=("units",),
    )  # fmt: skip
    word = other("words", "x", "Embedding", parameter_bytes=4 * 1000 * 8, ways=("units",))
    assert TensorParallel().cost(network(narrow), machine(ranks=1, hosts=2)).memory["weights"] == 4 * 8 * 9 / 2
    both = TensorParallel().cost(network(dense("up", "x"), narrow, word), machine(ranks=1, hosts=2))
    assert both.memory["weights"] == 4 * 1000 * 1001 / 2 + 4 * 8 * 9 + 4 * 1000 * 8


# Waves


def wave(**facts: Any) -> Profile:
    given = {"kind": "LSTM", "stack": 2, "length": 64, "forward": 8.0, **facts}
    return network(layer("lstm", "x", **given))


def test_two_layers_work_a_chunk_apart_and_make_the_gradients_of_their_weights_at_the_end() -> None:
    """Four chunks of 1 s: the second layer is done after 5 s, backward after 9, the first after 10; and 4 s of the
    gradients of its weights."""
    assert seconds(WavefrontParallel(chunk=16), wave()) == pytest.approx(14.0)
    gru = wave(kind="GRU")  # its gradients come as it goes: chunks of 2 s
    assert seconds(WavefrontParallel(chunk=16), gru) == pytest.approx(5.0 + 2.0 * 5)
    assert seconds(WavefrontParallel(chunk=16), wave(), ranks=1) == pytest.approx(24.0)


def test_layers_around_the_recurrent_ones_are_on_the_first_and_the_last_rank() -> None:
    seen = wave(parameter_bytes=2 * GB, kept_bytes=20)
    (lstm,) = seen.layers
    before, after = layer("e", "x", forward=1.0, parameter_bytes=GB), layer("h", "lstm", forward=10.0, kept_bytes=70)
    both = network(before, replace(lstm, inputs=("e",)), after)
    # The gradients of weights, 4 s, are made beside the first rank's last chunk and the first layer, 2 s.
    found = WavefrontParallel(chunk=16).cost(both, machine(ranks=1, hosts=2))
    assert found.step_seconds - found.terms["updating"] == pytest.approx(1.0 + 5.0 + 30.0 + 5.0 + 2.0 + 4.0)
    assert found.terms["updating"] == pytest.approx(2 * 5.0)
    assert found.memory["weights"] == 2 * GB
    # Of three layers the first rank has two.
    three = replace(lstm, stack=3, parameter_bytes=3 * GB)
    assert WavefrontParallel(chunk=16).cost(network(three), machine(ranks=1, hosts=2)).memory["weights"] == 2 * GB


def test_chunks_travel_between_layers() -> None:
    """4 GB in four chunks: one second on the way forward, and one back."""
    sent = wave(activation_bytes=4 * GB)
    assert seconds(WavefrontParallel(chunk=16), sent) == pytest.approx(16.0)
    # What cannot go on by itself is half each rank's own: 4 x 4 halves of a second more of rank 0's.
    assert seconds(WavefrontParallel(chunk=16), sent, hidden=0.0) > 16.0 + 2.0
    cost = WavefrontParallel(chunk=16).cost(sent, machine(hidden=0.0))
    assert cost.terms["computing"] == pytest.approx(12.0)


def test_chunks_that_were_timed_count_and_what_is_left_is_of_the_weights() -> None:
    """Both layers 4 s and 8 s; all 4 chunks of one together 6 s and 6 s: 2 s are left for the end."""
    times = (
        timed(8.0), timed(4.0, way="layer", share=0.5),
        Timing(rows=ROWS, way="chunk", share=1 / 8, forward=1.5, backward=1.5),
    )  # fmt: skip
    assert seconds(WavefrontParallel(chunk=16), wave(timings=times)) == pytest.approx(5 * 1.5 + 5 * 1.5 + 2.0)


def test_each_chunk_has_its_python_on_one_rank_and_its_messages_on_two() -> None:
    fine, coarse = (bookkeeping(WavefrontParallel(chunk=c), wave(), machine(1)) for c in (1, 32))
    assert fine - coarse > 2 * 2 * (64 - 2) * 5, "of two layers, forward and backward, 62 chunks more"
    two = bookkeeping(WavefrontParallel(chunk=16), wave(activation_bytes=8), machine())
    four_chunks = (fine - coarse) / 62 * 4 / 2  # of one layer, without messages
    assert two > four_chunks + 4 * 2 * 5
    assert bookkeeping(WavefrontParallel(chunk=16), wave(), machine(2)) > 40


def test_waves_wait_for_chance_and_load() -> None:
    seen = replace(wave(), loading_seconds=0.25)
    found = terms(WavefrontParallel(chunk=16), seen, spread=0.5)
    assert found["loading"] == 25.0
    assert found["waiting"] == pytest.approx(found["computing"] * (slowest(2, 0.5) - 1))


# Images


def conv(name: str, source: str, **facts: Any) -> LayerProfile:
    """8 rows high, a window of 3; 0.8 GB of outputs: a row is 0.1 GB."""
    given = {
        "kind": "Conv2d",
        "image": (8, 3, 1),
        "ways": ("height", "units", "inputs"),
        "activation_bytes": 8 * GB // 10,
    }
    return layer(name, source, **{**given, **facts})


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
    assert strips.images(only_height, "height") is not None
    assert strips.images(only_height, "units") is None
    seen = network(
        conv("a", "x"), layer("act", "a", kind="ReLU"), conv("b", "act"), layer("v", "b", kind="view"), fc("v")
    )
    found = strips.images(seen, "height")
    assert found is not None
    assert (found.cut, found.first, found.joined) == (4, 0, 4)


# One weird trick


def trick(profile: Profile, exchange: str = "all", **where: Any) -> dict[str, float]:
    return terms(HybridParallel(exchange=exchange), profile, **where)


def test_rows_in_front_and_slices_behind_exchange_what_crosses() -> None:
    """The convolution: half of its 3 s, and its weights summed in 1 s. 2 GB cross, of which a rank lacks half. Behind
    it half of 3 s; outputs gathered, gradients of what crossed summed."""
    front = conv("a", "x", parameter_bytes=GB, activation_bytes=2 * GB, kept_bytes=100)
    back = replace(dense("fc", "a"), kept_bytes=10)
    seen = network(front, back, other("end", "fc", "Softmax", forward=0.0))
    found = trick(seen)
    assert found["computing"] == pytest.approx(1.5 + 1.5)
    assert found["communicating"] == pytest.approx(1.0 + 1.0 + 2.0, rel=1e-3)
    # In turns all shares but the first come meanwhile: a half of the second that they take.
    assert found["communicating"] - trick(seen, "rotate")["communicating"] == pytest.approx(0.5, rel=1e-3)
    assert found["updating"] == pytest.approx(5 * (1.0 + 0.002002), rel=1e-6)
    norm = layer("n", "a", kind="BatchNorm2d", activation_bytes=2 * GB, forward=0.0)
    normed = network(front, norm, replace(back, inputs=("n",)), seen.layers[2])
    late = trick(normed, latency=0.25)["communicating"] - trick(seen, latency=0.25)["communicating"]
    assert late == pytest.approx(4 * 2 * 0.25), "statistics, forward and backward"
    held = HybridParallel().cost(seen, machine(ranks=1, hosts=2)).memory
    assert held["activations"] == 50 + 5
    chance = trick(seen, spread=0.5)["waiting"]
    assert chance == pytest.approx(3.0 * (slowest(2, 0.5) - 1))
    assert trick(replace(seen, batch_size=99), ranks=2)["computing"] > 1.0
