"""The plan for ranks that are running already (torchrun, Slurm), and the strategy that they take where none is given:
the best by this plan of those that use all of them. All ranks call ``plan_launched`` or ``choose_launched``.

::

    rank 0   machines, | profile | search |  steps of the best few, in turns |  explain -> the plan
    others   links     |   wait           |  with it                         |

What is tried runs in these very ranks, over the links that the training will have.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from apportion.comm.group import broadcast_message, collective, gather_messages
from apportion.comm.network.launched_ranks import hosts
from apportion.comm.world import World
from apportion.core.address import load_workload
from apportion.core.launcher import Launcher
from apportion.core.value import written_name
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Cluster, Placement
from apportion.cost_model.profile import Profile
from apportion.planner.build import make
from apportion.planner.calibration import correction
from apportion.planner.candidate import Measurement, Priced, ranked, trials_of
from apportion.planner.plan import Plan
from apportion.planner.search import places_of, search
from apportion.planner.trials.launched_trials import Bench, Choice, Taken
from apportion.planner.units import milliseconds
from apportion.profiler.launched_cluster import SECONDS, measure_here
from apportion.profiler.measure_workload import profile

MEASURING_SECONDS, TRIAL_SECONDS = 4.0, 3.0
"""The seconds for measuring the hosts and the links between them, and for trying the best few: less than a plan takes
that is asked for by itself."""


@collective
def choose_launched(
    workload: Workload | str, world: World, launcher: Launcher, *, trial: bool, name: str | None = None
) -> dict[str, Any]:
    """Chooses an exact strategy for all ranks of this world. Returns the data of a ``plan`` event, on all of them.
    Raises ValueError, on all of them, where no exact strategy runs on all ranks, or the hosts have unequal numbers of
    ranks.

    ``trial``: the best few are tried; else the best by prediction is taken. ``name``: what refusals call the workload.
    """
    began = time.monotonic()
    plan = plan_launched(workload, world, name=name, trial=trial, seconds=TRIAL_SECONDS, measuring=MEASURING_SECONDS)
    data: dict[str, Any] | None = None
    if plan is not None:
        data = {**described_choice(plan, world.size, str(launcher)), "seconds": time.monotonic() - began}
    data = broadcast_message(data, world.group(), device=world.device)
    if data["strategy"] is None:
        raise ValueError(f"no exact strategy trains this network on these {world.size} ranks: {data['why']}")
    return data


def described_choice(plan: Plan, ranks: int, launcher: str) -> dict[str, Any]:
    """Returns what a plan comes to for as many ranks as are running: the data of a ``plan`` event without the seconds.
    Its ``strategy`` is None where nothing runs on all ranks, and ``why`` says then what refuses."""
    everywhere = [p for p in ranked(plan.found) if p.layout.ranks == ranks]
    able = [p for p in everywhere if p.cost is not None and p.strategy.exact]
    able = [p for p in able if p.tried is not None] or able  # what was measured is surer than any prediction
    alone = next((p for p in ranked(plan.found) if p.layout.ranks == 1 and p.cost is not None), None)
    shown = everywhere if alone is None or ranks == 1 else [*everywhere, alone]
    if able:
        why = _why(able[0], alone, ranks)
    else:
        why = "; ".join(dict.fromkeys(f"{p.strategy}: {p.refusal}" for p in everywhere if p.refusal)) or "none is known"
    return {
        "strategy": str(able[0].strategy) if able else None,
        "launcher": launcher,
        "why": why,
        "candidates": [_row(p, launcher if p.layout.ranks == ranks else str(p.launcher)) for p in shown],
        "remembered": False,
    }


def _why(best: Priced, alone: Priced | None, ranks: int) -> str:
    how = "measured" if best.tried is not None else "predicted"
    why = f"the fastest on all {ranks} ranks, {milliseconds(best.step_seconds)} a step as {how}"
    if alone is not None and ranks > 1 and alone.seconds_per_example < best.seconds_per_example:
        why += f"; one process would be faster, with {milliseconds(alone.step_seconds)}: start one rank alone"
    return why


def _row(p: Priced, launcher: str) -> dict[str, Any]:
    return {
        "strategy": str(p.strategy),
        "launcher": launcher,
        "exact": p.strategy.exact,
        "predicted_seconds": None if p.cost is None else p.cost.step_seconds,
        "step_seconds": None if p.tried is None else p.tried.step_seconds,
        "examples_per_second": None if p.tried is None else p.examples_per_second,
        "refused": p.refusal or None,
    }


PLAN_TRIAL_SECONDS = 20.0
PROFILING = 0.75
"""The share of the time for measuring the machines that is spent, in addition, on profiling the workload's layers."""
BEST = 3
"""The number of the best candidates by prediction that are tried."""
AGAIN = 2
"""The number of further rounds of trials, in which what was learned may bring another candidate into question."""


@collective
def plan_launched(
    workload: Workload | str,
    world: World,
    *,
    name: str | None = None,
    trial: bool = True,
    seconds: float = PLAN_TRIAL_SECONDS,
    measuring: float = SECONDS,
) -> Plan | None:
    """Plan how to split a workload among the ranks of this world, or that one host by itself is faster. Returns the
    plan on rank 0, None on the others. All ranks call it, with the same arguments.

    ``name``: what the plan calls the workload; None: its address, or the class of its network. ``seconds``: the time
    for trials; at least ``launched_trials.LEAST_ROUNDS`` steps of each candidate are made,
    however long they take. ``measuring``: the time for measuring the machines and the links between them; ``PROFILING``
    of it is spent on the workload in addition. Raises ValueError, on all ranks, where the hosts do not have equally
    many ranks, or nothing can run.
    """
    opened = load_workload(workload) if isinstance(workload, str) else workload
    name = workload if name is None and isinstance(workload, str) else name
    slots = _slots(world)
    cluster = measure_here(world, seconds=measuring)
    planned, refusal = None, ""
    if world.rank == 0:  # by its own host, while the others wait: hosts of the same make take the same times
        try:
            found, profiled = priced_here(opened, _on(cluster, slots), PROFILING * measuring, name)
            planned = make(found, profiled, cluster, workload=name)
        except ValueError as error:
            refusal = str(error)
    refusal = broadcast_message(refusal, world.group(), device=world.device)
    if refusal:
        raise ValueError(refusal)
    return _tried(planned, opened, world, seconds) if trial else planned


def _slots(world: World) -> list[tuple[int, int | None]]:
    """Return each rank's (host, GPU), by number; GPU None: the rank computes on the cores. Raises ValueError where the
    hosts do not have equally many ranks."""
    gpu = None if world.device.type == "cpu" else world.device.index or 0
    place = [socket.gethostname(), world.local_rank, world.local_size, gpu]
    everyone = gather_messages(place, world.group(), device=world.device)
    own = hosts([(str(name), int(rank), int(size)) for name, rank, size, _ in everyone])
    many = Counter(own)
    if len(set(many.values())) > 1:
        raise ValueError(
            f"{world.size} ranks on {len(many)} hosts, {' and '.join(map(str, many.values()))} of them: a plan is for "
            "as many on every host; start as many on each, or train with --strategy data_parallel"
        )
    return [(host, gpu) for host, (*_, gpu) in zip(own, everyone, strict=True)]


def _on(cluster: Cluster, slots: Sequence[tuple[int, int | None]]) -> Placement:
    """Return the layout of the ranks where they are, each with the threads that it has."""
    names = (f"{cluster.hosts[host]}/{'cpu' if gpu is None else f'gpu{gpu}'}" for host, gpu in slots)
    return Placement(cluster=cluster, devices=tuple(names), threads=torch.get_num_threads())


def priced_here(
    opened: Workload, own: Placement, seconds: float, name: str | None = None
) -> tuple[list[Priced], Profile]:
    """Price everything that these ranks could run, on all of them as they are placed or on one alone. Returns the
    candidates, and the profile that they are priced by. ``name``: the name of the workload in refusals."""
    profiled = profile(opened, own.cluster, [own, *places_of(own.cluster, 1)], seconds=seconds)
    if name is not None:
        profiled = replace(profiled, name=name)
    found = [
        p
        for workers, each in ((own.ranks, own.threads), (1, None))
        for p in search(profiled, own.cluster, workers=workers, threads=each)
        if p.layout.ranks == 1 or sorted(p.layout.devices) == sorted(own.devices)
    ]
    return list({(str(p.strategy), p.layout.devices, p.layout.threads): p for p in found}.values()), profiled


def _tried(planned: Plan | None, opened: Workload, world: World, seconds: float) -> Plan | None:
    """Return the plan, corrected by what the steps of its best few candidates have shown."""
    bench = Bench(opened, world)
    try:
        for turn in range(1 + AGAIN):
            worth = None if planned is None else _worth_trying(planned, first=turn == 0)
            worth = broadcast_message(worth, world.group(), device=world.device)
            chosen: list[Choice] = [(strategy, threads) for strategy, threads in worth]
            if len(chosen) < 2:
                break
            for choice in chosen:
                bench.build(choice)
            taken = bench.measure(chosen, seconds if turn == 0 else seconds / 2)
            if planned is not None:
                planned = _corrected(planned, taken, bench.refused)
    finally:
        bench.close()
    return planned


def _worth_trying(planned: Plan, *, first: bool) -> list[Choice]:
    """Choose the candidates to try, each with its threads: in the first round the best by prediction, one process, and
    plain data_parallel; later the best so far, and beside it the one that should be faster by the corrected
    predictions."""
    able = [p for p in ranked(planned.found) if p.cost is not None and p.strategy.exact]
    if first:
        always = [p for p in able if p.strategy.one_process or str(p.strategy) == written_name(type(p.strategy))]
        kinds = ("SingleDevice", "DataParallel")
        plain = [next((p for p in always if type(p.strategy).__name__ == kind), None) for kind in kinds]
        chosen = [*able[:BEST], *(p for p in plain if p is not None)]
    else:
        done = [p for p in able if p.tried is not None]
        fastest = sorted(done, key=lambda p: p.seconds_per_example)[:1]
        best = fastest[0].seconds_per_example if fastest else 0.0
        rest = sorted((p for p in able if p.tried is None), key=lambda p: p.seconds_per_example)
        chosen = [*fastest, *(p for p in rest[:1] if p.seconds_per_example < best)]
    return list(dict.fromkeys((str(p.strategy), p.layout.threads) for p in chosen))


def _corrected(planned: Plan, taken: dict[Choice, Taken], refused: dict[str, str]) -> Plan:
    """Return the plan with each candidate measured where it was tried, on the layout that it was tried on, and the rest
    corrected by what the trials have taught."""
    found = [_with(p, taken, refused) for p in planned.found]
    fitted = correction(trials_of(found))
    found = [p.corrected_by(fitted) if p.tried is None else p for p in found]
    return make(found, planned.profile, planned.cluster, workload=planned.workload)


def _with(p: Priced, taken: dict[Choice, Taken], refused: dict[str, str]) -> Priced:
    choice = str(p.strategy), p.layout.threads
    if choice[0] in refused:
        return replace(p, cost=None, refusal=refused[choice[0]])
    if choice not in taken or p.cost is None:
        return p
    low, middle, high = taken[choice].quartiles
    return replace(p, tried=Measurement(step_seconds=middle, low=low, high=high, steps=taken[choice].steps))
