"""Feeds, names and bounds of the reference, from records that no process has made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_events import Rank

from apportion.script_check.comparison import parameters
from apportion.script_check.comparison.coverage import coverage, gradients_alike, not_finite, same_rows, untrained
from apportion.script_check.comparison.shared_rows import are_replicas
from apportion.script_check.comparison.tables import step_table
from apportion.script_check.comparison.tensors import measured_bounds, placed
from apportion.script_check.driver import RanksPass, _undecided, with_recorded_rows
from apportion.script_check.feed import FedIteration, Feed, reversed_batches
from apportion.script_check.findings import Finding, answer
from apportion.script_check.passes import Conditions, PassResult, port_was_taken
from apportion.script_check.record import RankRecord
from apportion.script_check.references import _accumulates
from apportion.script_check.rows import Rows, Structure, joined, reversed_rows
from apportion.script_check.union import draws_for_batches, draws_rank_by_rank, draws_to_join, replay_feed, union_feed
from apportion.script_check.waiting import WaitOutcome


def record(rank: int, *events: dict[str, Any]) -> RankRecord:
    return RankRecord(rank, tuple({"step": 0, **event} for event in events))


def network(**weights: list[float]) -> dict[str, Any]:
    return {"kind": "network", "weights": {name: np.array(values) for name, values in weights.items()}}


def step(number: int = 1, **gradients: list[float]) -> dict[str, Any]:
    arrays = {name: np.array(values) for name, values in gradients.items()}
    return {
        "kind": "step", "step": number - 1, "optimizer": 0, "number": number, "rates": [0.1], "gradients": arrays,
        "weights": arrays, "site": "train.py:9",
    }  # fmt: skip


def read(*batches: list[int]) -> list[dict[str, Any]]:
    begun = {"kind": "iteration", "loader": "a", "number": 0, "length": len(batches), "rows": 9}
    rows = [
        {"kind": "batch", "loader": "a", "iteration": 0, "indices": rows, "rows": Rows(np.array(rows), "int64")}
        for rows in batches
    ]
    return [begun, *rows]


def test_stages_get_the_names_of_the_run_of_tensors_with_their_values() -> None:
    union = record(0, network(a=[1.0], zero=[0.0], b=[2.0], null=[0.0]))
    first, second = record(0, network(a=[1.0], zero=[0.0])), record(1, network(a=[2.0], zero=[0.0]))
    found = [{name: place.name for name, place in places.items()} for places in placed([first, second], union)]
    assert found == [{"a": "a", "zero": "zero"}, {"a": "b", "zero": "null"}]


def test_stages_of_equal_layers_are_distinguished_by_their_gradients() -> None:
    union = record(0, network(a=[1.0], b=[1.0], c=[1.0]), step(a=[3.0], b=[4.0], c=[5.0]))
    ranks = [record(rank, network(a=[1.0]), step(a=[3.0 + rank])) for rank in range(3)]
    assert [places["a"].name for places in placed(ranks, union)] == ["a", "b", "c"]


def test_a_stage_begins_with_the_weights_of_another_layer_and_not_with_other_weights() -> None:
    def named(**weights: list[float]) -> dict[str, Any]:
        return network(**weights) | {"label": "stage", "trainable": list(weights), "sites": {}, "site": "train.py:3"}

    union = record(0, named(a=[1.0, 2.0]), named(b=[3.0, 4.0]) | {"label": "other"}, step(a=[1.0]))
    first = record(0, named(a=[1.0, 2.0]))
    assert parameters.findings([first, record(1, named(a=[3.0, 4.0]))], union) == []
    (finding,) = parameters.findings([first, record(1, named(a=[3.0, 5.0]))], union)
    assert (finding.name, finding.ranks) == ("different_beginnings", (1,))


def test_batches_are_joined_or_follow_one_another_and_those_read_twice_count_once() -> None:
    ranks = [record(0, *read([0, 1], [2, 3])), record(1, *read([4, 5], [6, 7])), record(2, *read([4, 5], [6, 7]))]
    assert union_feed(ranks).iterations["a"][0].indices == [[0, 1, 4, 5], [2, 3, 6, 7]]
    apart = union_feed(ranks, interleaved=True).iterations["a"][0]
    assert apart.indices == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert apart.length == 4


def test_draws_of_a_script_with_a_single_step_are_joined() -> None:
    def drawing(rank: int, *steps: int) -> RankRecord:
        draws = [
            {"kind": "draw", "step": at, "place": "train.py:5 randn 0", "values": np.array([rank + 1.0, at]),
             "function": "randn", "gradients": True, "fetching": False}
            for at in steps
        ]  # fmt: skip
        return record(rank, *draws, *(step(at + 1, w=[1.0]) for at in steps))

    assert draws_to_join([drawing(0, 0), drawing(1, 0)], drawing(0, 0))
    assert draws_to_join([drawing(0, 0, 1), drawing(1, 0, 1)], drawing(0, 0, 1))
    assert not draws_to_join([drawing(0, 0), drawing(0, 0)], drawing(0, 0)), "the ranks draw the same"


def test_draws_for_whole_batches_are_taken_in_the_turn_of_the_ranks() -> None:
    def drawing(rank: int) -> RankRecord:
        draw = {
            "kind": "draw",
            "place": "train.py:5 np.random.beta with gradients",
            "gradients": True,
            "fetching": False,
        }
        batches = [event for event in read([rank], [rank + 2]) if event["kind"] == "batch"]
        events = [draw | {"values": np.array(rank)}, read([0])[0]]
        for number, batch in enumerate(batches):
            events += [batch | {"number": number}, {"kind": "forward", "gradients": True}]
            events += [draw | {"values": np.array(10 * rank + number + 0.1 * call)} for call in range(2)]
        return record(rank, *events)

    ranks = [drawing(0), drawing(1)]
    assert draws_for_batches(ranks)
    assert not draws_for_batches([ranks[0], ranks[0]])
    (turns,) = draws_rank_by_rank(ranks).values()
    assert [[float(each) for each in values] for values in turns] == [[0, 0, 0.1, 10, 10.1, 1, 1.1, 11, 11.1]]


def test_what_ranks_bring_into_their_steps_follows_rank_by_rank() -> None:
    ranks = [
        record(rank, {"kind": "constant", "function": "linear", "values": [rank]}, step(w=[1.0])) for rank in range(2)
    ]
    alone, together = replay_feed(ranks, accumulated=False), replay_feed(ranks, accumulated=True)
    assert alone is not None
    assert together is not None
    assert (alone.constants, alone.windows) == ([[("linear", [0])], [("linear", [1])]], 2)
    assert (together.constants, together.windows) == ([[("linear", [0]), ("linear", [1])]], 1)
    unread = [record(0, {"kind": "constant", "function": "linear", "values": None}, step(w=[1.0]))]
    assert replay_feed(unread, accumulated=False) is None


def test_a_comparison_that_leaves_tensors_or_steps_out_is_undecided() -> None:
    ranks = [record(0, network(w=[1.0]), step(w=[1.0], other=[2.0]))]
    assert "other" in coverage(ranks, record(0, network(w=[1.0]), step(w=[1.0]))).undecided
    assert coverage(ranks, record(0, network(w=[1.0]), step(w=[1.0], other=[2.0]))).undecided == ""
    assert "no optimizer step" in coverage(ranks, record(0, network(w=[1.0]))).undecided


def test_a_warning_does_not_hide_that_nothing_was_compared() -> None:
    warning, difference = Finding("same_order", "warning", "a"), Finding("scale", "difference", "b")
    found = answer([warning], undecided="there is no reference")
    assert (found.verdict, found.reason, found.findings) == ("undecided", "there is no reference", (warning,))
    assert answer([warning], ["same_order"], undecided="there is no reference").verdict == "undecided"
    assert answer([warning, difference], undecided="there is no reference").verdict == "another network"
    assert answer([warning]).verdict == "the same network, but"


def test_gradients_that_are_all_zero_are_mentioned() -> None:
    still = record(0, network(w=[1.0]), step(w=[0.0]) | {"site": "train.py:9"})
    moving = record(0, network(w=[1.0]), step(w=[0.5]) | {"site": "train.py:9"})
    assert [(found.name, found.severity) for found in untrained([still, still], still)] == [("zero_gradients", "note")]
    assert untrained([still, moving], still) == []
    assert untrained([still, still], moving) == []


def test_gradients_that_are_no_numbers_prove_nothing() -> None:
    nan = float("nan")
    assert not_finite(record(0, step(v=[1.0], w=[1.0, nan]), step(2, v=[nan]))) == "w"
    assert not_finite(record(0, step(w=[1.0]), step(2, w=[nan]))) is None
    assert are_replicas([record(rank, network(w=[nan]) | {"placements": {}}) for rank in range(2)])
    found = _undecided([], record(0, step(w=[nan])), None)
    assert "w is infinite or no number" in found


def test_gradients_that_are_never_finite_prove_nothing_and_are_null_in_json() -> None:
    lost = [record(rank, network(w=[1.0]), step(w=[float("nan")])) for rank in range(2)]
    assert "not a number at every step" in coverage(lost, lost[0]).undecided
    later = record(0, network(w=[1.0]), step(w=[1.0]), step(2, w=[float("inf")]))
    assert coverage([later, later], later).undecided == ""
    table = step_table([later, later], later, differs=True)
    assert [each["norm"] for each in table["steps"]] == [1.0, None]
    apart = Finding("differs", "difference", "w has another shape.", factor=float("nan"))
    json.dumps(answer([apart], compared={"table": table}).as_json(), allow_nan=False)


def test_rows_that_a_script_chooses_by_itself_have_to_be_those_of_the_ranks() -> None:
    def called(rank: int, *rows: str) -> RankRecord:
        return record(rank, {"kind": "forward", "rows": list(rows)}, step(w=[1.0]))

    ranks = [called(0, "a", "b"), called(1, "c")]
    assert same_rows(ranks, called(0, "c", "b", "a"), 1)
    assert not same_rows(ranks, called(0, "a", "b"), 1)
    fed, other = record(0, *read([1]), *ranks[0].events), called(0, "z")
    assert same_rows([fed], record(0, *read([1]), *other.events), 1), "the feed has seen to it"
    assert not same_rows([fed], other, 1), "one process has not read from the loader that is fed"


def test_more_calls_for_one_batch_are_no_accumulation() -> None:
    def run(batches: int, forwards: int) -> RankRecord:
        return record(0, *read(*[[1]] * batches), step(w=[1.0]) | {"forwards": forwards})

    ranks = [run(2, 2), run(2, 2)]
    assert _accumulates(ranks, run(4, 4))
    assert not _accumulates(ranks, run(2, 4)), "it calls the network once for each kind of rows"
    assert not _accumulates(ranks, run(2, 2))


def test_gradients_of_ranks_that_differ_are_seen() -> None:
    assert gradients_alike([record(0, step(w=[1.0])), record(1, step(w=[1.0]))], 1)
    assert not gradients_alike([record(0, step(w=[1.0])), record(1, step(w=[1.1]))], 1)


def test_rounding_is_bounded_by_what_the_order_of_rows_changes_until_it_hides_mistakes() -> None:
    one = record(0, step(1, w=[1.0, 1.0]), step(2, w=[1.0, 1.0]), step(3, w=[1.0, 1.0]))
    other = record(0, step(1, w=[1.0, 1.0]), step(2, w=[1.0, 1.001]), step(3, w=[1.0, 1.5]))
    bounds = measured_bounds(one, other)
    assert list(bounds) == [(0, 1), (0, 2)]
    assert bounds[0, 1].relative < 1e-4 < bounds[0, 2].relative


def test_a_feed_turns_the_rows_of_each_batch_around() -> None:
    batch = {"x": Rows(np.array([[1], [2]]), "int64"), "names": ["a", "b"], "length": 7}
    feed = reversed_batches(Feed(iterations={"a": [FedIteration([batch], [[3, 4]])]}))
    (turned_batch,) = feed.iterations["a"][0].batches
    assert turned_batch["x"].values.tolist() == [[2], [1]]
    assert (turned_batch["names"], turned_batch["length"]) == (["b", "a"], 7)
    assert feed.iterations["a"][0].indices == [[4, 3]]
    assert reversed_rows(Rows(np.array(3), "int64"), 2).values == 3


def test_objects_of_the_script_are_joined_by_their_parts() -> None:
    first = Structure("__main__", "Batch", "attributes", {"x": Rows(np.array([1, 2]), "int64"), "y": ["a", "b"]})
    second = Structure("__main__", "Batch", "attributes", {"x": Rows(np.array([3]), "int64"), "y": ["c"]})
    whole = joined([first, second])
    assert whole.parts["x"].values.tolist() == [1, 2, 3]
    assert whole.parts["y"] == ["a", "b", "c"]


def test_a_pass_whose_port_was_taken_is_seen() -> None:
    def ended(message: str) -> PassResult:
        return PassResult([record(0, {"kind": "end", "how": "raised", "message": message})], [""], (), 1.0)

    assert port_was_taken(ended("The server socket has failed to listen on any local network address. EADDRINUSE"))
    assert not port_was_taken(ended("a row is missing"))


@pytest.mark.parametrize(("left_out", "steps"), [(None, 24), (2, 2), (0, 24)])
def test_one_process_makes_the_steps_of_which_large_batches_were_recorded(left_out: int | None, steps: int) -> None:
    rank = Rank(0)
    place = rank.iteration()
    for number in range(3):
        rank.read(place, [2 * number, 2 * number + 1])
        rank.events[-1]["left_out"] = left_out is not None and number >= left_out
        rank.train()
    rank.evaluate([[0, 1]])
    rank.events[-2]["left_out"] = True  # those of an evaluation are read by their indices
    passed = PassResult([rank.record], [""], WaitOutcome("ended"), 1.0)
    found = with_recorded_rows(RanksPass(passed, Conditions(Path(), steps=24)))
    assert found.conditions.steps == steps
    assert len(found.about) == (steps != 24)
