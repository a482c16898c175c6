"""What ranks that are running already do together besides training: prove a strategy on themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from apportion.api.proof_workers import ProofRequest
from apportion.api.surveyed_proof import prove_with_survey
from apportion.comm.group import collective
from apportion.comm.objects import gather_messages
from apportion.comm.world import World
from apportion.core.strategy import Strategy, cut_at
from apportion.core.workload import Workload
from apportion.errors import ApportionError
from apportion.planner.trials.trial import Candidate, candidate
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local
from apportion.runtime.launched.driving import connections, driven, ranks_by_host
from apportion.runtime.proof.proof import Proof
from apportion.runtime.worker.agreement import RunAgreement
from apportion.runtime.worker.job import Job

Made = TypeVar("Made")


@collective
def check_launched(workload: Workload | str, strategy: Strategy, launcher: Env | HostsLauncher, *, steps: int) -> Proof:
    """Proves a strategy on the ranks that call this, over the connections that they have; rank 0 starts the reference's
    processes. Returns the same proof on all of them, or raises the same error."""
    world = World.from_env(device="cpu", insecure=launcher.insecure)
    try:
        must_have_met(world)
        chosen = on_ranks(strategy, world)
        job = Job(workload=workload, strategy=strategy, launcher=str(launcher), prove=True, workers=chosen.ranks)
        opened = must_agree(job, world)
        hosts = len(ranks_by_host(world))
        if hosts > 1 and not strategy.referenced_across_hosts:
            raise ValueError(
                f"{strategy} changes what hosts send each other, and its reference is of one host: check it on one "
                "host, or without compress="
            )
        asked = ProofRequest(workload=workload, chosen=chosen, steps=steps, hosts=hosts)
        if world.size == 1:
            return prove_with_survey(asked)
        if opened.parts is not None and hosts > 1:
            from apportion.api.proof_rows import rows_of_check  # few data are in parts

            sent, lengths = rows_of_check(opened, world, steps)
            asked, job = replace(asked, sent=sent, lengths=lengths), replace(job, lengths=lengths)
        answer = driven([job], world, lambda ranks: prove_with_survey(asked, ranks).to_json(), cut_at)
        return Proof.from_json(answer)
    finally:
        world.close()


def on_ranks(strategy: Strategy, world: World) -> Candidate:
    """Returns the strategy on exactly the ranks of the world, as a candidate of as many workers. Raises ValueError
    where it does not run on so many."""
    workers = next((n for n in range(1, world.size + 1) if strategy.ranks(n) == world.size), None)
    if workers is None or (strategy.one_process and world.size > 1):
        why = "runs in one process" if strategy.one_process else f"needs at least {strategy.ranks(1)}"
        raise ValueError(f"{strategy} {why}, and {world.size} ranks are running: start as many, or use data_parallel")
    return candidate(strategy, Local(workers=workers, threads=torch.get_num_threads(), device="cpu"))


@collective
def must_have_met(world: World) -> None:
    """Raises ValueError, on all ranks, where they have met over another group than apportion's."""
    if world.size > 1 and connections(world) is None:
        raise ValueError(
            "the ranks have met over a process group of torch.distributed, which the script has made: check and "
            "compare need the connections of apportion, so call them before init_process_group"
        )


@collective
def must_agree(job: Job, world: World) -> Workload:
    """Returns the workload. Raises ValueError, on all ranks alike, where one of them cannot open its workload, or was
    given another one."""
    workload = all_or_none(job.open, world)
    RunAgreement(job, world).on_workload(workload)
    return workload


@collective
def all_or_none(make: Callable[[], Made], world: World) -> Made:
    """Returns what ``make`` makes in this rank. Raises ValueError or ApportionError, on all ranks alike, where one of
    them cannot make it."""
    made: list[Made] = []
    refusal = None
    try:
        made.append(make())
    except (ValueError, ApportionError) as error:
        refusal = [isinstance(error, ValueError), str(error)]
    refusals = [told for told in gather_messages(refusal, world.group(), device=world.device) if told]
    if refusals:
        wrong, said = refusals[0]
        raise ValueError(said) if wrong else ApportionError(said)
    return made[0]
