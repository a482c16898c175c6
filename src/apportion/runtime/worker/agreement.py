"""The agreement of ranks that others have started, on several hosts perhaps: they were given the same run.

Two hosts with different learning rates, data or strategies would train two networks, or wait for each other for ever.
So every rank describes what it was given, twice: before the strategy is built, and once its data are open. All ranks
have all descriptions then, and all of them raise the same error where one differs from rank 0's.
"""

from __future__ import annotations

import math
import platform
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from apportion.comm.group import collective
from apportion.comm.objects import gather_messages
from apportion.comm.world import World
from apportion.core.data.sent_rows import broadcast_rows
from apportion.core.parts import PartedDataset, deal_parts
from apportion.core.strategy import Step, Strategy
from apportion.core.workload import Workload
from apportion.errors import WorkerFailed
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.run_description import ROWS, Description, describe_code, describe_data, describe_run

NUMBERS = ("numbers of the initial weights", "numbers of the examples", "numbers after the first update")
"""The kinds of settings that hold numbers which were computed: with processors or threads that round differently they
are the same within TOLERANCE."""
TOLERANCE = 1e-4
"""A relative difference that rounding does not make."""
MOST = 3
"""The number of ranks, and of settings of a rank, that are named one by one."""


class RunAgreement:
    """What the ranks of a run that were started by others have to agree on before its first step."""

    def __init__(self, job: Job, world: World) -> None:
        self._job, self._world = job, world
        self._code: dict[str, str | None] = {}
        self.built: tuple[Workload, Step]
        """The workload as this rank has opened it, and the step that it has built."""
        self.rows_sent = 0
        """The number of rows of the first part that were sent to all ranks."""

    @collective
    def on_workload(self, workload: Workload) -> None:
        """Compares the settings of all ranks, before any strategy is built. Raises ValueError, on all of them, where
        they differ."""
        described = self._gather(lambda: self._describe_run(workload))
        refuse_differences(described)
        refuse_parts_apart(self._job.strategy, workload, self._world)
        if len(processors := sorted({rank["processor"] for rank in described})) > 1 and self._world.rank == 0:
            warnings.warn(
                f"the ranks compute with {' and '.join(processors)}, which round differently: a run on other hosts may "
                "differ from this one in the last bits",
                stacklevel=2,
            )

    @collective
    def on_data(self, workload: Workload, step: Step) -> None:
        """Compares the data of all ranks, and what the first update makes of some of them. Raises ValueError, on all
        of them, where they differ."""
        self.built = workload, step
        dataset, rows = step.source.dataset, None
        if isinstance(dataset, PartedDataset) and self._job.prove:  # else no row leaves its host
            rows = broadcast_rows(dataset, ROWS, self._world)
            self.rows_sent = len(rows or ())
        with step.source.looking():
            described = self._gather(lambda: describe_data(self._job, workload, step, rows))
        refuse_differences(described)
        if (said := unlike_code(described)) is not None and self._world.rank == 0:
            warnings.warn(said, stacklevel=2)

    def _describe_run(self, workload: Workload) -> Description:
        self._code = describe_code(workload)
        return describe_run(self._job, workload)

    @collective
    def _gather(self, describe: Callable[[], Description]) -> list[Description]:
        """Returns the descriptions of all ranks. Raises what ``describe`` raises here, and WorkerFailed where it does
        in another rank."""
        processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads={torch.get_num_threads()}"
        own: dict[str, Any] = {"host": socket.gethostname(), "processor": processor}
        raised: Exception | None = None
        try:
            own |= describe()
        except Exception as error:  # whatever it is, the others are waiting for this rank
            own["raised"], raised = f"{type(error).__name__}: {error}", error
        own["code"] = self._code
        # A rank that has failed takes part too: the others would wait for it in the collective for ever.
        described = gather_messages(own, self._world.group(), device=self._world.device)
        if raised is not None:
            raise raised
        for rank, of in enumerate(described):
            if "raised" in of:
                raise WorkerFailed(f"rank {rank} on host {of['host']}: {of['raised']}", rank=rank)
        return described


@runtime_checkable
class Introduced(Protocol):
    """A step whose ranks join and leave: each describes what it was given when it joins."""

    def introduce(self, given: Description, refuse: Callable[[Description, Description, int], str | None]) -> None:
        """Say what this rank was given; on rank 0 ``refuse`` says why another rank may not take part."""


def introduce(job: Job, workload: Workload, step: Step, world: World) -> None:
    """Has a step whose ranks come and go say what this rank was given, so that rank 0 refuses one that was given
    something else. Where a run goes on, and what rank 0 saves, does not concern other ranks. Raises ValueError where
    the data are in parts that several hosts have."""
    assert isinstance(step, Introduced), f"{job.strategy} lets ranks come and go"
    whole = world.unmet
    if workload.parts is not None and whole is not None and whole.local_size != whole.size:
        raise ValueError(
            f"{job.strategy} gives every rank rows of all of the {workload.parts} parts of the data set: leave parts "
            "out where every host can open all of the data, or use data_parallel or map_reduce"
        )
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads={torch.get_num_threads()}"
    own: dict[str, Any] = {"host": socket.gethostname(), "processor": processor, **describe_run(job, workload)}
    own["settings"] = {k: v for k, v in own["settings"].items() if k not in ("resume", "policy")}
    step.introduce({**own, **describe_data(job, workload, step), "code": describe_code(workload)}, _refused)


def _refused(own: Description, other: Description, rank: int) -> str | None:
    """Returns why a rank may not take part in rank 0's run; None where it may."""
    try:
        refuse_differences([own] * rank + [other])
    except ValueError as error:
        return str(error)
    return None


@collective
def refuse_parts_apart(strategy: Strategy, workload: Workload, world: World) -> None:
    """Raises ValueError where the data set is in parts that several hosts have, and the strategy gives every rank rows
    of all of them; or where there are fewer parts than hosts. Called by all ranks."""
    if workload.parts is None:
        return
    hosts = world.hosts()
    deal_parts(workload.parts, hosts)
    if not strategy.deals_parts and len({*hosts}) > 1:
        raise ValueError(
            f"{strategy} gives every rank rows of all of the {workload.parts} parts of the data set, and "
            f"{len({*hosts})} hosts have some each: use data_parallel or map_reduce, or leave parts out where every "
            "host can open all of the data"
        )


def refuse_differences(described: Sequence[Description]) -> None:
    """Raises ValueError where a rank was given another run than rank 0, or another part of the data than a rank that
    has the same. ``described``: what each rank described."""
    found = []
    for rank in range(1, len(described)):
        for other in (0, *_teller(described, rank)):
            kind, names = differences(described[other], described[rank])
            if not names:
                continue
            both = (described[rank][kind], described[other][kind])
            has, had = (", ".join(f"{name}={of.get(name, 'none')}" for name in names) for of in both)
            code = _code(described[other], described[rank]) if kind in NUMBERS else ""
            at = [f"rank {number} on host {described[number]['host']}" for number in (rank, other)]
            found.append(f"{at[0]} has {has} where {at[1]} has {had}{code}")
            break
    if not found:
        return
    if len(found) > MOST:
        found = [*found[:MOST], f"{len(found) - MOST} more ranks differ too"]
    raise ValueError(
        f"the ranks were not given the same run: {'; '.join(found)}. Start all of them with the same script, "
        "arguments, data and versions"
    )


def _teller(described: Sequence[Description], rank: int) -> Iterator[int]:
    """Yields the first rank before this one that could tell something which rank 0 could not, and this one can."""
    own = [
        (kind, name)
        for kind in ("settings", *NUMBERS)
        for name, value in described[rank].get(kind, {}).items()
        if value is not None and described[0].get(kind, {}).get(name, value) is None
    ]
    for other in range(1, rank if own else 0):
        if any(described[other].get(kind, {}).get(name) is not None for kind, name in own):
            yield other
            return


def differences(first: Description, other: Description) -> tuple[str, list[str]]:
    """Returns the first kind of settings in which two ranks differ, and the names of at most MOST of those that do.
    What a rank could not tell is None, and differs from nothing."""
    for kind in ("settings", *NUMBERS):
        mine, theirs = first.get(kind, {}), other.get(kind, {})
        tolerance = TOLERANCE if kind in NUMBERS and first["processor"] != other["processor"] else 0.0
        names = [name for name in mine if name in theirs and not _agree(mine[name], theirs[name], tolerance)]
        names = names or sorted(mine.keys() ^ theirs.keys())  # such as the settings of one more group
        if names:
            return kind, names[:MOST]
    return "settings", []


def _agree(one: Any, other: Any, tolerance: float) -> bool:
    if one is None or other is None or one == other:
        return True
    if isinstance(one, float) and isinstance(other, float):
        near = abs(one - other) <= tolerance * max(abs(one), abs(other))
        return bool(near or (math.isnan(one) and math.isnan(other)))
    return False


def unlike_code(described: Sequence[Description]) -> str | None:
    """Returns what is to be said where code differs between ranks and no update was made that would show whether that
    matters; None where nothing is."""
    numbers = [rank["numbers after the first update"] for rank in described]
    names = sorted({name for rank in described[1:] for name in _unlike(described[0], rank)})
    if not names or any(value is not None for of in numbers for value in of.values()):
        return None
    return (
        f"the code of {', '.join(names)} differs between the ranks, which may be no more than the path of a file, and "
        "no update was made before the run that would show it: give all ranks the same script"
    )


def _code(first: Description, other: Description) -> str:
    """Names the workload's functions that are not the same code, where the numbers that they compute differ."""
    names = _unlike(first, other)
    return f" (their code differs in {', '.join(names)})" if names else ""


def _unlike(first: Description, other: Description) -> list[str]:
    return [name for name, mine in first["code"].items() if not _agree(mine, other["code"][name], 0.0)]
