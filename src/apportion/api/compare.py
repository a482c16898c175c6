"""Measure strategies against each other on the same ranks: medians of turns, one strategy running at a time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from apportion.api.arguments import check_steps, check_workload, launcher_of, strategy_of
from apportion.api.verb import DrivenVerb
from apportion.core.json_data import read
from apportion.core.launcher import Launcher
from apportion.core.named_arguments import named_arguments
from apportion.core.own_frames import outside
from apportion.core.strategy import Strategy
from apportion.core.value import names, parse
from apportion.core.workload import Workload
from apportion.errors import ApportionError
from apportion.planner.predict import prices
from apportion.planner.trials.trial import Candidate, Measured, candidate, parked
from apportion.runtime.launched.ranks import Ranks, local_layout
from apportion.runtime.worker.job import Job

# The lines of a comparison of strategies: what each of them took, fastest first.


ROUNDS = 5
"""The number of turns that each strategy's steps are divided in."""
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """The line of one strategy in the table."""

    strategy: str
    launcher: str
    workers: int
    threads: int
    """The number of threads of each worker."""
    step_seconds: float
    """The median of the seconds of a step, of the slowest rank."""
    p90_seconds: float
    """The seconds that nine steps of ten take at most: far above ``step_seconds`` where something disturbs some."""
    examples_per_second: float
    times_one_device: float
    """The ratio of its examples/s to those of single_device with all threads."""
    computing: float
    """The share of the workers' time that is computing; with ``waiting`` (for other ranks) and ``communicating``, 1 in
    all."""
    waiting: float
    communicating: float
    exact: bool
    held_bytes: int
    """The bytes of weights, optimizer slots and buffers of all workers; what they share is counted once."""
    peak_bytes: int
    """The bytes of resident memory of the largest worker, with Python and torch."""
    steps: int
    predicted_seconds: float | None = None
    """The seconds of a step, by the strategy's price on this machine as it was measured, before any step was made;
    None: it has no price for this network, or on this machine."""

    @property
    def error(self) -> float | None:
        """The error of the prediction: 0.1 says that the step takes 10 % longer than predicted."""
        return None if self.predicted_seconds is None else self.step_seconds / self.predicted_seconds - 1

    def to_json(self) -> dict[str, Any]:
        """Returns plain data: the fields, and the ``error``."""
        return {**asdict(self), "error": self.error}


class ComparedRows(list[ComparedRow]):
    """The rows of a comparison, fastest first, the approximate ones after the exact ones: a list that prints as the
    terminal's table."""

    def __str__(self) -> str:
        from apportion.api.comparison import rows_text  # rich comes with it

        return rows_text(self)

    def _repr_html_(self) -> str:
        from apportion.api.comparison import rows_html

        return rows_html(self)


def row_of(measured: Measured, alone: Measured, predicted: float | None) -> ComparedRow:
    """Returns the line of one strategy. ``alone``: one device; ``predicted``: the seconds of a step."""
    total = measured.computing + measured.waiting + measured.communicating or 1.0
    chosen = measured.candidate
    return ComparedRow(
        strategy=str(chosen.strategy),
        launcher=str(chosen.launcher),
        workers=chosen.ranks,
        threads=chosen.launcher.threads_each(chosen.ranks),
        step_seconds=measured.step_seconds,
        p90_seconds=measured.p90_seconds,
        examples_per_second=measured.examples_per_second,
        times_one_device=measured.examples_per_second / alone.examples_per_second,
        computing=measured.computing / total,
        waiting=measured.waiting / total,
        communicating=measured.communicating / total,
        exact=chosen.strategy.exact,
        held_bytes=measured.held_bytes,
        peak_bytes=measured.peak_bytes,
        steps=len(measured.seconds),
        predicted_seconds=predicted,
    )


def in_order(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Returns the rows, fastest first, the approximate ones after the exact ones."""
    return sorted(rows, key=lambda row: (not row.exact, -row.examples_per_second))


def save(rows: Sequence[ComparedRow], path: str | Path) -> None:
    """Saves the rows as JSON."""
    Path(path).write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")


PROFILE_SECONDS = 8.0
"""The seconds that measuring this machine, where it has not been, and the workload may take."""


@final
@dataclass(frozen=True, kw_only=True)
class Compare(DrivenVerb[list[ComparedRow]]):
    """One comparison of strategies, of which the first is of one process."""

    strategies: tuple[Strategy, ...]
    steps: int
    every: bool
    """True where those that cannot run this workload on these ranks are left out, with a warning."""
    predict: bool
    path: str | Path | None = None
    """Where the rows are saved as JSON."""

    def jobs(self, launcher: str, ranks: int) -> list[Job]:
        found = []
        for strategy in self.strategies:
            try:
                if not strategy.one_process:
                    local_layout(strategy, ranks)
            except ValueError:
                if not self.every:
                    raise
            found.append(Job(workload=self.workload, strategy=strategy, launcher=launcher))
        return found

    def answer(self, ranks: Ranks) -> dict[str, Any]:
        left_out: list[tuple[str, str]] = []
        candidates = dict(self._candidates(ranks, left_out))
        predicted = self._predicted(list(candidates.values())) if self.predict and ranks.hosts == 1 else {}
        measured: list[Measured] = []
        for numbers in [list(candidates)] if ranks.side_by_side else [[number] for number in candidates]:
            together = [candidates[number] for number in numbers]
            measured += self._measured(together, ranks, numbers[0], left_out, alone=not measured)
        alone = next(m for m in measured if m.candidate.strategy.one_process)
        rows = in_order([row_of(m, alone, predicted.get(m.candidate)) for m in measured])
        return {"rows": [asdict(row) for row in rows], "left_out": left_out, "running": not ranks.side_by_side}

    def value(self, answer: Any, launcher: Launcher) -> list[ComparedRow]:
        rows = [read(ComparedRow, row) for row in answer["rows"]]
        return [replace(row, launcher=str(launcher)) if answer["running"] and row.workers > 1 else row for row in rows]

    def announce(self, value: list[ComparedRow], answer: Any) -> None:
        for strategy, why in answer["left_out"]:
            warnings.warn(f"{strategy} is left out: {why}", stacklevel=outside())
        if self.path is not None:
            save(value, self.path)

    def _candidates(self, ranks: Ranks, left_out: list[tuple[str, str]]) -> Iterator[tuple[int, Candidate]]:
        """Yields the candidates with their numbers; adds those that do not run on these ranks to ``left_out``."""
        for number, strategy in enumerate(self.strategies):
            try:
                where = ranks.layout_alone() if strategy.one_process else ranks.layout(strategy)
                yield number, candidate(strategy, where)
            except ValueError as error:
                if not self.every:
                    raise
                left_out.append((str(strategy), str(error)))

    def _measured(
        self,
        candidates: Sequence[Candidate],
        ranks: Ranks,
        first: int,
        left_out: list[tuple[str, str]],
        *,
        alone: bool,
    ) -> list[Measured]:
        """Measures candidates in turns. ``alone``: nothing has been measured before them, so that the first of them has
        to run."""
        refused: list[tuple[Candidate, str]] = []
        rounds = min(ROUNDS, self.steps)
        try:
            with parked(candidates, self.workload, {}, refused if self.every else None, ranks, first) as groups:
                for group in groups:
                    group.go(WARM_UP, measure=False)
                for turn in range(rounds):
                    for group in groups:
                        group.go(self.steps // rounds + (turn < self.steps % rounds))
                return [group.measured for group in groups]
        except ValueError as error:
            if not self.every or alone:
                raise
            refused.append((candidates[0], str(error)))
            return []
        finally:
            left_out += [(str(each.strategy), why) for each, why in refused]

    def _predicted(self, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
        """Returns the seconds of a step of each candidate that has a price; nothing where the workload cannot be
        profiled, which says nothing about running it."""
        with suppress(ValueError, ApportionError):
            costs = prices(self.workload, candidates, PROFILE_SECONDS)
            return {c: cost.step_seconds for c, cost in zip(candidates, costs, strict=True) if cost is not None}
        return {}


@named_arguments("check")
def compare(  # noqa: PLR0913 (all of it by name)
    workload: Workload | str,
    strategies: Sequence[Strategy | str] | Strategy | str | None = None,
    *,
    workers: int | None = None,
    steps: int = 50,
    launcher: Launcher | str | None = None,
    path: str | Path | None = None,
    predict: bool = True,
) -> ComparedRows:
    """Measures ``steps`` steps of each strategy after a warm-up, in ``ROUNDS`` turns. Returns the rows, fastest first,
    and after the exact strategies the approximate ones: as many examples teach them less.

    ``strategies``: None takes all there are that can run this workload. ``workers``: the number for each strategy that
    divides its work. single_device with all threads is always among them, to compare with. ``path``: where to save the
    rows as JSON. ``predict``: first measure this machine and the workload for some seconds, and say what each step
    should take.

    Under ``launcher=env()`` every rank calls it, in the same way: each strategy runs on the CPUs of these very ranks,
    one after the other, with a prediction where they are on one host; single_device runs on rank 0's host. All ranks
    return the same rows, and rank 0 saves them. With ``launcher=ssh("a", "b:4")`` the ranks are started on these hosts
    for it.
    """
    check_workload(workload, "compare")
    strategies = [strategies] if isinstance(strategies, str | Strategy) else strategies
    where = launcher_of(launcher)
    check_steps(steps)
    if workers is not None:
        where = where.with_workers(workers)
    rows: Sequence[ComparedRow] = where.dispatch(
        Compare(
            workload=workload,
            strategies=tuple(values_of(strategies)),
            steps=steps,
            every=not strategies,
            predict=predict,
            path=path,
        )
    )
    return ComparedRows(rows)


def values_of(strategies: Sequence[Strategy | str] | None) -> list[Strategy]:
    """Returns the strategies as values, of one process first, which is always among them; None: all there are."""
    values: list[Strategy] = [strategy_of(s) for s in strategies or names("apportion.strategies")]
    if not any(s.one_process for s in values):
        values.insert(0, parse("single_device", "apportion.strategies"))
    return sorted(values, key=lambda s: not s.one_process)
