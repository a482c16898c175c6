"""One function that rank 0 runs for all ranks, while each of them, rank 0 among them, makes steps when it says so.

::

    rank 0   a thread: drive(ranks)  -- orders -->  rank 0's main thread   makes steps
                                     -- orders -->  rank 1                 makes steps
             its value, or its error -- to all ->   every rank returns it, or raises it
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from apportion.comm.group import collective
from apportion.comm.network.network_group import NetworkGroup
from apportion.comm.objects import gather_messages
from apportion.comm.world import World
from apportion.core.workload import Workload
from apportion.errors import ApportionError
from apportion.runtime.launched.outcome import failed, result, value_of
from apportion.runtime.launched.running_ranks import RunningRanks
from apportion.runtime.launched.step_follower import Cut, StepFollower
from apportion.runtime.worker.agreement import RunAgreement
from apportion.runtime.worker.job import Job

Made = TypeVar("Made")
Drive = Callable[[RunningRanks], Any]
"""A function that drives the ranks, in rank 0 alone; it returns plain JSON."""


@collective
def connections(world: World) -> NetworkGroup | None:
    """Returns the connections over which ranks have met; None where they have met over torch.distributed: GPUs, or a
    group that the user's own script has made. Called by all ranks."""
    group = world.group()
    flat = getattr(group, "flat", None) or group
    return flat if isinstance(flat, NetworkGroup) else None


@collective
def ranks_by_host(world: World) -> list[int]:
    """Returns the number of ranks on each of their hosts, in the order of the hosts. Called by all ranks."""
    return list(Counter(world.hosts()).values())


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
    refusals = [answer for answer in gather_messages(refusal, world.group(), device=world.device) if answer]
    if refusals:
        wrong, text = refusals[0]
        raise ValueError(text) if wrong else ApportionError(text)
    return made[0]


@collective
def driven(jobs: Sequence[Job], world: World, drive: Drive, cut: Cut) -> Any:
    """Runs ``drive`` in rank 0, and returns what it returns, or raises what it raises, on every rank. Called by all
    ranks, each with its own jobs, which have the workload and the strategies of the steps; their world has
    ``connections``.

    ``cut``: has the strategy cut the network where rank 0 says.
    """
    flat = connections(world)
    assert flat is not None, "the caller has looked"
    links, hosts = flat.links(), len(ranks_by_host(world))
    if world.rank:
        return value_of(StepFollower(jobs, world, links[0], cut).follow())
    ours, theirs = socket.socketpair()
    names = ["rank 0", *(flat.describe(rank) for rank in range(1, world.size))]
    ranks = RunningRanks([ours, *links], names, here=world.local_size, hosts=hosts)
    raised: list[BaseException] = []
    driver = threading.Thread(target=_drive, args=(drive, ranks, raised), name="driver")
    driver.start()
    try:
        outcome = StepFollower(jobs, world, theirs, cut).follow()
    except BaseException as error:
        ranks.abort(failed(error))
        raise
    finally:
        driver.join()
    if raised:
        raise raised[0]
    return value_of(outcome)


def _drive(drive: Drive, ranks: RunningRanks, raised: list[BaseException]) -> None:
    try:
        outcome = result(drive(ranks))
    except BaseException as error:
        raised.append(error)
        outcome = failed(error)
    ranks.finish(outcome)
