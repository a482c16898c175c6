"""What strategies cost that give ranks parts of each layer, by hand: what is summed and what is gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, ROWS, bookkeeping, conv, layer, machine, network, terms, timed

from apportion.cost_model.compute import slowest
from apportion.cost_model.profile import LayerProfile, Profile
from apportion.cost_model.strategies import tensor
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.tensor_parallel import TensorParallel


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
    late = sliced(first, dense("fc", "norm"), **SLOW, latency=1.0)
    assert late - logits == pytest.approx(4 * 2 * 1.0), "in three sums, and one of the gradient"


def test_what_is_used_elsewhere_too_is_no_pair() -> None:
    up, act, down = dense("up", "x"), other("act", "up", "ReLU"), dense("down", "act")
    both = layer("both", "down", "act", kind="add")
    # ``up`` alone (0.5, nothing back), ``down`` alone (0.5 and 1 back).
    assert sliced(up, act, down, both, **SLOW) == pytest.approx(0.5 + 1.5)


def test_what_mixes_features_is_no_part_of_a_pair() -> None:
    """Each alone gathers what it made, and sums the gradient of what it was given."""
    first, up, down = other("norm", "x", "LayerNorm"), dense("up", "norm"), dense("down", "mix")
    mixing, usual = (
        sliced(first, up, other("mix", "up", k), down, other("end", "down", "Softmax"), **SLOW)
        for k in ("Softmax", "ReLU")
    )
    assert (mixing, usual) == pytest.approx((2 * (0.5 + 1.0), 2.0))


def test_the_features_of_a_layer_are_known_by_its_weights_and_products() -> None:
    wide = replace(dense("fc", "x"), parameter_bytes=4 * (2000 * 1000 + 1000), flops=2.0 * ROWS * 2000 * 1000)
    assert tensor.width(network(wide), wide) == pytest.approx((2000, 1000))


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
    assert found["computing"] == trick(seen, "rotate")["computing"] == pytest.approx(1.5 + 1.5)
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
    held = HybridParallel(exchange="rotate").cost(seen, machine(ranks=1, hosts=2)).memory
    assert held["activations"] == round(50 + 2.5), "a share at a time"
    chance = trick(seen, spread=0.5)["waiting"]
    assert chance == pytest.approx(3.0 * (slowest(2, 0.5) - 1))
    assert trick(replace(seen, batch_size=99), ranks=2)["computing"] > 1.0


def begins_at(least: int, *layers: LayerProfile) -> int | None:
    """The wire carries outputs in a second, and the 4 MB of weights in ten."""
    seen = network(*layers)
    how = tensor.sliced(seen, min_width=1)
    return tensor.first_sliced_layer(seen, machine(memory_rate=1e15, **SLOW), how, least=least)


def test_slices_begin_where_weights_are_many_and_nothing_goes_back_to_rows_behind_them() -> None:
    first, last = other("norm", "x", "LayerNorm"), dense("last", "act")
    assert begins_at(0, first, dense("fc", "norm")) == 1
    assert begins_at(0, first, other("act", "norm", "ReLU")) is None
    # Between them lies what each rank would compute whole: 150 s more than its rows take.
    between = other("act", "fc", "Softmax", forward=100.0)
    assert begins_at(0, first, dense("fc", "norm"), between, last) == 3
    assert begins_at(0, first, dense("fc", "norm"), replace(between, timings=(timed(1.0),)), last) == 1


def test_slices_begin_no_earlier_than_they_may() -> None:
    pair = dense("up", "x"), dense("down", "up")
    assert [begins_at(least, *pair) for least in (0, 1)] == [0, 1]


def test_the_slowest_device_is_waited_for_in_front_and_behind() -> None:
    """Of 1 and of 0.5 GFLOP/s: a half of 3 s in front and a half behind take twice as long."""
    layout = machine(1, hosts=2, memory_rate=1e15)
    quick, other_ = layout.cluster.devices
    slow = replace(other_, model="slow", rates=(replace(other_.rates[0], flops=0.5e9),))
    mixed = replace(layout, cluster=replace(layout.cluster, devices=(quick, slow)))
    front = conv("a", "x", flops=1e9, timings=())
    seen = network(front, replace(dense("fc", "a"), flops=1e9, timings=()))
    for layout_, expected in ((layout, 3.0), (mixed, 6.0)):
        found = HybridParallel().cost(seen, layout_).terms
        assert found["computing"] == pytest.approx(expected, rel=1e-3)
