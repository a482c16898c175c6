"""Results show themselves: as the terminal's table where they are printed, and as a table of HTML in a notebook."""

from __future__ import annotations

import dataclasses
import pydoc
from pathlib import Path
from typing import Any

import pytest
from small_work import rows, work

import apportion

TESTED = work(evaluation=apportion.Evaluation(data=rows), steps=20)


class Parsed:
    """The tables of a text in HTML: their cells."""

    def __init__(self, html: str) -> None:
        from html.parser import HTMLParser

        cells: list[str] = []
        opened: list[str] = []

        class Reader(HTMLParser):
            def handle_starttag(self, tag: str, attrs: Any) -> None:
                if tag not in ("br", "progress"):
                    opened.append(tag)
                if tag in ("td", "th"):
                    cells.append("")

            def handle_endtag(self, tag: str) -> None:
                if tag != "progress":
                    assert opened.pop() == tag, f"{tag} ends within another element"

            def handle_data(self, data: str) -> None:
                if opened and opened[-1] in ("td", "th"):
                    cells[-1] += data

        Reader().feed(html)
        assert not opened
        self.cells = cells


def test_a_proof_is_printed_as_the_terminal_shows_it(no_cached_proofs: Path) -> None:
    proof = apportion.check(TESTED, "data_parallel", workers=2)
    text = str(proof).splitlines()
    assert text[0] == "data_parallel on 2 workers against one device:"
    assert text[-1] == "the same network in its first steps"
    assert proof.sentence in text
    shown = Parsed(proof._repr_html_())
    assert {"equal", "float64", str(proof.rounds[0].steps)} <= set(shown.cells)
    assert proof.sentence in proof._repr_html_()


def test_a_comparison_is_a_list_that_prints_as_a_table() -> None:
    rows_ = apportion.compare(TESTED, ["data_parallel", "single_device"], workers=2, steps=6, predict=False)
    assert isinstance(rows_, list)
    assert {row.strategy for row in rows_} == {"data_parallel", "single_device"}
    text = str(rows_)
    assert text.splitlines()[0].split()[:2] == ["strategy", "workers"]
    shown = Parsed(rows_._repr_html_())
    for row in rows_:
        assert row.strategy in text
        assert f"{row.examples_per_second:,.0f}" in text
        assert {row.strategy, f"{row.examples_per_second:,.0f}"} <= set(shown.cells)


@pytest.mark.thorough
def test_a_plan_is_printed_as_the_terminal_shows_it() -> None:
    plan = apportion.plan(TESTED, trial=False)
    text = str(plan)
    assert plan.strategy in text
    assert all(line in text for line in plan.why)
    assert str(plan.commands.apportion) in text
    shown = Parsed(plan._repr_html_())
    assert any(cell.startswith(plan.strategy) for cell in shown.cells)
    assert "why not" in plan._repr_html_()


def test_a_result_says_what_a_run_came_to(tmp_path: Path) -> None:
    result = apportion.train(TESTED, "single_device", run_dir=tmp_path / "run")
    assert f"{result.metrics['accuracy']:.4g}" in str(result)
    assert str(tmp_path / "run") in str(result)
    shown = Parsed(result._repr_html_())
    assert {"test accuracy", f"{result.metrics['accuracy']:.4g}", str(tmp_path / "run")} <= set(shown.cells)


def test_training_shows_nothing_where_no_person_looks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    apportion.train(TESTED, "single_device", run_dir=tmp_path / "run")
    assert capfd.readouterr().out == ""
    apportion.train(TESTED, "single_device", run_dir=tmp_path / "again", progress=True)
    shown = capfd.readouterr().out
    assert "20 steps" in shown
    assert "test accuracy" in shown


def test_help_describes_every_field() -> None:
    """``help`` of a public class has a sentence for each of its fields."""
    for name in (name for name in dir(apportion) if not name.startswith("_")):
        public = getattr(apportion, name)
        if not (isinstance(public, type) and dataclasses.is_dataclass(public)):
            continue
        shown = pydoc.plain(pydoc.render_doc(public)).splitlines()
        for field in (field for field in dataclasses.fields(public) if not field.name.startswith("_")):
            at = next(n for n, line in enumerate(shown) if line.strip(" |").startswith(f"{field.name}: "))
            assert len(shown[at + 1].strip(" |").split()) >= 3, f"{name}.{field.name} is not described"
