"""From the records of ranks that wait for each other to a sentence: no process is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from apportion.script_check.hangs import report
from apportion.script_check.hangs.states import stack_lines, stacks
from apportion.script_check.record import Event, RankRecord

WEIGHTS = {"net.a": np.zeros(3), "net.b": np.ones(3)}


class Rank:
    """The events of one rank, written in order."""

    def __init__(self, rank: int, ranks: Sequence[int] = (0, 1)) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self.events: list[Event] = [{"kind": "start", "step": 0, "thread": 16, "time": 0.0}]
        self.steps = self.calls = 0
        self.sequences = dict[str, int]()

    def add(self, kind: str, **fields: Any) -> Rank:
        self.events.append({"kind": kind, "step": self.steps, **fields})
        return self

    def call(
        self, op: str, shape: tuple[int, ...] | None = None, *, done: bool = True, line: int = 1, **more: Any
    ) -> Rank:
        message = op in ("send", "recv")
        group = more.get("group", "world")
        sequence = None if message else self.sequences.get(group, 0)
        if sequence is not None:
            self.sequences[group] = sequence + 1
        tensors = [] if shape is None else [(shape, more.pop("dtype", "float64"))]
        fields = {
            "call": self.calls, "op": op, "group": group, "ranks": self.ranks, "sequence": sequence, "root": None,
            "inputs": [] if op == "recv" else tensors, "outputs": tensors if op == "recv" else [], "pending": False,
            "names": [""] * len(tensors), "gradient": [False] * len(tensors), "site": f"train.py:{line}",
            "line": f"line {line}", "time": float(len(self.events)), **more,
        }  # fmt: skip
        self.add(fields.pop("kind", "collective"), **fields)
        if done:
            self.add("collective_end", call=self.calls)
        self.calls += 1
        return self

    def stepped(self) -> Rank:
        self.add("step")
        self.steps += 1
        return self

    def end(self, how: str = "ended", **more: Any) -> Rank:
        return self.add("end", how=how, time=float(len(self.events)), **more)

    def record(self) -> RankRecord:
        return RankRecord(self.rank, tuple(self.events))


def both() -> tuple[Rank, Rank]:
    return Rank(0), Rank(1)


def hang(*ranks: Rank, **more: Any) -> report.Hang:
    found = report.hang([rank.record() for rank in ranks], more.pop("dumps", {}), **more)
    assert found is not None
    return found


def silent(*ranks: Rank) -> list[str]:
    return [finding.name for finding in report.findings([rank.record() for rank in ranks])]


def test_another_operation_on_one_rank() -> None:
    one, other = both()
    one.call("all_reduce", (3,), line=7).call("barrier", done=False, line=8)
    other.call("all_reduce", (3,), line=7).call("all_reduce", (3,), done=False, line=9)
    finding = hang(one, other).finding
    assert (finding.name, finding.ranks, finding.site) == ("diverged_collectives", (0, 1), "train.py:8")
    assert "call 2 of the group of all ranks: on rank 0 it is barrier at train.py:8" in finding.sentence
    assert "on rank 1 it is all_reduce at train.py:9 of float64 [3]" in finding.sentence


@pytest.mark.parametrize(
    ("left", "right", "name"),
    [
        ({"shape": (3,)}, {"shape": (4,)}, "shape_mismatch"),
        ({"shape": (3, 4)}, {"shape": (4, 3)}, "shape_mismatch"),
        ({"shape": (3,)}, {"shape": (3,), "dtype": "int64"}, "shape_mismatch"),
        ({"shape": (3,), "root": 0}, {"shape": (3,), "root": 1}, "diverged_collectives"),
        ({"shape": (3,), "reduces": "sum"}, {"shape": (3,), "reduces": "max"}, "diverged_collectives"),
        ({"makes": [0]}, {"makes": [0, 1]}, "diverged_collectives"),
        ({"shape": (3,), "line": 4}, {"shape": (4,), "line": 5}, "diverged_collectives"),
    ],
)
def test_what_has_to_be_alike(left: dict[str, Any], right: dict[str, Any], name: str) -> None:
    one, other = both()
    one.call("all_reduce", done=False, **left)
    other.call("all_reduce", done=False, **right)
    assert hang(one, other).finding.name == name


@pytest.mark.parametrize(
    ("op", "left", "right"),
    [
        ("all_reduce", {"shape": ()}, {"shape": (1,)}),
        ("all_reduce", {"shape": (4, 1)}, {"shape": (4,)}),
        ("all_reduce", {"shape": (4,), "line": 3}, {"shape": (4,), "line": 8}),
        ("all_to_all_single", {"shape": (5, 2)}, {"shape": (7, 2)}),
        ("all_gather_object", {}, {}),
    ],
)
def test_what_need_not_be_alike(op: str, left: dict[str, Any], right: dict[str, Any]) -> None:
    one, other = both()
    one.call(op, **left).end()
    other.call(op, **right).end()
    assert silent(one, other) == []


def test_a_rank_that_raises_is_named_with_its_line_and_not_those_that_wait_for_it() -> None:
    one, other = both()
    one.call("all_reduce", (3,)).stepped().call("all_reduce", (3,), done=False, line=7)
    other.call("all_reduce", (3,)).stepped()
    other.end("raised", type="ValueError", message="bad batch\nmore", site="train.py:5", line="check(batch)")
    finding = hang(one, other).finding
    assert (finding.name, finding.ranks, finding.site, finding.step) == ("rank_raised", (1,), "train.py:5", 2)
    assert "Rank 1 raised ValueError: bad batch at train.py:5 (`check(batch)`)" in finding.sentence
    assert "rank 0 waits in all_reduce at train.py:7" in finding.sentence


def test_an_error_about_another_rank_counts_as_waiting_for_it() -> None:
    one, other = both()
    one.call("all_reduce", (3,), done=False, line=7)
    message = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    one.add("collective_end", call=0, error=f"RuntimeError: {message}")
    one.end("raised", type="RuntimeError", message=message, site="train.py:7", line="")
    found = hang(one, other, died=(1,))
    assert (found.finding.name, found.finding.ranks) == ("rank_died", (1,))
    assert found.lines[0].startswith("Rank 0 waits in all_reduce at train.py:7")


def test_a_rank_that_leaves_early() -> None:
    one, other = both()
    for rank, count in ((one, 3), (other, 2)):
        for _ in range(count):
            rank.add("batch", loader="train.py:3", iteration=0)
        rank.add("exhausted", loader="train.py:3", iteration=0)
    one.call("all_reduce", (3,), done=False, line=7)
    other.end()
    finding = hang(one, other).finding
    assert (finding.name, finding.ranks) == ("rank_ended_early", (1,))
    assert "The loader of train.py:3 gave rank 1 2 batches and rank 0 at least 3 in epoch 1" in finding.sentence
    assert "join" in finding.remedy


@pytest.mark.parametrize(("op", "name"), [("recv", "unmatched_receive"), ("send", "unmatched_send")])
def test_a_message_without_its_counterpart(op: str, name: str) -> None:
    one, other = both()
    one.call(op, (3,), root=1, tag=4, done=False, line=7)
    other.call("send" if op == "recv" else "recv", (3,), root=0, tag=5, done=False, line=9)
    finding = hang(one, other).finding
    assert (finding.name, finding.ranks, finding.site) == (name, (0, 1), "train.py:7")
    assert "with tag 4" in finding.sentence


def test_a_message_that_does_not_fit() -> None:
    one, other = both()
    one.call("send", (3,), root=1).end()
    other.call("recv", (4,), root=0).end()
    assert silent(one, other) == ["shape_mismatch"]


def test_a_call_that_one_rank_left_out_is_placed_where_the_ranks_part() -> None:
    one, other = both()
    for step in range(3):
        one.call("all_reduce", (), line=7).call("all_reduce", (), line=8, done=step < 2).stepped()
    one.steps = 2
    other.call("all_reduce", (), line=7).stepped()  # without the one of line 8
    other.call("all_reduce", (), line=7).call("all_reduce", (), line=8).stepped()
    other.call("all_reduce", (), line=7).call("all_reduce", (), line=8).end()
    sentence = hang(one, other).finding.sentence
    assert "They part at call 2, which is all_reduce at train.py:8 of float64 [] in step 1 on rank 0" in sentence
    assert "all_reduce at train.py:7 of float64 [] in step 2 on rank 1" in sentence


def gradients(rank: Rank, *names: str) -> Rank:
    rank.add("network", weights=WEIGHTS)
    for name in names:
        rank.call("all_reduce", (3,), names=[name], gradient=[True])
    return rank.end()


def test_gradients_of_different_parameters_are_combined() -> None:
    one, other = both()
    assert silent(gradients(one, "net.a"), gradients(other, "net.b")) == ["diverged_collectives"]


def test_copies_of_a_tied_parameter_may_be_combined() -> None:
    one, other = both()
    for rank, name in ((one, "net.first"), (other, "net.last")):
        rank.add("network", weights={"net.first": np.ones(3), "net.last": np.ones(3)})
        rank.call("all_reduce", (3,), names=[name], gradient=[True]).end()
    assert silent(one, other) == []


def test_stages_that_own_unlike_parameters_may_combine_them() -> None:
    one, other = both()
    for rank, name in ((one, "net.a"), (other, "net.b")):
        rank.add("network", weights={name: WEIGHTS[name]})
        rank.call("all_reduce", (3,), names=[name], gradient=[True]).end()
    assert silent(one, other) == []


def test_two_calls_in_exchanged_order() -> None:
    one, other = both()
    for _ in range(2):
        one.call("all_reduce", (), line=7).call("all_reduce", (), line=8).stepped()
        other.call("all_reduce", (), line=8).call("all_reduce", (), line=7).stepped()
    assert silent(one.end(), other.end()) == ["diverged_collectives"]


def test_branches_of_which_ranks_take_one_in_turns() -> None:
    one, other = both()
    for first, second in ((7, 8), (8, 7), (7, 7)):
        one.call("all_reduce", (), line=first).stepped()
        other.call("all_reduce", (), line=second).stepped()
    assert silent(one.end(), other.end()) == []


def test_a_call_too_many_on_one_rank() -> None:
    one, other = both()
    one.call("broadcast", (3,), root=0).call("broadcast", (3,), root=0, line=9).end()
    other.call("broadcast", (3,), root=0).end()
    assert silent(one, other) == ["diverged_collectives"]


def test_a_rank_that_has_joined_answers_with_calls_of_its_own() -> None:
    one, other = (rank.add("join", site="train.py:2") for rank in both())
    one.call("broadcast", (3,), root=0).end()
    other.call("all_reduce", (3,)).end()
    assert silent(one, other) == []


def test_ranks_that_ended_do_not_wait() -> None:
    one, other = both()
    for rank in (one, other):
        rank.call("all_reduce", (3,)).end()
    assert report.hang([one.record(), other.record()], {}) is None
    assert silent(one, other) == []


def test_ranks_that_all_raised_do_not_wait() -> None:
    one, other = both()
    for rank in (one, other):
        rank.end("raised", type="ValueError", message="no data", site="train.py:2", line="")
    assert report.hang([one.record(), other.record()], {}) is None


def test_three_ranks_of_which_two_agree() -> None:
    first, second, third = (Rank(rank, (0, 1, 2)) for rank in range(3))
    for rank in (first, third):
        rank.call("all_gather", (2,), done=False, line=4)
    second.call("barrier", done=False, line=6)
    sentence = hang(first, second, third).finding.sentence
    assert "on ranks 0 and 2 it is all_gather at train.py:4" in sentence
    assert "on rank 1 it is barrier at train.py:6" in sentence


DUMP = """Thread 0x0000000000000020 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x0000000000000010 (most recent call first):
  File "/x/site-packages/torch/utils/data/dataloader.py", line 1291 in _try_get_data
  File "/home/me/job/train.py", line 31 in epoch
  File "/home/me/job/train.py", line 40 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_stacks_are_read_and_shortened() -> None:
    found = stacks(DUMP)
    assert [stack.thread for stack in found] == [32, 16]
    assert stack_lines(found[1], "/home/me/job") == [
        "_try_get_data (torch/utils/data/dataloader.py:1291)",
        "train.py:31 in epoch",
        "train.py:40 in <module>",
    ]


def test_a_rank_that_waits_for_a_batch() -> None:
    one, other = both()
    one.call("all_reduce", (3,), done=False, line=7)
    found = hang(one, other, dumps={1: DUMP}, folder="/home/me/job")
    assert (found.finding.name, found.finding.site) == ("hang", "train.py:31")
    assert "rank 1 waits for a batch of its DataLoader at train.py:31" in found.finding.sentence
    assert found.details["ranks"][1]["stacks"][0]["thread"] == 16
    assert found.details["first_divergence"]["calls"]["1"] is None


def test_a_process_that_aborts_as_it_takes_its_group_down_has_ended() -> None:
    one, _ = both()
    one.call("all_reduce", (3,)).add("destroy", time=1.0)
    outcome = one.record().outcome
    assert outcome is not None
    assert outcome["how"] == "ended"


def test_a_rank_that_leaves_out_a_step_of_sharded_parameters() -> None:
    recorded = {"kind": "recorder_collective", "gradient": [True], "names": ["net.a"], "line": 9}
    first, second = Rank(0), Rank(1)
    for rank in (first, second):
        rank.call("all_gather_into_tensor", (4,), line=5).call("all_gather_into_tensor", (3,), **recorded).stepped()
        rank.call("all_gather_into_tensor", (4,), line=5)
    first.call("all_gather_into_tensor", (3,), done=False, **recorded)
    second.call("all_gather_into_tensor", (4,), done=False, line=5)
    found = report.hang([first.record(), second.record()], {0: "", 1: ""})
    assert found is not None
    assert (found.finding.name, found.finding.ranks, found.finding.step) == ("skipped_steps", (1,), 2)
    assert found.finding.site == "train.py:9"
    assert "rank 1 leaves it out" in found.finding.sentence
