"""What a mesh of slices, replicas and stages costs, by hand; gradients that leave early; and what a cost is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, ROWS, chain, layer, machine, network, terms, timed
from published_models import Mesh, fitted

from apportion.cost_model.cluster import layouts
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies.data_parallel import Bucket, buckets, during
from apportion.strategies.data_parallel import DataParallel

# Meshes


def mesh(profile: Profile, **how: Any) -> Cost:
    found = Mesh(profile=profile, **{"microbatch": ROWS, **how})
    return found.cost(machine(found.ranks))


def test_ranks_are_numbered_by_slices_then_replicas_then_stages() -> None:
    cube = Mesh(profile=chain(1.0, 1.0), slices=2, replicas=2, begins=(0, 1), microbatch=50)
    places = [cube.rank(s, r, stage) for stage in range(2) for r in range(2) for s in range(2)]
    assert places == list(range(8))


def test_the_stage_with_most_weights_is_summed_and_updated_longest() -> None:
    seen = network(layer("a", "x", parameter_bytes=GB), layer("b", "a", parameter_bytes=3 * GB))
    for one in (seen, replace(seen, layers=(seen.layers[1], replace(seen.layers[0], inputs=("b",))))):
        found = mesh(one, replicas=2, begins=(0, 1), microbatch=50).terms
        assert (found["communicating"], found["updating"]) == pytest.approx((3.0, 15.0))


def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages_to_go_or_micro_batches() -> None:
    seen = network(layer("a", "x", kept_bytes=40 * GB), layer("b", "a", kept_bytes=GB))
    kept = [mesh(seen, begins=(0, 1), microbatch=rows).memory["activations"] for rows in (25, 100)]
    assert kept == [40 * GB // 4 * 2, 40 * GB]


def test_the_middle_stage_has_messages_on_both_sides() -> None:
    """1 GB crosses the first cut and 4 GB the second: 3 + 1, 3 + 5 and 3 + 4 s."""
    sizes = (GB, 4 * GB, 0)
    seen = replace(
        chain(1.0, 1.0, 1.0),
        layers=tuple(replace(a, activation_bytes=n) for a, n in zip(chain(1.0, 1.0, 1.0).layers, sizes, strict=True)),
    )
    found = mesh(seen, begins=(0, 1, 2)).terms
    assert (found["computing"], found["communicating"], found["bubble"]) == pytest.approx((3.0, 5.0, 4.0 + 7.0))


def test_layers_are_priced_together_only_where_they_are_alike() -> None:
    assert mesh(chain(1.0, 2.0, 1.0)).terms["computing"] == pytest.approx(12.0)
    worked_out = network(*(layer(f"l{i}", "x", timings=(), flops=flops) for i, flops in enumerate((1e9, 5e9))))
    assert mesh(worked_out).terms["computing"] == pytest.approx(3 * 6.0)


def test_slices_sum_outputs_of_terms_and_gradients_of_what_is_whole() -> None:
    def one(name: str, source: str, *ways: str, kind: str = "Linear") -> Any:
        return layer(name, source, kind=kind, ways=ways, activation_bytes=GB)

    norm, up, act = one("norm", "x"), one("up", "norm", "units"), one("act", "up", "units", kind="GELU")
    down, again = one("down", "act", "inputs"), one("again", "down", "units")
    assert mesh(network(norm, up, act, down), slices=2).terms["communicating"] == pytest.approx(2.0)
    assert mesh(network(norm, up, act, down, again), slices=2).terms["communicating"] == pytest.approx(3.0)
    words = one("words", "x", "units", kind="Embedding")
    assert mesh(network(words), slices=2).terms["communicating"] == pytest.approx(1.0), "each has the rows of its words"
    found = mesh(network(norm, up), slices=2).terms["computing"]
    assert found == pytest.approx(3.0 + 1.5), "what cannot be cut is computed by all"


# Gradients that leave during the backward pass


def test_a_gradient_leaves_when_its_layer_has_it() -> None:
    """1 s forward, 2 s back through each of two layers; 1 GB of each takes 1 s."""
    sent = [Bucket(GB, 1), Bucket(GB, 0)]
    beyond, spans = during(machine(1, hosts=2), 1.0, [2.0, 2.0], sent)
    assert beyond == pytest.approx(1.0)
    assert [span.begin for span in spans if span.kind == "communicating"] == pytest.approx([3.0, 5.0])
    alone, _ = during(machine(1, hosts=2, hidden=0.0), 1.0, [2.0, 2.0], sent)
    assert alone == pytest.approx(2.0), "nothing goes on meanwhile"
    # The sum of the last layer's, 1 s, makes 1 s of the other layer's half as long again.
    slowed, _ = during(machine(1, hosts=2, slowdown=0.5), 1.0, [2.0, 2.0], sent)
    assert slowed == pytest.approx(1.5)
    assert during(machine(1, hosts=2), 1.0, [2.0, 2.0], [])[0] == pytest.approx(0.0)


def test_gradients_are_gathered_from_the_last_layer_on() -> None:
    seen = network(*(layer(f"l{i}", "x", parameter_bytes=n) for i, n in enumerate((1, 0, 6, 3, 8, 0))))
    assert buckets(seen, 8) == [Bucket(8, 4), Bucket(9, 2), Bucket(1, 0)]
    assert buckets(seen, 100) == [Bucket(18, 0)]
    assert buckets(network(layer("a", "x"), layer("b", "a", parameter_bytes=9)), 8) == [Bucket(9, 1)]
    assert buckets(chain(1.0), 8) == []


TWO = chain(8.0, 8.0, parameter_bytes=GB)
"""On half of the rows 8 s forward, and 8 s back through each layer."""


@pytest.mark.parametrize("where", [{"ranks": 1, "hosts": 2}, {"kind": "cuda"}], ids=str)
def test_between_hosts_and_on_gpus_only_the_first_layers_sum_is_waited_for(where: dict[str, Any]) -> None:
    """All are copied to where they travel and back, 2 GB at 1 GB/s."""
    found = DataParallel().cost(TWO, machine(**where))
    assert found.terms["computing"] == pytest.approx(24.0)
    assert found.terms["communicating"] == pytest.approx(4.0 + 1.0)
    backward = [span.begin for span in found.timeline if span.name.startswith("backward")]
    assert backward == pytest.approx([8.0, 16.0])
    on_one_host = DataParallel().cost(TWO, machine())
    assert on_one_host.timeline == ()
    assert terms(DataParallel(), TWO, ranks=1, kind="cuda")["communicating"] == 0.0


def test_of_several_parts_only_the_last_hides_anything() -> None:
    """10 s for each sum: the first begins 8 s before the end, or in four parts 2 s before it."""
    slow = {"ranks": 1, "hosts": 2, "bandwidth": 1e8}
    once, often = (terms(DataParallel(microbatches=n), TWO, **slow)["communicating"] for n in (1, 4))
    assert (once, often) == pytest.approx((4.0 + 20.0 - 8.0, 4.0 + 20.0 - 2.0))
    spans = DataParallel(microbatches=4).cost(TWO, machine(**slow)).timeline
    assert [span.begin for span in spans if span.name.startswith("backward")] == pytest.approx([20.0, 22.0])


def test_what_no_kernel_updates_in_parts_is_packed_on_one_host_where_it_is_small() -> None:
    """A gradient of 1 GB goes by itself, with a message more; 100 kB are copied to travel with others, and back."""
    seen = network(layer("a", "x", parameter_bytes=GB), layer("b", "a", parameter_bytes=100_000), element_wise=False)
    found = terms(DataParallel(), seen, latency=0.25)["communicating"]
    assert found == pytest.approx(2e5 / 1e9 + 1.0001 + 2 * 0.25 + 0.25)
    one = network(layer("a", "x", parameter_bytes=2 * 10**6), element_wise=False)  # of eight ranks too: by itself
    found = terms(DataParallel(), one, ranks=8, latency=0.25)["communicating"]
    assert found == pytest.approx(2 * 7 / 8 * 2e6 / 1e9 + 14 * 0.25 + 0.25)


# What a cost is made of


def test_a_cost_has_no_terms_but_its_own() -> None:
    with pytest.raises(AssertionError, match="unknown term computed"):
        Cost(terms={"computed": 1.0}, examples=1)
    with pytest.raises(AssertionError, match="unknown term weight"):
        Cost(terms={}, memory={"weight": 1}, examples=1)
    assert Cost(terms={"computing": 3.0, "bubble": 1.0}, examples=8).seconds_per_example == 0.5


def test_no_more_ranks_are_looked_at_than_are_asked_for() -> None:
    for kind in ("cpu", "cuda"):
        found = [layout.ranks for layout in layouts(machine(4, hosts=4, kind=kind).cluster, most=8)]
        assert max(found) == 8


def test_a_fit_leaves_what_is_far_off_aside_and_takes_no_time_that_is_none() -> None:
    """Nine times 2 s and one of 200 s, which a mean of logarithms would make 3.2 s of."""
    found = fitted({"seconds": 1.0}, lambda them: [them["seconds"]] * 10, [2.0] * 9 + [200.0])
    assert found["seconds"] == pytest.approx(2.0, rel=0.03)
    for measured in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(ValueError, match="a fit needs measurements"):
            fitted({"seconds": 1.0}, lambda them: [them["seconds"]] * 2, measured)


def test_parts_of_a_layer_that_were_timed_count_in_slices() -> None:
    times = (timed(1.0), timed(0.7, way="units", share=0.5))
    seen = network(layer("fc", "x", kind="Linear", ways=("units",), timings=times))
    assert mesh(seen, slices=2).terms["computing"] == pytest.approx(3 * 0.7)
