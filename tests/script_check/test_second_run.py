"""A script that is run twice: one record of both runs, what the second one has lost, and its failures as sentences."""

from __future__ import annotations

from typing import Any

import pytest

from apportion.script_check import driver
from apportion.script_check.comparison import resumes
from apportion.script_check.passes import PassResult
from apportion.script_check.record import RankRecord, joined_runs, runs
from apportion.script_check.script import Script
from apportion.script_check.waiting import WaitOutcome

THEN = ("--resume", "last.pt")
MOMENTUM = {"weight": {"momentum_buffer": 2.0}}


def step(number: int, optimizer: int = 0, **fields: Any) -> dict[str, Any]:
    """The step of an optimizer whose weights are named by its number."""
    return {
        "kind": "step", "step": number, "number": number, "optimizer": optimizer, "type": "SGD", "site": "train.py:9",
        "weights_before": f"{optimizer} before {number}", "weights_after": f"{optimizer} after {number}",
        "state": MOMENTUM, "stateful": True, **fields,
    }  # fmt: skip


def iteration(loader: str, number: int) -> dict[str, Any]:
    return {"kind": "iteration", "step": 0, "loader": loader, "number": number, "made": 0}


def batch(loader: str, of: int) -> dict[str, Any]:
    return {"kind": "batch", "step": 0, "loader": loader, "iteration": of}


def ended(how: str = "ended", **fields: Any) -> dict[str, Any]:
    return {"kind": "end", "step": 0, "how": how, **fields}


def record(*events: dict[str, Any], rank: int = 0) -> RankRecord:
    return RankRecord(rank, events)


def joined(first: RankRecord, second: RankRecord) -> RankRecord:
    return joined_runs([first], [second])[0]


def test_what_a_record_numbers_is_counted_on_in_the_second_run() -> None:
    call = {"kind": "collective", "step": 0, "call": 3}
    first = record(iteration("a", 0), batch("a", 0), step(1), step(1, 1), step(2), call, ended())
    second = record(iteration("a", 0), iteration("b", 0), batch("a", 0), batch("b", 0), step(1), {**call, "call": 0})
    events = joined(first, second).events
    assert [event["kind"] for event in events].count("end") == 0, "the first run does not end the record"
    at = next(number for number, event in enumerate(events) if event["kind"] == "restart")
    assert events[at]["step"] == 3
    found = {(event["kind"], event.get("loader")): event for event in events[at + 1 :]}
    assert (found["iteration", "a"]["number"], found["iteration", "a"]["made"]) == (1, 3)
    assert found["iteration", "b"]["number"] == 0
    assert found["batch", "a"]["iteration"] == 1
    assert found["batch", "b"]["iteration"] == 0
    assert (found["step", None]["step"], found["step", None]["number"]) == (4, 3)
    assert found["collective", None]["call"] == 4


def test_each_run_is_read_by_itself_too() -> None:
    pairs = [(record(step(1), rank=rank), record(step(2), rank=rank)) for rank in range(2)]
    both = joined_runs([first for first, _ in pairs], [second for _, second in pairs])
    assert runs(both) == [[first for first, _ in pairs], [second for _, second in pairs]]
    assert runs([record(step(1))]) == [[record(step(1))]]


def names(first: RankRecord, second: RankRecord) -> list[str]:
    return [finding.name for finding in resumes.lost_in_second_run([joined(first, second)])]


FIRST = record(step(1), step(2))


@pytest.mark.parametrize("left", ["0 after 1", "0 after 2"])
def test_a_run_that_goes_on_from_any_step_has_lost_nothing(left: str) -> None:
    assert names(FIRST, record(step(1, weights_before=left))) == []


def test_a_run_that_begins_anew_has_lost_the_weights() -> None:
    finding, *_ = resumes.lost_in_second_run([joined(FIRST, record(step(1, weights_before="other")))])
    assert (finding.name, finding.step) == ("not_resumed", 3)
    assert finding.sentence.startswith("The second run loads nothing and begins with weights that none of the 2 steps")
    load = {"kind": "load", "step": 0, "path": "last.pt", "site": "train.py:4"}
    loaded, *_ = resumes.lost_in_second_run([joined(FIRST, record(load, step(1, weights_before="other")))])
    assert loaded.site == "train.py:4"
    assert "loads nothing" not in loaded.sentence


def test_a_run_that_takes_weights_up_later_does_not_go_on() -> None:
    second = record(step(1, weights_before="other"), step(2, weights_before="0 after 2"))
    assert names(FIRST, second) == ["not_resumed"], "its first step is what begins it"


def test_a_run_that_goes_on_without_momentum_has_lost_it_on_its_rank() -> None:
    begun = {"weights_before": "0 after 2", "stateful": False}
    second = record(step(1, **begun), rank=1)
    kept = joined(FIRST, record(step(1, weights_before="0 after 2")))
    finding, *others = resumes.lost_in_second_run([kept, *joined_runs([record(step(1), step(2), rank=1)], [second])])
    assert not others
    assert (finding.name, finding.ranks, finding.step) == ("resumed_state", (1,), 3)
    assert "its SGD has lost its state (momentum_buffer) on rank 1" in finding.sentence


@pytest.mark.parametrize(
    ("before", "begun"),
    [({"state": {"weight": {}}}, {}), ({}, {"type": "AdamW"}), ({}, {"stateful": True}), ({}, {"optimizer": 1})],
    ids=["has none", "is another", "is kept", "is new"],
)
def test_an_optimizer_without_state_to_lose_has_lost_none(before: dict[str, Any], begun: dict[str, Any]) -> None:
    first = record(step(1, **before))
    assert names(first, record(step(1, **{"weights_before": "0 after 1", "stateful": False, **begun}))) == []


def passed(second: RankRecord, how: str = "ended", then: tuple[str, ...] = THEN, output: str = "") -> PassResult:
    """A pass whose second run has left a record; records of both runs are joined where it ended."""
    first = record({"kind": "save", "step": 2, "path": "model.pt"}, step(1), step(2), ended())
    records = [joined(first, second) if how == "ended" else second]
    return PassResult(records, [output], WaitOutcome(how, (0,)), 60.0, then=then)


@pytest.mark.parametrize(
    ("then", "words"), [(THEN, "run again with --resume last.pt,"), ((), "the script, run again, failed")]
)
def test_a_second_run_that_fails_is_told_as_one(then: tuple[str, ...], words: str) -> None:
    failed = record(ended("raised", type="ZeroDivisionError", message="division by zero", site="train.py:3"))
    reason = str(driver.unusable(passed(failed, then=then), 1))
    assert words in reason
    assert "ZeroDivisionError at train.py:3" in reason


def test_a_second_run_without_its_file_is_told_what_the_first_one_has_saved() -> None:
    failed = record(ended("raised", type="FileNotFoundError", message="last.pt"))
    reason = str(driver.unusable(passed(failed), 1))
    assert "In 2 steps of its first run rank 0 saved model.pt: give the script arguments" in reason


def test_a_second_run_that_makes_no_step_says_nothing() -> None:
    reason = str(driver.unusable(passed(record(ended()), output="all epochs are done\n"), 1))
    assert "run again with --resume last.pt, made no optimizer step; its last line was: all epochs are done" in reason
    assert driver.unusable(passed(record(step(1), ended())), 1) is None


def test_a_second_run_that_does_not_end_is_told_as_one() -> None:
    reason = str(driver.unusable(passed(record(step(1)), "limit"), 1))
    assert reason.startswith("rank 0, run again with --resume last.pt, did not end within 60 s")


def test_ranks_that_wait_in_the_second_run_are_told_as_such() -> None:
    call = {
        "kind": "collective", "step": 1, "call": 0, "op": "all_reduce", "group": "all ranks", "ranks": (0, 1),
        "sequence": 0, "root": None, "inputs": [((2,), "float32")], "outputs": [], "names": [""], "gradient": [False],
        "pending": False, "site": "train.py:3", "line": "", "thread": 1, "time": 1.0,
    }  # fmt: skip
    waiting = [record(step(1), call), record(step(1), ended(), rank=1)]
    found = PassResult(waiting, ["", ""], WaitOutcome("hang", (0,)), 60.0, then=THEN)
    assert driver._hanging(found, Script(__file__)) is not None
    sentences = driver._second_run_sentence(found)
    assert sentences == [
        "The script was run again, with --resume last.pt, to go on from what its first run had saved. Its ranks did "
        "not end in this second run, whose steps are counted from 1."
    ]
    assert driver._second_run_sentence(passed(record(step(1), ended()))) == [sentences[0].split(" Its ranks")[0]]
