"""The page of a check: what it shows of findings, tensors, rows and a hang, and that all text is escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from apportion.script_check.findings import Finding, ScriptAnswer, answer
from apportion.script_check.report import write_report
from apportion.script_check.report.page import check_page, colour, rows_in_words, shared_rows
from apportion.script_check.script import Script

FINDING = Finding("scale", "difference", "Is <b>0.5</b> times.", "Fix.", ("a.weight",), (1,), 1, "train.py:2", 0.5)


def table(ranks: int) -> dict[str, Any]:
    tensors = [
        {"name": "a", "gradients": [[0.5, 0.5]] * ranks, "weights": [[1e-8, -1.0]] * ranks, "ratios": [0.5] * ranks},
        {"name": "<a>", "gradients": [[0.0, None]] * ranks, "weights": [[0.0, 0.0]] * ranks, "ratios": [None] * ranks},
    ]  # fmt: skip
    steps = [{"optimizer": 0, "step": step, "norms": [1.0] * ranks, "norm": 2.0} for step in (1, 2)]
    return {"steps": steps, "tensors": tensors, "left_out": 3}


def page(found: ScriptAnswer, folder: Path) -> str:
    return check_page(found.as_json(), "train.py --lr <1>", folder)


def test_it_shows_findings_tensors_and_rows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("\n".join(f"    line {number}" for number in range(1, 9)))
    loaders = [{"name": "train.py:3", "rows": 8, "sampler": "S", "iterations": [[[[0, 1]], [[1, 2]]]], "left_out": 1}]
    compared = {"ranks": 2, "steps": 2, "tensors": 5, "reference": "one", "table": table(2), "loaders": loaders}
    text = page(answer([FINDING], compared=compared, about=["In a copy."]), tmp_path)
    assert "Is &lt;b&gt;0.5&lt;/b&gt; times." in text
    assert "<b>   2  line 2</b>" in text
    assert "&lt;a&gt;<title>&lt;a&gt;</title>" in text
    assert "rank 1, step 1: differs by 1e-08" in text
    assert "rank 0, step 2: has another shape" in text
    assert "3 more tensors are left out" in text
    assert "1 row is read by more than one rank" in text
    assert "--accept scale" in text
    assert "In a copy." in text
    assert not re.search(r"<script|src=|href=", text)


def test_many_ranks_share_a_cell(tmp_path: Path) -> None:
    text = page(answer([FINDING], compared={"ranks": 6, "table": table(6)}), tmp_path)
    assert "the worst rank is shown" in text
    assert "rank 1, step" not in text


def test_it_shows_in_which_collective_ranks_wait(tmp_path: Path) -> None:
    call = {"op": "all_reduce", "inputs": [[[2, 3], "float64"]], "outputs": [], "site": "train.py:7"}
    hang = {
        "first_divergence": {"group": "world", "sequence": 4, "calls": {"0": call, "1": None}},
        "ranks": [{"rank": 0, "state": "waits", "site": "", "steps": 3, "collective": call}],
    }
    text = page(ScriptAnswer("the ranks wait for each other", (FINDING,), ranks=("Rank 0 waits",), hang=hang), tmp_path)
    assert "Call 5 of the group world" in text
    assert "float64 [2, 3]" in text
    assert "train.py:7" in text
    assert "no call" in text


def test_a_page_of_a_script_that_could_not_run_is_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    written = write_report(
        ScriptAnswer("could not run", reason="no <x>"), Script(str(tmp_path / "train.py")), tmp_path / "a.html"
    )
    assert "no &lt;x&gt;" in written.read_text()


def test_rows_that_several_ranks_read_are_counted() -> None:
    assert shared_rows([[[0, 1], [2]], [[2, 3]]]) == {2}
    assert rows_in_words([[4, 4], [4]]) == "rows: rank 0 8, rank 1 4"
    assert rows_in_words([[[0]], [[1]]]) == "rows: rank 0 1, rank 1 1; no row is read by two ranks"


def test_the_colour_grows_with_the_difference() -> None:
    assert [colour(value) for value in (0.0, 1e-12, 1e-9, 1e-4, 1.0, 50.0, -1.0)] == [
        "agree", "differ1", "differ1", "differ5", "differ9", "differ9", "differ9",
    ]  # fmt: skip
