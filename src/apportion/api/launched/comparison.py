"""Strategies measured against each other on ranks that are running already, over the connections that they have."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from apportion.api.compared_row import ROUNDS, WARM_UP, ComparedRow, in_order, row_of, save
from apportion.api.launched.proof import must_agree, must_have_met, on_ranks
from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.strategy import Strategy, cut_at
from apportion.core.workload import Workload
from apportion.planner.trials.trial import Candidate, Measured, TrialWorkers, candidate
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local
from apportion.runtime.launched.driving import driven
from apportion.runtime.launched.running_ranks import RunningRanks
from apportion.runtime.worker.job import Job


@collective
def compare_launched(
    workload: Workload | str,
    strategies: Sequence[Strategy],
    launcher: Env | HostsLauncher,
    *,
    steps: int,
    path: str | Path | None,
    every: bool,
) -> list[ComparedRow]:
    """Measures so many steps of each strategy on the ranks that call this, one strategy after the other; the first of
    them, of one process, on rank 0's host. Returns the same rows on all ranks, or raises the same error. ``every``:
    those that cannot run this workload here are left out, with a warning of rank 0."""
    world = World.from_env(device="cpu", insecure=launcher.insecure)
    try:
        must_have_met(world)
        candidates, left_out = _candidates(strategies, world, every=every)
        jobs = [Job(workload=workload, strategy=c.strategy, launcher=str(launcher)) for c in candidates]
        must_agree(jobs[0], world)
        comparison = _Comparison(workload, candidates, steps, every=every)
        told = driven(jobs, world, comparison.drive, cut_at) if world.size > 1 else comparison.drive(None)
    finally:
        world.close()
    rows = in_order([ComparedRow(**row) for row in told["rows"]])
    rows = [row if row.workers == 1 else replace(row, launcher=str(launcher)) for row in rows]
    if world.rank == 0:
        for strategy, why in (*left_out, *told["left_out"]):
            warnings.warn(f"{strategy} is left out: {why}", stacklevel=3)
        if path is not None:
            save(rows, path)
    return rows


def _candidates(
    strategies: Sequence[Strategy], world: World, *, every: bool
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Returns the candidates, and those that do not run on so many ranks, each with the reason."""
    found, left_out = [], []
    for strategy in strategies:
        try:
            one = strategy.one_process
            found.append(candidate(strategy, Local(workers=1, device="cpu")) if one else on_ranks(strategy, world))
        except ValueError as error:
            if not every:
                raise
            left_out.append((str(strategy), str(error)))
    return found, left_out


class _Comparison:
    """One comparison under way, in rank 0."""

    def __init__(self, workload: Workload | str, candidates: Sequence[Candidate], steps: int, *, every: bool) -> None:
        self._workload, self._candidates, self._steps, self._every = workload, candidates, steps, every

    def drive(self, ranks: RunningRanks | None) -> dict[str, Any]:
        """Measures one candidate after the other; returns the rows, and what was left out, as plain data. ``ranks``:
        None where this process is the only one, which then starts another."""
        measured: list[Measured] = []
        left_out = []
        for which, chosen in enumerate(self._candidates):
            try:
                measured.append(self._measured(chosen, ranks, which))
            except ValueError as error:
                if not (self._every and measured):
                    raise
                left_out.append((str(chosen.strategy), str(error)))
        alone = next(m for m in measured if m.candidate.strategy.one_process)
        return {"rows": [asdict(row_of(m, alone, None)) for m in measured], "left_out": left_out}

    def _measured(self, chosen: Candidate, ranks: RunningRanks | None, which: int) -> Measured:
        here = chosen.strategy.one_process
        group = TrialWorkers(chosen, self._workload, {}, ranks=None if here else ranks, which=which)
        with ExitStack() as stack:
            stack.callback(group.pool.close)
            if ranks is not None and not isinstance(group.pool, RunningRanks):
                stack.enter_context(ranks.beside(group.pool))
            group.built()
            group.go(WARM_UP, measure=False)
            rounds = min(ROUNDS, self._steps)
            for turn in range(rounds):
                group.go(self._steps // rounds + (turn < self._steps % rounds))
        return group.measured
