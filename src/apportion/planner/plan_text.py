"""A plan as text: the table, why, when it would change, and what to type."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from apportion.core.html_table import html_section, html_table, html_text
from apportion.planner.candidate import Priced, family
from apportion.planner.rollouts.rates import table as rates_table
from apportion.planner.units import gibibytes, number

if TYPE_CHECKING:
    from apportion.planner.plan import Plan

MOST_ROWS = 12
"""The largest number of rows of the table, which shows the best value of each strategy."""
_WIDE = 110
"""The width of the output in columns, where it does not go to a terminal."""

_PREDICTED = ("step: ms, predicted; compute, send, bubble and wait are its parts:",)
_LEARNED = (
    "step: ms, measured where it was tried (*), else predicted with what the trials have taught;",
    "predicted: before any trial; compute, send, bubble and wait are the parts of that:",
)


def show_plan(plan: Plan) -> None:
    """Prints the whole plan on the terminal."""
    console = Console(highlight=False, markup=False)
    _write(plan, console if console.is_terminal else Console(width=_WIDE, highlight=False, markup=False))


def plan_text(plan: Plan) -> str:
    """Returns the whole plan as the terminal shows it."""
    file = io.StringIO()
    _write(plan, Console(file=file, width=_WIDE, highlight=False, markup=False, force_jupyter=False))
    return file.getvalue().rstrip("\n")


def plan_html(plan: Plan) -> str:
    """Returns the whole plan as a notebook shows it."""
    shown, left = rows(plan)
    head = f"{plan.workload}, batches of {plan.profile.batch_size:,}, on {plan.cluster.name}"
    learned = any(p.cost is not None and p.step_seconds != p.cost.step_seconds for p in shown)
    heads = ["strategy and launcher", *_heads(learned=learned)]
    lost = list(zip(plan.candidates, plan.reasons, strict=True))[1:]
    ours, torchrun = plan.commands
    more = f"{left} more that are slower are left out; plan.candidates has them" if left else ""
    return "".join((
        html_text(head, bold=True),
        html_table(heads, [cells(p, learned=learned) for p in shown]),
        html_text(more) if more else "",
        html_section("why", plan.why),
        html_section("why not", [f"{p.strategy}: {why}" for p, why in _of_each(lost)]),
        html_section("when it would change", plan.sensitivities),
        html_section("side by side", [] if plan.matched is None else [plan.matched.text]),
        html_section("to run it", [command for command in (ours, torchrun) if command]),
    ))  # fmt: skip


def _write(plan: Plan, console: Console) -> None:
    say = _Say(console)
    say.line(f"{plan.workload}, batches of {plan.profile.batch_size:,}, on {plan.cluster.name}")
    shown, left = rows(plan)
    learned = any(p.cost is not None and p.step_seconds != p.cost.step_seconds for p in shown)
    console.print(_table(shown, learned=learned))
    for text in _LEARNED if learned else _PREDICTED:
        say.dim(text)
    say.dim("send: communication that nothing hides; wait: for the slowest worker; memory: of the largest worker")
    if left:
        say.dim(f"{left} more that are slower are left out; --json has them")
    say.list("why", plan.why)
    lost = list(zip(plan.candidates, plan.reasons, strict=True))[1:]
    say.list("why not", [f"{p.strategy}: {why}" for p, why in _of_each(lost)])
    say.list("when it would change", plan.sensitivities)
    if plan.matched is not None:
        say.list("side by side", [plan.matched.text])
    if plan.rollouts:
        say.line("\nother rollouts: frames/s, predicted")
        console.print(_rollouts(plan))
        for text in _SIZES:
            say.dim(text)
        say.list("", plan.rollouts_why)
    ours, torchrun = plan.commands
    say.list("to run it", [ours] if ours is not None else ["on each host, with its own NODE_RANK from 0 up:"])
    say.list("", [torchrun] if ours is None else [f"or under torchrun: {torchrun}"])


_SIZES = (
    "K x T: environments of each worker x steps of a rollout; (workers): the number of them that makes most frames",
    "one actor a worker: data_parallel deals as many actors as it has workers, which is actors= of the workload",
)


def _rollouts(plan: Plan) -> Table:
    """Makes the table of frames a second by size and strategy."""
    heads, texts = rates_table(plan.rollouts)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right" if head != heads[0] else "left", no_wrap=True)
    for row in texts:
        table.add_row(*row)
    return table


class _Say:
    """Prints lines, and lists with a heading; nothing in them is wrapped, so that a command can be copied."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def dim(self, text: str) -> None:
        self._console.print(text, style="dim", soft_wrap=True)

    def list(self, title: str, lines: Sequence[str]) -> None:
        if title and lines:
            self.line(f"\n{title}")
        for text in lines:
            self.line(f"  {text}")


def rows(plan: Plan) -> tuple[list[Priced], int]:
    """Returns (the candidates in the table, how many priced ones are not): the chosen one, and the best of each
    strategy."""
    able = [p for p in plan.candidates if p.cost is not None]
    best = [p for p in able if p is next(q for q in able if family(q.strategy) == family(p.strategy))]
    shown = best[:MOST_ROWS]
    return shown, len(able) - len(shown)


def _of_each(lost: Sequence[tuple[Priced, str]]) -> list[tuple[Priced, str]]:
    """Keeps the first of each strategy, which is as much as can be read."""
    seen, kept = set[str](), []
    for p, why in lost:
        if family(p.strategy) not in seen:
            seen.add(family(p.strategy))
            kept.append((p, why))
    return kept


def _table(shown: Sequence[Priced], *, learned: bool) -> Table:
    """Makes the table. ``learned``: with what was predicted before the trials, which the parts are of."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("strategy and launcher", overflow="fold", min_width=20)
    for name in _heads(learned=learned):
        table.add_column(name, justify="right", no_wrap=True)
    for p in shown:
        table.add_row(*cells(p, learned=learned))
    return table


def _heads(*, learned: bool) -> tuple[str, ...]:
    """Returns the heads of the columns but the first."""
    predicted = ("predicted",) if learned else ()
    return ("step ms", *predicted, "compute", "send", "bubble", "wait", "memory", "examples/s", "exact")


def cells(p: Priced, *, learned: bool) -> list[str]:
    """Returns the cells of one row of the table."""
    assert p.cost is not None
    terms = p.cost.terms

    def ms(*names: str) -> str:
        seconds = sum(terms.get(name, 0.0) for name in names)
        return number(seconds * 1e3) if seconds else "-"

    return [
        f"{p.strategy}\n  {p.launcher}",
        f"{number(p.step_seconds * 1e3)}{'*' if p.tried is not None else ''}",
        *([number(p.cost.step_seconds * 1e3)] if learned else []),
        ms("computing", "updating", "loading"),
        ms("communicating"),
        ms("bubble"),
        ms("waiting"),
        gibibytes(p.cost.memory_bytes),
        f"{p.examples_per_second:,.0f}\n±{p.error:.0%}",
        "yes" if p.strategy.exact else "no",
    ]
