"""What is concluded from the recorded numbers of ranks and of one process, without running a script."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from apportion.script_check.comparison import accumulation, numbers, parameters, ranks_agree
from apportion.script_check.comparison.combination import combination, proportional
from apportion.script_check.comparison.numbers import Further
from apportion.script_check.comparison.ranks_agree import aligned
from apportion.script_check.comparison.tensors import Bounds, Place, listed, placed, unplaced
from apportion.script_check.record import RankRecord
from apportion.script_check.rows import Rows

RNG = np.random.default_rng(0)
WEIGHTS = {"net.0.weight": RNG.normal(size=(4, 3)), "net.0.bias": np.zeros(4), "net.1.weight": RNG.normal(size=(2, 4))}


def network(weights: dict[str, Any], step: int = 0, **more: Any) -> dict[str, Any]:
    modules = {name.rpartition(".")[0]: "Linear" for name in weights}
    return {
        "kind": "network", "step": step, "weights": weights, "trainable": list(weights), "modules": modules,
        "sites": dict.fromkeys(modules, "train.py:7"), "groups": {}, "placements": {}, "label": "net",
        "site": "train.py:9", **more,
    }  # fmt: skip


def step(number: int, gradients: dict[str, Any], weights: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "number": number, "optimizer": 0, "gradients": gradients,
        "weights": weights or {}, "buffers": {}, "rates": [0.1], "placements": {}, "state": {}, "site": "train.py:20",
        "forwards": number,
    }  # fmt: skip


def contributions(number: int, own: dict[str, list[Any]], sites: list[str] | None = None) -> dict[str, Any]:
    found = {name: sites or ["train.py:19"] * len(arrays) for name, arrays in own.items()}
    return {
        "kind": "contributions", "step": number - 1, "optimizer": 0, "number": number, "own": own, "sites": found,
    }  # fmt: skip


def record(rank: int, own: dict[str, Any], given: dict[str, Any], *more: dict[str, Any]) -> RankRecord:
    """One rank, whose backward adds ``own`` to the gradients, and whose optimizer is given ``given`` at step 1."""
    events = [network(WEIGHTS), *more, contributions(1, {n: [a] for n, a in own.items()}), step(1, given)]
    return RankRecord(rank, tuple(events))


def gradients() -> list[dict[str, Any]]:
    return [{name: RNG.normal(size=array.shape) for name, array in WEIGHTS.items()} for _ in range(2)]


def summed(factors: tuple[float, ...], parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: sum(f * part[name] for f, part in zip(factors, parts, strict=True)) for name in WEIGHTS}


def judged(own: list[dict[str, Any]], given: list[dict[str, Any]], one: dict[str, Any], *more: dict[str, Any]) -> Any:
    ranks = [record(rank, own[rank], given[rank], *more) for rank in range(2)]
    found = numbers.findings(ranks, record(0, one, one))
    assert len(found) <= 1
    return found[0] if found else None


def test_gradients_that_agree_give_no_finding() -> None:
    own = gradients()
    mean = summed((0.5, 0.5), own)
    assert judged(own, [mean, mean], mean) is None


def test_a_scale_of_one_part_in_a_million_in_one_tensor_is_found() -> None:
    own = gradients()
    mean = summed((0.5, 0.5), own)
    given = {**mean, "net.1.weight": mean["net.1.weight"] * (1 + 1e-6)}
    finding = judged(own, [given, given], mean)
    assert finding.name == "scale"
    assert finding.tensors == ("1.weight",)
    assert finding.factor == pytest.approx(1 + 1e-6, rel=1e-12)


def test_rounding_is_no_difference() -> None:
    own = gradients()
    mean = summed((0.5, 0.5), own)
    given = {**mean, "net.0.bias": mean["net.0.bias"] * (1 + 1e-14)}
    assert judged(own, [given, given], mean) is None


def test_a_sum_under_an_average_and_a_sum_without_one_are_distinguished() -> None:
    own = gradients()
    averaged = judged(own, [summed((0.5, 0.5), own)] * 2, summed((1.0, 1.0), own))
    assert averaged.name == "scale"
    assert averaged.factor == pytest.approx(0.5)
    assert "the loss is a sum over rows" in averaged.sentence
    added = judged(own, [summed((1.0, 1.0), own)] * 2, summed((0.5, 0.5), own))
    assert added.factor == pytest.approx(2.0)
    assert "summed and not averaged" in added.sentence


def clip(factor: float, site: str = "train.py:21") -> dict[str, Any]:
    return {
        "kind": "clip",
        "function": "clip_grad_norm_",
        "step": 0,
        "names": list(WEIGHTS),
        "factor": factor,
        "norm": None,
        "site": site,
    }


def clipped(weight: float, factor: float, one_weight: float, one_factor: float) -> Any:
    """Findings about gradients that are sums of the ranks' own ones, by a weight, and clipped by a factor."""
    own = gradients()
    given, one = summed((weight * factor,) * 2, own), summed((one_weight * one_factor,) * 2, own)
    ranks = [record(rank, own[rank], given, clip(factor)) for rank in range(2)]
    return numbers.findings(ranks, record(0, one, one, clip(one_factor)))


def test_a_scale_that_clipping_takes_away() -> None:
    for factor in (0.3, 1.0, 0.0):
        assert clipped(0.5, factor, 0.5, factor) == []
    (hidden,) = clipped(0.5, 0.4, 1.0, 0.2)
    assert (hidden.name, hidden.severity, hidden.site) == ("scale", "warning", "train.py:21")
    assert "all gradients are 0.5 times those of one process" in hidden.sentence
    assert clipped(1.0, 0.1, 0.5, 0.2)[0].factor == pytest.approx(2.0)


@pytest.mark.parametrize("factor", [0.4 * (1 + 1e-8), 0.7, 1.0])
def test_the_cause_of_a_scale_is_that_before_clipping(factor: float) -> None:
    (finding,) = clipped(0.5, factor, 1.0, 0.2)
    assert (finding.name, finding.severity) == ("scale", "difference")
    assert "0.5 times before they are clipped (1/2): the loss is a sum over rows" in finding.sentence


def test_gradients_of_their_own_are_not_averaged() -> None:
    own = gradients()
    finding = judged(own, own, summed((0.5, 0.5), own))
    assert finding.name == "not_averaged"
    assert "no wrapper and no collective" in finding.sentence


def test_a_tensor_that_is_left_out_of_the_average_is_named_with_its_line() -> None:
    own = gradients()
    mean = summed((0.5, 0.5), own)
    finding = judged(own, [{**mean, "net.1.weight": each["net.1.weight"]} for each in own], mean)
    assert finding.name == "not_averaged"
    assert finding.tensors == ("1.weight",)
    assert finding.site == "train.py:7"


def test_ranks_with_unequal_counts_that_are_weighted_alike() -> None:
    own = gradients()
    finding = judged(own, [summed((0.5, 0.5), own)] * 2, summed((0.75, 0.25), own))
    assert finding.name == "ranks_weighted_alike"
    assert "1.5 on rank 0 and 0.5 on rank 1" in finding.sentence


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ((0.4, 0.2, 0.1, 0.3), "ranks_weighted_alike"),  # rank 0's two micro-batches, then those of rank 1
        ((0.3, 0.2, 0.3, 0.2), "differs"),  # one micro-batch counts more than the other, as a whole
        ((0.5, 0.5, 0.0, 0.0), "differs"),  # one process has chosen other rows
    ],
)
def test_micro_batches_of_unequal_counts_that_are_weighted_alike(wanted: tuple[float, ...], name: str) -> None:
    parts = [part for _ in range(2) for part in gradients()]
    given, one = summed((0.25,) * 4, parts), summed(wanted, parts)
    ranks = []
    for rank in range(2):
        own = {name: [part[name] for part in parts[2 * rank : 2 * rank + 2]] for name in WEIGHTS}
        ranks.append(RankRecord(rank, (network(WEIGHTS), contributions(1, own), step(1, given))))
    (finding,) = numbers.findings(ranks, record(0, one, one))
    assert finding.name == name
    if name == "ranks_weighted_alike":
        assert "in micro-batch 1 of 2 of a step are 1.6 on rank 0 and 0.4 on rank 1" in finding.sentence


def test_gradients_clipped_before_their_average() -> None:
    own = gradients()
    finding = judged(own, [summed((0.1, 0.2), own)] * 2, summed((0.15, 0.15), own))
    assert finding.name == "clipped_before_average"
    assert "0.2 on rank 0 and 0.4 on rank 1" in finding.sentence


def test_one_ranks_gradients_on_all_ranks_are_not_called_clipped() -> None:
    own = gradients()
    finding = judged(own, [summed((1.0, 0.0), own)] * 2, summed((0.5, 0.5), own))
    assert finding.name == "not_averaged"
    assert "rows of rank 1 are left out" in finding.sentence


def test_a_rank_whose_gradient_is_enlarged_is_not_called_clipped() -> None:
    own = gradients()
    assert judged(own, [summed((0.5, 1.0), own)] * 2, summed((0.5, 0.5), own)).name == "ranks_weighted"


def test_one_process_without_the_rows_of_a_rank_is_not_called_weighted() -> None:
    own = gradients()
    finding = judged(own, [summed((0.5, 0.5), own)] * 2, summed((1.0, 0.0), own))
    assert finding.name == "differs"
    assert "nothing of the rows of rank 1" in finding.sentence


def forward(synchronized: bool) -> dict[str, Any]:
    return {
        "kind": "wrapper_forward", "step": 0, "index": 0, "sync": synchronized, "gradients": True, "site": "train.py:8",
    }  # fmt: skip


@pytest.mark.parametrize("synchronized", [(True, False, False), (False, True, False)])
def test_an_average_before_the_last_micro_batch(synchronized: tuple[bool, ...]) -> None:
    first, last = gradients(), gradients()
    own = [summed((1.0, 1.0), [a, b]) for a, b in zip(first, last, strict=True)]
    given = [summed((0.5, 0.5, 1.0), [*first, each]) for each in last]
    wrapped = {"kind": "wrapped", "step": 0, "index": 0, "path": "net", "names": list(WEIGHTS)}
    finding = judged(own, given, summed((0.5, 0.5), own), wrapped, *map(forward, synchronized))
    assert finding.name == "not_averaged"
    assert f"number {synchronized.index(True) + 1}" in finding.sentence


def test_one_of_two_wrappers_whose_forward_is_not_called() -> None:
    own = gradients()
    mean = summed((0.5, 0.5), own)
    given = [{**mean, "net.1.weight": each["net.1.weight"]} for each in own]
    names = [name for name in WEIGHTS if name != "net.1.weight"]
    wrapped = [
        {"kind": "wrapped", "step": 0, "index": 0, "path": "net.0", "names": names},
        {"kind": "wrapped", "step": 0, "index": 1, "path": "net.1", "names": ["net.1.weight"]},
    ]
    past = {"kind": "forward", "step": 0, "gradients": True, "site": "net.py:3", "caller": "train.py:18"}
    finding = judged(own, given, mean, *wrapped, forward(True), past)
    assert (finding.name, finding.tensors, finding.site) == ("not_averaged", ("1.weight",), "train.py:18")
    assert "is never called" in finding.sentence
    called = {**forward(True), "index": 1}
    assert "after the wrap" in judged(own, given, mean, *wrapped, forward(True), called).sentence


def test_an_optimizer_of_parameters_outside_of_the_wrapper() -> None:
    own = gradients()
    made = {"kind": "wrapper", "step": 0, "index": 0, "group": 2, "world": 2, "ignored": [], "site": "train.py:11"}
    wrapped = {"kind": "wrapped", "step": 0, "index": 0, "path": "backbone", "names": ["backbone.weight"]}
    finding = judged(own, own, summed((0.5, 0.5), own), made, wrapped, forward(True))
    assert (finding.name, finding.site) == ("not_averaged", "train.py:7")
    assert "they lie outside of the wrapped module" in finding.sentence


@pytest.mark.parametrize(("alike", "name"), [(True, "not_averaged"), (False, "inputs_differ")])
def test_parts_of_one_batch_are_no_other_batches(alike: bool, name: str) -> None:
    own = gradients()
    mean = summed((1.0, 1.0), own)
    given = [{**mean, "net.1.weight": each["net.1.weight"]} for each in own]
    ranks = []
    for rank in range(2):
        rows = Rows(np.arange(8.0).reshape(4, 2) + (0 if alike else rank), "float64")
        events = record(rank, own[rank], given[rank]).events[1:]
        batch = {"kind": "batch", "step": 0, "loader": "train.py:3", "iteration": 0, "number": 0, "rows": rows}
        call = {"kind": "forward", "step": 0, "gradients": True, "inputs": [f"part {rank}"], "site": "train.py:18"}
        ranks.append(RankRecord(rank, (network(WEIGHTS, groups={"net.0.weight": [0, 1]}), batch, call, *events)))
    (finding,) = numbers.findings(ranks, record(0, mean, mean))
    assert finding.name == name


def test_names_are_listed_as_in_a_sentence() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c, d and others"


def test_gradients_of_different_parameters_that_are_added() -> None:
    shape = WEIGHTS["net.0.weight"].shape
    weights = {"net.a.weight": RNG.normal(size=shape), "net.b.weight": RNG.normal(size=shape)}
    a, b = RNG.normal(size=shape), RNG.normal(size=shape)
    both = (a + b) / 2
    ranks = [
        RankRecord(0, (network(weights), contributions(1, {"net.a.weight": [a]}), step(1, {"net.a.weight": both}))),
        RankRecord(1, (network(weights), contributions(1, {"net.b.weight": [b]}), step(1, {"net.b.weight": both}))),
    ]
    one = {"net.a.weight": a / 2, "net.b.weight": b / 2}
    union = RankRecord(0, (network(weights), contributions(1, {n: [g] for n, g in one.items()}), step(1, one)))
    (finding,) = numbers.findings(ranks, union)
    assert finding.name == "different_lists"
    assert finding.tensors[0] == "a.weight"
    assert finding.ranks == (0, 1)


def test_a_tensor_scaled_on_one_rank_only() -> None:
    same = gradients()[0]
    clipped = {name: array * 0.25 for name, array in same.items()}
    finding = judged([same, same], [clipped, {**clipped, "net.0.bias": same["net.0.bias"]}], clipped)
    assert finding.name == "scaled_apart"
    assert finding.tensors == ("0.bias",)
    assert finding.ranks == (1,)
    assert finding.factor == pytest.approx(4.0)


def test_tensors_that_each_rank_scales_by_a_factor_of_its_own() -> None:
    same = gradients()[0]
    given = [{name: array * factor for name, array in same.items()} for factor in (0.5, 0.75)]
    finding = judged([same, same], given, {name: array * 0.25 for name, array in same.items()})
    assert finding.name == "scaled_apart"
    assert "2 times on rank 0 and 3 times on rank 1" in finding.sentence


def test_micro_batches_that_are_summed_over_the_ranks_again() -> None:
    own = [[*gradients()], [*gradients()]]
    every = [part for each in own for part in each]

    def rank(number: int) -> RankRecord:
        parts = {name: [part[name] for part in own[number]] for name in WEIGHTS}
        given = summed((0.5, 0.25, 0.5, 0.25), every)
        return RankRecord(number, (network(WEIGHTS), contributions(1, parts), step(1, given)))

    union = record(0, summed((0.25,) * 4, every), summed((0.25,) * 4, every))
    (finding,) = numbers.findings([rank(0), rank(1)], union)
    assert finding.name == "micro_batches_unequal"
    assert "relative to the last one by 2, 1:" in finding.sentence


def test_factors_of_parts_are_solved_for() -> None:
    parts = gradients()
    found = combination(summed((0.3, -2.0), parts), parts)
    assert found.exact
    assert found.factors == pytest.approx((0.3, -2.0))
    assert not combination(parts[0], [parts[0], parts[0]]).determined
    assert combination(parts[0], [parts[1]]).residual > 0.5
    assert proportional(parts[0]["net.0.weight"] * 3, parts[0]["net.0.weight"]) == pytest.approx(3.0)
    assert proportional(parts[0]["net.0.weight"], parts[1]["net.0.weight"]) is None


def accumulated(*steps: tuple[float, ...], sites: list[str] | None = None) -> RankRecord:
    """One process that accumulates micro-batches, with the factors given for each step."""
    events: list[dict[str, Any]] = [network(WEIGHTS)]
    for number, factors in enumerate(steps, 1):
        own = [{name: RNG.normal(size=array.shape) for name, array in WEIGHTS.items()} for _ in factors]
        for micro in range(len(factors)):
            events.append(
                {"kind": "batch", "step": number - 1, "loader": "train.py:3", "iteration": 0, "number": micro}
            )
            events.append(
                {"kind": "criterion", "step": number - 1, "value": 2.0, "reduction": "mean", "site": "train.py:18"}
            )
            events.append({"kind": "backward", "step": number - 1, "value": 2.0, "site": "train.py:19"})
        events.append(contributions(number, {name: [each[name] for each in own] for name in WEIGHTS}, sites))
        given = {name: sum(f * each[name] for f, each in zip(factors, own, strict=True)) for name in WEIGHTS}
        events.append(step(number, given))
    return RankRecord(0, tuple(events))


@pytest.mark.parametrize(
    ("factors", "name"),
    [
        ((0.0, 1.0), "dropped_micro_batches"),
        ((0.25, 1.0), "micro_batches_unequal"),
        ((1.0, 1.0), "accumulation_undivided"),
        ((0.25, 0.25), "accumulation_divided_twice"),
    ],
)
def test_micro_batches_that_are_weighted_wrongly(factors: tuple[float, ...], name: str) -> None:
    (finding,) = accumulation.findings(accumulated(*[factors] * 4))
    assert finding.name == name
    assert finding.site == "train.py:19"


def test_micro_batches_that_are_averaged_give_no_finding() -> None:
    assert accumulation.findings(accumulated(*[(0.5, 0.5)] * 4)) == []


def test_what_another_line_adds_and_a_script_wipes_is_no_micro_batch() -> None:
    assert accumulation.findings(accumulated(*[(0.0, 1.0)] * 4, sites=["train.py:19", "train.py:30"])) == []


def test_a_step_that_is_skipped_once_drops_no_micro_batches() -> None:
    assert accumulation.findings(accumulated((0.5, 0.5), (0.0, 1.0), (0.5, 0.5))) == []


def test_stages_and_slices_are_placed_by_their_values() -> None:
    stage = {"net.0.weight": WEIGHTS["net.1.weight"], "net.0.bias": np.zeros(4)}
    half = {**WEIGHTS, "net.0.weight": WEIGHTS["net.0.weight"][2:], "net.0.bias": np.zeros(4)}
    union = RankRecord(0, (network(WEIGHTS), step(1, WEIGHTS)))
    first, second = placed([RankRecord(0, (network(stage),)), RankRecord(1, (network(half),))], union)
    assert first["net.0.weight"] == Place("net.1.weight")
    assert second["net.0.weight"] == Place("net.0.weight", 0, 2)
    assert np.array_equal(
        second["net.0.weight"].part_of(WEIGHTS["net.0.weight"], half["net.0.weight"]), half["net.0.weight"]
    )


def test_a_tied_tensor_does_not_say_where_its_neighbours_lie() -> None:
    embed, first, second = (RNG.normal(size=(3, 3)) for _ in range(3))
    tied = {"net.head.weight": "net.embed.weight"}
    union = network(
        {"net.embed.weight": embed, "net.a.weight": first, "net.a.bias": np.zeros(3), "net.b.weight": second,
         "net.b.bias": np.zeros(3), "net.norm.bias": np.zeros(3)}, tied=tied,
    )  # fmt: skip
    last = network(
        {"last.b.weight": second, "last.b.bias": np.zeros(3), "last.norm.bias": np.zeros(3), "last.head.weight": embed}
    )
    (places,) = placed([RankRecord(1, (last,))], RankRecord(0, (union,)))
    assert places["last.norm.bias"] == Place("net.norm.bias")
    assert places["last.head.weight"] == Place("net.embed.weight")
    alone = {name: array for name, array in last["weights"].items() if name != "last.b.bias"}  # no run of tensors
    (places,) = placed([RankRecord(1, (network(alone),))], RankRecord(0, (union,)))
    assert places["last.norm.bias"] != Place("net.a.bias")


def test_a_parameter_of_two_networks_is_one_tensor() -> None:
    shared = RNG.normal(size=(3, 3))
    encoder, decoder = network({"encoder.weight": shared}), network({"decoder.weight": shared})
    union = RankRecord(0, (encoder, {**decoder, "tied": {"encoder.weight": "decoder.weight"}}))
    first, last = placed([RankRecord(0, (encoder,)), RankRecord(1, (decoder,))], union)
    assert first == {"encoder.weight": Place("decoder.weight")}
    assert last == {"decoder.weight": Place("decoder.weight")}


def test_shards_of_a_flat_vector_of_all_weights() -> None:
    flat = RNG.normal(size=5)
    filled = np.append(flat, 0.0)

    def stepping(gradient: Any) -> RankRecord:
        return RankRecord(0, (network(WEIGHTS), step(1, {"optimizer0.0": gradient}, {"optimizer0.0": gradient})))

    ranks = [stepping(filled[:3]), stepping(filled[3:])]
    assert placed(ranks, stepping(flat))[1]["optimizer0.0"] == Place("optimizer0.0", 0, 3, 3)
    assert numbers.findings(ranks, stepping(flat)) == []
    (finding,) = numbers.findings(ranks, stepping(0.5 * flat))
    assert finding.name == "scale"
    assert finding.factor == pytest.approx(2.0)


def test_a_trained_tensor_that_is_nowhere_in_one_process_is_named() -> None:
    other = {"net.0.weight": RNG.normal(size=(2, 3)), "net.0.bias": np.zeros(4)}
    union = RankRecord(0, (network(WEIGHTS), step(1, WEIGHTS)))
    assert unplaced([RankRecord(0, (network(other), step(1, other)))], union) == ["net.0.weight on rank 0"]


def test_an_optimizer_with_parameters_of_before() -> None:
    orphans = {f"optimizer0.{at}": array for at, array in enumerate(WEIGHTS.values())}
    none = dict.fromkeys(orphans)
    (finding,) = parameters.stale_optimizers([RankRecord(0, (network(WEIGHTS), step(1, none, orphans)))])
    assert finding.name == "stale_optimizer"
    assert "No parameter of the network moves" in finding.sentence
    assert parameters.stale_optimizers([RankRecord(0, (network(WEIGHTS), step(1, WEIGHTS, WEIGHTS)))]) == []


@pytest.mark.parametrize("forwards", [[1, 2, 4, 5], [1, 3, 4, 5, 6]])
def test_a_rank_that_leaves_out_a_step(forwards: list[int]) -> None:
    all_steps = [{**step(at, {}), "forwards": at} for at in range(1, 6)]
    own = [{**step(at, {}), "forwards": count} for at, count in enumerate(forwards, 1)]
    assert ranks_agree.findings([RankRecord(0, tuple(all_steps)), RankRecord(1, tuple(all_steps))]) == []
    (finding,) = ranks_agree.findings([RankRecord(0, tuple(all_steps)), RankRecord(1, tuple(own))])
    assert finding.name == "skipped_steps"
    assert finding.ranks == (1,)
    assert finding.step == (3 if len(forwards) == 4 else 2)


def test_steps_that_a_rank_leaves_out_at_its_end_under_join_are_meant() -> None:
    steps = [{**step(at, {}), "forwards": at} for at in range(1, 6)]
    joined: dict[str, Any] = {"kind": "join", "step": 0, "site": "train.py:1"}
    ranks = [RankRecord(0, (joined, *steps)), RankRecord(1, (joined, *steps[:-1]))]
    assert ranks_agree.findings(ranks) == []
    assert len(ranks_agree.findings([ranks[0], RankRecord(1, tuple(steps[:-1]))])) == 1


def test_steps_after_those_that_a_rank_leaves_out_under_join_are_numbered_as_on_the_other() -> None:
    joined: dict[str, Any] = {"kind": "join", "site": "train.py:1"}

    def epochs(*counts: int) -> RankRecord:
        made, events = 0, list[dict[str, Any]]()
        for count in counts:
            events.append({**joined, "step": made})
            for _ in range(count):
                made += 1
                events += [contributions(made, {}), step(made, {})]
        return RankRecord(len(counts), tuple(events))

    for record in aligned([epochs(3, 2, 1), epochs(2, 3, 1)]):
        assert [event["number"] for event in record.events_of("contributions")] == [
            each["number"] for each in record.steps
        ]
        assert [event["step"] for event in record.events_of("join")] == [0, 3, 6]
    one, two = aligned([epochs(3, 2, 1), epochs(2, 3, 1)])
    assert [each["number"] for each in one.steps] == [1, 2, 3, 4, 5, 7]
    assert [(each["number"], each["step"]) for each in two.steps] == [(1, 1), (2, 2), (4, 4), (5, 5), (6, 6), (7, 7)]
    apart = [epochs(3, 2), epochs(2)]
    assert aligned(apart) is apart


def test_ranks_that_begin_with_different_weights() -> None:
    other = {**WEIGHTS, "net.1.weight": RNG.normal(size=(2, 4))}
    ranks = [RankRecord(0, (network(WEIGHTS),)), RankRecord(1, (network(other),))]
    (finding,) = parameters.findings(ranks, RankRecord(0, (network(WEIGHTS), step(1, WEIGHTS))))
    assert finding.name == "different_beginnings"
    assert finding.tensors == ("1.weight",)
    assert finding.ranks == (1,)


@pytest.mark.parametrize("whole", [True, False])
def test_weights_after_a_load_are_those_that_were_saved(whole: bool) -> None:
    weights = WEIGHTS["net.0.weight"]
    after = weights if whole else np.concatenate([weights[:2], weights[:2]])
    file = {"tensors": {"0.weight": weights if whole else weights[:2]}, "path": "last.pt", "site": "train.py:30"}
    events = (
        network({"net.0.weight": weights}),
        step(1, {"net.0.weight": weights}, {"net.0.weight": weights}),
        {"kind": "save", "step": 1, **file},
        {"kind": "load", "step": 1, **file},
        network({"net.0.weight": after}, 1),
    )
    found = parameters.loaded_weights([RankRecord(0, events)])
    if whole:
        assert found == []
        return
    (finding,) = found
    assert finding.name == "loaded_weights"
    assert finding.step == 2
    assert "rows 2 to 3 repeat rows 0 to 1" in finding.sentence


@pytest.mark.parametrize(
    ("given", "wanted", "name"),
    [
        ((0.5, 0.5), (1.0, 1.0), "scale"),
        ((0.5, 0.5), (0.7, 0.3), "ranks_weighted_alike"),
        ((0.2, 0.4), (0.5, 0.5), "clipped_before_average"),
        ((0.5, 0.5), (0.5, 0.5), None),
    ],
)
def test_causes_are_named_in_the_precision_of_the_script(
    given: tuple[float, ...], wanted: tuple[float, ...], name: str | None
) -> None:
    noise = 2e-6
    own = gradients()
    rounded = [
        {each: a * (1 + noise * RNG.normal(size=a.shape)) for each, a in summed(given, own).items()} for _ in range(2)
    ]
    ranks = [record(rank, own[rank], rounded[0]) for rank in range(2)]
    one = summed(wanted, own)
    found = numbers.findings(ranks, record(0, one, one), Further(bounds={(0, 1): Bounds(1e-5, 1e-5)}))
    assert [finding.name for finding in found] == ([] if name is None else [name])
    if name is not None:
        assert "differs" in {finding.name for finding in numbers.findings(ranks, record(0, one, one))}, "in float64"


def test_a_file_that_another_rank_saves_at_each_epoch_holds_the_last_weights_before_the_load() -> None:
    first, second, third = ({"net.0.weight": WEIGHTS["net.0.weight"] + number} for number in range(3))
    saving, loading = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, weights in enumerate((first, second), 1):
        made = step(number, weights, weights)
        file = {"step": number, "path": "last.pt", "site": "train.py:30"}
        saving += [made, {"kind": "save", "tensors": {"0.weight": weights["net.0.weight"]}, **file}]
        loading += [made, {"kind": "load", **file}, network(weights, number)]
    saving += [step(3, third, third), {**saving[-1], "step": 3, "tensors": {"0.weight": third["net.0.weight"]}}]
    assert parameters.loaded_weights([RankRecord(0, tuple(saving)), RankRecord(1, tuple(loading))]) == []
    loading[-1] = network(first, 2)
    (finding,) = parameters.loaded_weights([RankRecord(0, tuple(saving)), RankRecord(1, tuple(loading))])
    assert (finding.name, finding.ranks, finding.step) == ("loaded_weights", (1,), 3)
