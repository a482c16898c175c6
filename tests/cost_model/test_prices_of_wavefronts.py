"""What recurrent layers cost that work a chunk of time behind each other, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, ROWS, bookkeeping, layer, machine, network, seconds, terms, timed

from apportion.cost_model.compute import slowest
from apportion.cost_model.profile import Profile, Timing
from apportion.strategies.wavefront_parallel import WavefrontParallel


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
    # What cannot go on by itself is half each rank's own: a second more of every chunk, and none between them.
    assert seconds(WavefrontParallel(chunk=16), sent, hidden=0.0) == pytest.approx(5 * 2.0 + 5 * 2.0 + 4.0)
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
    # Five chunks each way on the path through both layers, each with two messages.
    chunk = (fine - coarse) / 62 / 2 / 2
    assert two >= 2 * 5 * (chunk + 2 * 5)
    assert bookkeeping(WavefrontParallel(chunk=16), wave(), machine(2)) > 40


def test_waves_wait_for_chance_and_load() -> None:
    seen = replace(wave(), loading_seconds=0.25)
    found = terms(WavefrontParallel(chunk=16), seen, spread=0.5)
    assert found["loading"] == 25.0
    assert found["waiting"] == pytest.approx(found["computing"] * (slowest(2, 0.5) - 1))


def test_the_last_chunk_goes_back_first() -> None:
    cost = WavefrontParallel(chunk=16).cost(wave(), machine())
    spans = sorted((span.begin, span.name) for span in cost.timeline if span.name.startswith(("forward", "backward")))
    order = [name for _, name in spans if name.split()[1].startswith("1:")]
    assert order == [f"forward 1:{i}" for i in range(4)] + [f"backward 1:{i}" for i in (3, 2, 1, 0)]
