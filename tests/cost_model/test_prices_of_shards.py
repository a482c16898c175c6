"""What a step costs whose weights lie in shards, by hand: what is gathered, what is scattered, what is held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, chain, layer, machine, network, terms

from apportion.cost_model.profile import Profile
from apportion.strategies.fully_sharded import FullySharded


def sharded(**facts: Any) -> Profile:
    """1 GB that is gathered by itself, and 100 MB that are gathered at the beginning."""
    return network(layer("a", "x", parameter_bytes=GB), layer("b", "a", parameter_bytes=GB // 10), **facts)


SHARDS = FullySharded(min_num_params=10**8)


def test_on_cpus_shards_come_and_go_in_turn() -> None:
    """1 GB: gathered (0.5 s on the wire, 3 s of copies) forward and backward, its gradient scattered (0.5 s and 4 s).
    100 MB: once each."""
    assert terms(SHARDS, sharded())["communicating"] == pytest.approx(11.5 + 0.8, rel=1e-6)
    assert terms(SHARDS, sharded())["updating"] == pytest.approx(1.1 * 5 / 2)
    none = FullySharded(min_num_params=10**9)
    assert terms(none, sharded())["communicating"] == pytest.approx(1.1 * 8.0, rel=1e-6)


def test_shards_come_and_go_for_every_part_and_the_loss_is_told_once() -> None:
    once, often = (terms(FullySharded(min_num_params=10**8, microbatches=n), sharded()) for n in (1, 4))
    assert often["communicating"] == pytest.approx(4 * once["communicating"], rel=1e-6)
    late = terms(SHARDS, sharded(), latency=1.0)["communicating"] - once["communicating"]
    assert late == pytest.approx(3 + 2 + 2), "three messages of the one, two of the other, and a sum"


def test_besides_its_shards_a_rank_holds_the_largest_layer_and_what_is_gathered_at_the_beginning() -> None:
    held = SHARDS.cost(sharded(), machine()).memory
    assert held["weights"] == held["gradients"] == 1.1 * GB / 2 + 1.1 * GB
    assert SHARDS.cost(sharded(), machine(1)).memory["weights"] == 1.1 * GB


def test_gpus_gather_one_layer_ahead_and_no_more() -> None:
    """Three layers of 1 s and 2 s, half a second to gather or to scatter: only the first gathering and the last
    scattering are waited for."""
    three = chain(2.0, 2.0, 2.0, parameter_bytes=GB)
    cost = FullySharded().cost(three, machine(kind="cuda", memory_rate=1e15))
    assert cost.terms["communicating"] == pytest.approx(0.5 + 0.5, rel=1e-3)
    gathered = [span.begin for span in cost.timeline if span.name.startswith("gather ")][1:]  # after the rest
    assert gathered == pytest.approx([0.0, 0.5, 1.5, 2.5, 3.5, 5.5], abs=0.01)
    backward = [span for span in cost.timeline if span.name.startswith("backward ")]
    assert [span.begin for span in backward[:3]] == pytest.approx([3.5, 5.5, 7.5], abs=0.01)


def test_what_has_few_weights_computes_while_others_are_gathered() -> None:
    """1.5 s to gather or scatter one of two, between which lies a layer of 1 s without: the second is gathered behind
    it. Waited for are the first 1.5 s, the last 1.5 s, and 0.5 s of gathering the second again."""
    many = chain(2.0, 2.0, 2.0, parameter_bytes=GB).layers
    seen = network(many[0], replace(many[1], parameter_bytes=0), many[2])
    cost = FullySharded().cost(seen, machine(kind="cuda", memory_rate=1e15, bandwidth=1e9 / 3))
    assert cost.terms["communicating"] == pytest.approx(3.5, rel=1e-3)
