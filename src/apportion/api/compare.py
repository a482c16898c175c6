"""Measure strategies against each other on this machine: in turns, medians, one running at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from apportion.api.arguments import check_steps, check_workload, launcher_of, strategy_of
from apportion.api.compared_row import ROUNDS, WARM_UP, ComparedRow, in_order, row_of, save
from apportion.core.named_arguments import named_arguments
from apportion.core.strategy import Strategy
from apportion.core.value import names, parse
from apportion.core.workload import Workload
from apportion.errors import ApportionError
from apportion.planner.predict import prices
from apportion.planner.trials.trial import Candidate, candidate, parked
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local

PROFILE_SECONDS = 8.0
"""The seconds that measuring this machine, where it has not been, and the workload may take."""


@named_arguments("check")
def compare(  # noqa: PLR0913 (all of it by name)
    workload: Workload | str,
    strategies: Sequence[Strategy | str] | Strategy | str | None = None,
    *,
    workers: int | None = None,
    steps: int = 50,
    launcher: Local | Env | HostsLauncher | str | None = None,
    path: str | Path | None = None,
    predict: bool = True,
) -> list[ComparedRow]:
    """Measures so many steps of each strategy after a warm-up, in ``ROUNDS`` turns. Returns the rows, fastest first,
    and after the exact strategies the approximate ones: as many examples teach them less.

    ``strategies``: None takes all there are that can run this workload. ``workers``: the number for each strategy that
    divides its work. single_device with all threads is always among them, to compare with. ``path``: where to save the
    rows as JSON. ``predict``: first measure this machine and the workload for some seconds, and say what each step
    should take.

    Under ``launcher=env()`` every rank calls it, in the same way: each strategy runs on the CPUs of these very ranks,
    one after the other, without a prediction; single_device runs on rank 0's host. All ranks return the same rows, and
    rank 0 saves them. With ``launcher=ssh("a", "b:4")`` the ranks are started on these hosts for it.
    """
    check_workload(workload, "compare")
    strategies = [strategies] if isinstance(strategies, str | Strategy) else strategies
    where: Local | Env | HostsLauncher = launcher_of(launcher)
    check_steps(steps)
    if isinstance(where, HostsLauncher):
        from apportion.api.on_hosts import rows_on_hosts  # what goes to other hosts needs more

        hosts = where if workers is None else replace(where, workers=workers)
        rows = rows_on_hosts(workload, values_of(strategies), hosts, steps=steps, every=not strategies)
    elif isinstance(where, Env):
        if workers is not None:
            raise ValueError(f"workers={workers} goes with local(): {where} finds its ranks running already")
        from apportion.api.launched.comparison import compare_launched  # what runs in ranks needs more

        return compare_launched(workload, values_of(strategies), where, steps=steps, path=path, every=not strategies)
    else:
        candidates = _candidates(strategies, workers, where)
        rows = _measured(workload, candidates, steps, every=strategies is None, predict=predict)
    if path is not None:
        save(rows, path)
    return rows


def _measured(
    workload: Workload | str, candidates: Sequence[Candidate], steps: int, *, every: bool, predict: bool
) -> list[ComparedRow]:
    """Measures the candidates on this machine. ``every``: those that cannot run here are left out, with a warning."""
    predicted = _predicted(workload, candidates) if predict else dict.fromkeys(candidates)
    rounds = min(ROUNDS, steps)
    refused: list[tuple[Candidate, str]] | None = [] if every else None
    with parked(candidates, workload, {}, refused) as groups:
        for group in groups:
            group.go(WARM_UP, measure=False)
        for turn in range(rounds):
            for group in groups:
                group.go(steps // rounds + (turn < steps % rounds))
        measured = [g.measured for g in groups]
    for left_out, why in refused or ():
        warnings.warn(f"{left_out.strategy} is left out: {why}", stacklevel=3)
    alone = next(m for m in measured if m.candidate.strategy.one_process)
    return in_order([row_of(m, alone, predicted[m.candidate]) for m in measured])


def _predicted(workload: Workload | str, candidates: Sequence[Candidate]) -> dict[Candidate, float | None]:
    """Returns the seconds a step of each; None where the workload cannot be profiled, which says nothing about running
    it."""
    try:
        costs = prices(workload, candidates, PROFILE_SECONDS)
    except (ValueError, ApportionError):
        costs = [None] * len(candidates)
    return {c: None if cost is None else cost.step_seconds for c, cost in zip(candidates, costs, strict=True)}


def values_of(strategies: Sequence[Strategy | str] | None) -> list[Strategy]:
    """Returns the strategies as values, of one process first, which is always among them; None: all there are."""
    values: list[Strategy] = [strategy_of(s) for s in strategies or names("apportion.strategies")]
    if not any(s.one_process for s in values):
        values.insert(0, parse("single_device", "apportion.strategies"))
    return sorted(values, key=lambda s: not s.one_process)


def _candidates(strategies: Sequence[Strategy | str] | None, workers: int | None, launcher: Local) -> list[Candidate]:
    chosen = []
    for strategy in values_of(strategies):
        own = 1 if strategy.one_process else workers or launcher.workers
        where = Local(workers=own, threads=launcher.threads, device=launcher.device, loaders=launcher.loaders)
        chosen.append(candidate(strategy, where))
    return chosen
