"""Every measured figure of the README and the docs stands in a table that benchmarks/results fills, with the command,
the commit and the processor below it. What stands elsewhere is a limit, a definition or an example of output."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import grid
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
BLOCK = re.compile(r"<!-- results: (\w+) -->\n.*?<!-- end of results -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
NUMBER = r"(?<![\w.-])\d[\d,]*(?:\.\d+)?"
UNIT = (
    r" ?(?:(?:n|u|µ|m)?s|seconds?|minutes?|hours?|%|(?:percentage )?points?|times(?! (?:as|the) long as)|MHz|[GMk]?B/s"
    r"|[GMk]b/s|(?:examples|rows|frames|images|requests|steps) (?:a|per) second|(?:examples|rows|frames|images)/s)"
    r"(?![\w/])"
)
FIGURE = re.compile(NUMBER + UNIT)


def texts(page: Path) -> str:
    """A page without its tables of results, its code and its samples of output."""
    return CODE.sub("", BLOCK.sub("", page.read_text()))


def figures(page: Path) -> Iterator[tuple[str, str]]:
    """The figures of a page that could be measured ones, each with the words around it."""
    text = texts(page)
    for found in FIGURE.finditer(text):
        around = text[max(0, found.start() - 60) : found.end() + 40].replace("\n", " ")
        yield found[0], around
    for number, row in enumerate(text.splitlines(), 1):  # a table of ratios has no units
        if row.startswith("|"):
            for cell in row.strip("|").split("|"):
                if re.fullmatch(r"\s*\d+\.\d+(?:e-?\d+)?\s*", cell):
                    yield cell.strip(), f"line {number}: {row}"


LIMITS: dict[str, str] = {
    "README.md": "100 times, 52 %",
    "CHANGELOG.md": "10 s, 5 %, 20 %, 10 s, 5 %, 5 %, 2 s, 5 s, 95 %",
    "data_parallel.md": "10 s, 5 %",
    "design.md": "10 s, 5 %, 20 %",
    "export.md": "95 %, 0.3 points",
    "faults.md": (
        "2 s, 30 s, 900 s, 30 s, 1 s, 0.2 s, 3.5 s, 0.2 s, 1 %, 4 s, 3.5 s, 3.5 s, 5 s, 8 s, 3.5 s, 10 s, 2 "
        "s, 2 s, 10 s, 1 s, 1 s, 10 s"
    ),
    "hybrid_parallel.md": "95 %, 5 %, 5 %, 95 %",
    "local_sgd.md": "20 s, 0.2 s, 20 s, 60 s",
    "onnx.md": "0.3 points, 1 %, 1 %",
    "planner.md": "3 %, 10 %, 50 %, 10 Gb/s",
    "proof.md": "100 times, 10 s, 5 %, 0.1 s",
    "reinforcement.md": "30 s",
    "security.md": "5 s",
    "serve.md": "1 s, 0.25 s, 4 s, 2 s, 1.25 times, 10 s, 0.1 s, 30 s",
    "several_hosts.md": "5 s, 20 s, 20 s, 3.5 s, 30 s",
    "spiking.md": "91.73 %",
}
"""What is no measurement of ours, by page: limits that the program has, definitions, and what the papers say. Another
figure belongs into a file of benchmarks/results; a new limit belongs here."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measured_figures_stand_in_tables_that_say_where_they_come_from(page: Path) -> None:
    limits = LIMITS.get(page.name, "").split(", ")
    unknown = [around for figure, around in figures(page) if figure not in limits or limits.remove(figure)]
    assert not unknown, f"move it into a file of benchmarks/results, or list the limit: {unknown}"


def test_the_pages_show_what_the_files_of_results_hold() -> None:
    filled = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))["filled"]
    stale = [page.name for page in PAGES if filled(page.read_text()) != page.read_text()]
    assert not stale, "run python benchmarks/results.py fill"


def test_every_file_of_results_is_shown_and_says_how_its_figures_were_measured() -> None:
    shown = {found[1] for page in PAGES for found in BLOCK.finditer(page.read_text())}
    assert shown == {file.stem for file in RESULTS}
    for file in RESULTS:
        found = json.loads(file.read_text())
        assert re.fullmatch(r"[0-9a-f]{7,40}", found["commit"]), file.name
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", found["date"]), file.name
        assert found["processor"], file.name
        assert found["software"], file.name
        scripts = re.findall(r"[\w/]+\.py", found["command"])
        assert scripts, file.name
        assert all((ROOT / script).exists() for script in scripts), found["command"]
        assert all(len(row) == len(found["columns"]) for row in found["rows"]), file.name


def test_a_figure_that_is_measured_and_stands_in_the_text_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It is 1.4 times as fast: 12 ms a step, 91.7 % right, 30,000 examples/s.\n\n| a | 1.08 |\n`2 s`\n")
    assert [figure for figure, _ in figures(page)] == ["1.4 times", "12 ms", "91.7 %", "30,000 examples/s", "1.08"]


def test_the_readme_has_the_share_of_the_grid_that_is_exact() -> None:
    cells = [
        grid.refusal(strategy, name, workers, optimizer) is None
        for strategy in grid.STRATEGIES
        for name in grid.NETWORKS
        for workers in grid.workers_of(strategy)
        for optimizer in grid.optimizers(name)
    ]
    exact = sum(cells)
    share = f"Of the {len(cells):,} cells of that grid {exact:,} ({exact / len(cells):.0%}"[:-1]
    assert f"{share} %) are exact, and {len(cells) - exact:,} are refused by name" in (ROOT / "README.md").read_text()


def test_the_changelog_lists_no_change_to_what_was_never_released() -> None:
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    if [section.partition("\n")[0] for section in sections] == ["[Unreleased]"]:
        assert re.findall(r"^### (.*)", sections[0], re.MULTILINE) == ["Added"]
