"""What a proof says of numbers: differences are held against what was changed, and by what rounding allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from apportion.runtime.proof.comparison import CAP, FLOOR, Comparison
from apportion.runtime.proof.proof import Difference, Proof, Round, Surveyed, Verdict

Tensors = Mapping[str, Tensor]
WEIGHT, BIAS, MEAN, SLOT = "model/w", "model/b", "model/mean", "optimizer/w/exp_avg"


def state(weight: float = 1e-3, bias: float = 0.0, mean: float = 0.0, slot: float = 0.0) -> dict[str, Tensor]:
    values = {WEIGHT: weight, BIAS: bias, MEAN: mean, SLOT: slot}
    return {name: torch.full((3,), value, dtype=torch.float64) for name, value in values.items()}


def compared(found: Tensors, expected: Tensors, nudged: Tensors | None = None, start: Tensors | None = None) -> Round:
    comparison = Comparison(start or state(), ["w", "b"])
    comparison.compare(1, found, expected, nudged or expected)
    return comparison.round("float64", 1, None)


def test_what_stood_still_is_not_equal_to_what_moved_by_next_to_nothing() -> None:
    moved = state(weight=1e-3 + 1e-6)
    still = compared(state(), moved)
    assert still.verdict == "different"
    assert still.worst.relative == pytest.approx(1.0)
    assert compared(moved, moved).verdict == "equal"


def test_where_nothing_has_moved_nothing_is_shown() -> None:
    assert compared(state(), state()).verdict == "undecided"


def test_a_change_that_rounding_could_hide_is_undecided_though_nothing_differs() -> None:
    moved, nudged = state(weight=1e-3 + 1e-6), state(weight=1e-3 + 1.02e-6)
    found = compared(moved, moved, nudged)
    assert found.noise >= 0.01
    assert found.verdict == "undecided"


def test_a_difference_is_held_against_the_tensors_own_change() -> None:
    expected = state(weight=1.0, bias=1e-6)
    found = state(weight=1.0, bias=1.5e-6)
    assert compared(found, expected).worst == Difference(
        name=BIAS,
        step=1,
        absolute=pytest.approx(5e-7),
        relative=pytest.approx(0.5),
        own=True,
        factor=pytest.approx(1.5),
        ratio=pytest.approx(1.5),
        cosine=pytest.approx(1.0),
    )


def test_where_rounding_makes_more_than_a_thousandth_of_it_the_largest_change_of_all_weights_counts() -> None:
    expected, nudged = state(weight=1.0, bias=1e-12), state(weight=1.0, bias=1.01e-12)
    shown = compared(state(weight=1.0, bias=1.5e-12), expected, nudged)
    assert shown.verdict == "equal"
    assert (shown.own, shown.tensors) == (1, 4)
    assert compared(state(weight=1.0, bias=1e-6), expected, nudged).worst.relative == pytest.approx(1e-6, rel=1e-2)


def test_a_factor_of_a_millionth_in_a_small_tensor_is_found() -> None:
    expected = state(weight=1.0, bias=1e-6)
    wrong = compared(state(weight=1.0, bias=1e-6 * (1 + 1e-6)), expected)
    assert wrong.verdict == "different"
    assert wrong.worst.name == BIAS


def test_a_change_of_which_a_sum_in_another_order_makes_all_is_no_difference() -> None:
    expected = state(weight=1.0, bias=1e-17)
    assert compared(state(weight=1.0, bias=-3e-17), expected).verdict == "equal"


def test_a_sentence_says_how_many_tensors_were_held_against_which_change() -> None:
    some = replace(shown("equal"), own=3)
    assert proof(some).sentence.endswith("in float64 (3 tensors against their own change, 1 against the largest)")


def test_a_buffer_and_each_kind_of_slot_have_a_scale_of_their_own() -> None:
    expected = state(weight=1.0, mean=1e-9, slot=1e-7)
    for name, found in ((MEAN, state(1.0, mean=1.1e-9, slot=1e-7)), (SLOT, state(1.0, mean=1e-9, slot=1.1e-7))):
        worst = compared(found, expected).worst
        assert worst.name == name
        assert worst.relative == pytest.approx(0.1)


@pytest.mark.parametrize("rounded", [0.0, 2e-18])
def test_a_buffer_that_rounding_alone_has_moved_is_held_against_those_of_other_layers(rounded: float) -> None:
    """The mean of what a linear layer makes of normalised numbers is 0, and what it comes to is rounding."""

    def means(first: float, second: float) -> dict[str, Tensor]:
        both = {"model/bn1.mean": first, "model/bn2.mean": second}
        return state(weight=1.0) | {name: torch.full((3,), each, dtype=torch.float64) for name, each in both.items()}

    start, expected = means(0.0, 0.0) | state(), means(0.1, rounded)
    assert compared(means(0.1, 5e-18), expected, means(0.1, 3e-18), start).verdict == "equal"
    for wrong in (means(0.1, 1e-9), means(0.1001, rounded)):
        assert compared(wrong, expected, means(0.1, 3e-18), start).verdict == "different"
    assert compared(means(0.1, 1.1e-9), means(0.1, 1e-9), None, start).verdict == "different"


def test_the_imaginary_part_counts() -> None:
    zeros = torch.zeros(2, dtype=torch.complex128)
    start, expected, found = ({"model/w": zeros + value} for value in (0, 1 + 1j, 1 + 1.5j))
    comparison = Comparison(start, ["w"])
    comparison.compare(1, found, expected, expected)
    told = comparison.round("float64", 1, None)
    assert told.verdict == "different"
    assert told.worst.absolute == pytest.approx(0.5)


def test_a_real_tensor_in_the_place_of_a_complex_one_differs_without_bound() -> None:
    value = torch.ones(2, dtype=torch.complex128)
    comparison = Comparison({"model/w": value * 0}, ["w"])
    comparison.compare(1, {"model/w": value.real.clone()}, {"model/w": value}, {"model/w": value})
    assert comparison.round("float64", 1, None).worst.absolute == float("inf")


def test_the_first_step_that_differs_is_named_and_its_worst_tensor() -> None:
    comparison = Comparison(state(), ["w", "b"])
    one, two = state(weight=1.0, bias=1.0), state(weight=2.0, bias=2.0)
    comparison.compare(1, state(weight=1.0, bias=1.1), one, one)
    comparison.compare(2, state(weight=9.0, bias=2.0), two, two)
    worst = comparison.round("float64", 2, None).worst
    assert (worst.name, worst.step) == (BIAS, 1)


def test_a_tensor_that_is_missing_or_foreign_differs_without_bound() -> None:
    expected = state(weight=1.0)
    missing = {name: t for name, t in expected.items() if name != SLOT}
    for found in (missing, {**expected, "model/more": torch.zeros(1)}):
        told = compared(found, expected)
        assert told.verdict == "different"
        assert told.worst.absolute == float("inf")


def test_a_slot_that_rounding_may_add_is_undecided_except_in_float64() -> None:
    start = {"model/w": torch.zeros(2), "optimizer/w/old_dirs.1": torch.zeros(2)}
    after = {"model/w": torch.ones(2), "optimizer/w/old_dirs.1": torch.ones(2)}
    without = {"model/w": torch.ones(2)}
    for precision, verdict in (("float32", "undecided"), ("float64", "different")):
        comparison = Comparison(start, {"w"}, eps=torch.finfo(getattr(torch, precision)).eps)
        comparison.compare(1, without, after, after)
        assert comparison.round(precision, 1, None).verdict == verdict


def test_noise_allows_a_hundred_times_itself_and_never_more_than_a_thousandth() -> None:
    expected = state(weight=1.0 + 1e-3)
    for noise, difference, verdict in ((1e-9, 0.9e-7, "equal"), (1e-9, 1.1e-7, "different"), (1e-4, 2e-3, "undecided")):
        told = compared(state(weight=1.0 + 1e-3 + difference), expected, state(weight=1.0 + 1e-3 + noise))
        assert told.verdict == verdict, told
        assert FLOOR <= told.bound <= CAP


def shown(verdict: Verdict, precision: str = "float64", step: int = 1) -> Round:
    worst = Difference(name=WEIGHT, step=step, absolute=0.5, relative=0.25)
    return Round(
        precision=precision, steps=4, tensors=4, worst=worst, noise=0.0, bound=FLOOR, disagreement=None, verdict=verdict
    )


def proof(*rounds: Round, gradients: Round | None = None) -> Proof:
    return Proof(strategy="mine", workers=2, exact=True, rounds=rounds, by_design=(), gradients=gradients)


def test_the_verdict_is_one_sentence() -> None:
    equal, open_one = shown("equal"), shown("undecided", "float32")
    said = "mine on 2 workers trains the same network as one device in its first steps, shown in float64"
    assert proof(equal).sentence == said
    assert proof(equal, open_one).holds
    assert "in float32 rounding alone is too large" in proof(equal, open_one).sentence
    assert proof(shown("undecided"), shown("equal", "float32")).verdict == "undecided"
    assert "it is not shown" in proof(shown("undecided")).sentence
    wrong = proof(shown("different", step=3))
    assert not wrong.holds
    assert "model/w differs after step 3 by 0.5, which is 0.25 of the largest change, in float64" in wrong.sentence


def test_a_loss_that_is_wrong_by_itself_is_the_evidence_and_the_cause() -> None:
    found = replace(proof(shown("equal")), causes=("a guess",)).with_survey(Surveyed(problem="the loss couples rows"))
    assert found.verdict == "different"
    assert not found.holds
    assert found.evidence == "the loss couples rows"
    assert found.causes == ("the loss couples rows",)
    assert found.sentence == "mine on 2 workers does not train the same network as one device: the loss couples rows"


def test_a_difference_on_rare_rows_alone_is_one_and_says_where_it_was() -> None:
    found = proof(shown("equal")).with_rare_rows(replace(proof(shown("different")), first="0.weight"))
    assert found.verdict == "different"
    assert "with rare rows of the data in a batch, model/w differs after step 1" in found.sentence
    assert found.sentence.endswith("0.weight")
    assert proof(shown("equal")).with_rare_rows(proof(shown("undecided"))).verdict == "equal"


def test_the_sentence_says_what_the_survey_has_covered() -> None:
    found = proof(shown("equal")).with_rare_rows(proof(shown("equal")))
    said = found.with_survey(Surveyed(rare=(7,), read=30, of=3000, left="it draws random numbers")).sentence
    assert "rare rows were looked for among the targets of 1 % of 3,000" in said
    assert "the loss was not tried by itself: it draws random numbers" in said
    assert said.endswith("; 4 further steps had the rarest rows among theirs")
    assert "rare rows were not looked for" in proof(shown("equal")).with_survey(Surveyed()).sentence


def test_a_proof_with_its_survey_is_the_same_from_json() -> None:
    found = proof(shown("equal")).with_rare_rows(proof(shown("equal"))).with_survey(Surveyed(rare=(7, 2), read=9, of=9))
    assert Proof.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_gradients_have_a_say() -> None:
    assert proof(shown("equal"), gradients=shown("undecided")).verdict == "undecided"
    wrong = proof(shown("equal"), gradients=shown("different"))
    assert wrong.verdict == "different"
    assert "the gradient of model/w differs" in wrong.sentence
