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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from apportion.comm.group import collective, gather_messages
from apportion.comm.world import World
from apportion.core.data.sent_rows import broadcast_rows
from apportion.core.parts import PartedDataset, deal_parts
from apportion.core.rng import seeded_rng
from apportion.core.strategy import Step, Strategy
from apportion.core.torch_private import pytree
from apportion.core.workload import Workload
from apportion.errors import WorkerFailed
from apportion.parallel.replica.initial_model import fresh_model
from apportion.runtime.proof.installed_packages import own_contents
from apportion.runtime.proof.proof_workload import few_rows, short_sequences
from apportion.runtime.proof.value_digest import Digester, UnhashableError
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.schedule_lookahead import FOLLOWED, rates_ahead

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


# A rank's description of what it was given to train: settings by their values, and the numbers that they lead to.
#
# Functions are described by what they compute, on a few rows, and not by their code: a function that writes a path, or
# that only rank 0 lets print, trains the same network. The digests of their code name what to look at where the
# numbers differ.


Description = Mapping[str, Any]
"""What a rank was given, as plain JSON: its ``host``, ``processor`` and ``code``, and its settings by kind and name."""
SETTINGS = (
    "seed", "batch_size", "parts", "steps", "epochs", "order", "precision", "clip_grad_norm", "compile",
    "per_rank_draws",
)  # fmt: skip
"""The fields of the workload that are described by their values."""
CODE = ("model", "loss", "update", "count", "collate", "augment", "carry", "schedule", "optimizer")
"""The fields of the workload that are functions."""
EXAMPLES = 16
"""The number of examples, spread evenly over the data, that are compared."""
ROWS = 4
"""The number of rows in the update that is made to compare numbers."""
MOST_TENSORS = 2000
"""The number of tensors up to which those of a model are compared one by one."""
MOST_PARAMETERS = 20_000_000
"""The number of parameters up to which an update is made: a larger network would take longer than the start may."""


def describe_run(job: Job, workload: Workload) -> dict[str, Any]:
    """Returns what this rank was given, except the data. It leaves the generators as they were."""
    of = Digester(portable=True)
    with seeded_rng(workload.seed):
        model = fresh_model(workload, torch.device("cpu"), workload.dtype)
    settings = {
        "apportion": own_contents(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "strategy": str(job.strategy),
        "policy": str(job.policy),
        "resume": job.resume,
        "check": job.prove,
        "plain paths": ",".join(job.plain),
        **{name: _plain(getattr(workload, name)) for name in SETTINGS},
        **_evaluation(workload),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **_layout(model, of),
        **_optimizers(workload, model),
    }
    return {
        "settings": settings,
        "numbers of the initial weights": {"sum of squares of the initial weights": _squares(_tensors(model))},
    }


def _layout(model: nn.Module, of: Digester) -> dict[str, str | None]:
    """Returns the tensors of a model in their order, by name and shape; of a model with more than MOST_TENSORS a digest
    of that."""
    kinds = [
        f"{name} {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}{'' if t.requires_grad else ' without gradient'}"
        for name, t in _tensors(model)
    ]
    if len(kinds) > MOST_TENSORS:
        return {"tensors of the model": str(len(kinds)), "digest of their names and shapes": _digest(of, kinds)}
    return {f"tensor {number} of the model": kind for number, kind in enumerate(kinds)}


def describe_data(job: Job, workload: Workload, step: Step, rows: Sequence[Any] | None = None) -> dict[str, Any]:
    """Returns the length of the data and a digest of some of its examples, the learning rates of the run, and what the
    first update makes of a few rows. It leaves the generators as they were.

    Where the data are in parts, the examples are those of the parts that this rank has, and None stands for the others;
    ``rows``: the examples that the first update is made of, the same on all ranks; None: it is not made.
    """
    dataset = step.source.dataset
    described: dict[str, Any] = {"examples": len(dataset), "updates": step.source.total}  # type: ignore[arg-type]
    same = replace(workload, evaluation=None, compile=False)
    if isinstance(dataset, PartedDataset):
        found = _of_parts(workload, dataset)
        described["examples of each part"] = ",".join(map(str, dataset.lengths))
        same = replace(same, parts=None, data=lambda: _Rows(rows or ()))
    else:
        found = _of_examples(workload, dataset, EXAMPLES, "")
        same = replace(same, data=lambda: dataset)  # opened once: it may be large
    described |= found[0]
    if workload.schedule is not None:
        for name, optimizer in step.optimizers.items():
            described[f"rates of optimizer {name}".rstrip()] = _rates(workload, optimizer, step.source.total)
    can_update = step.parameters <= MOST_PARAMETERS and not (workload.parts is not None and rows is None)
    update = _first_update(job, same) if can_update else None
    return {
        "settings": described,
        "numbers of the examples": found[1],
        "numbers after the first update": {"sum of squares after the first update": update},
    }


def _of_examples(
    workload: Workload, dataset: Dataset[Any], samples: int, where: str
) -> tuple[dict[str, Any], dict[str, float | None]]:
    """Returns what distinguishes ``samples`` examples, spread evenly over the data, from others: by their values, and
    by the numbers that may be rounded. ``where``: which part they are of, for their names."""
    of, count = Digester(portable=True), len(dataset)  # type: ignore[arg-type]
    described: dict[str, Any] = {}
    sizes: dict[str, float | None] = {}
    for place in _places(count, samples):
        with seeded_rng(place):
            whole, computed = _parts(dataset[place])
        described[f"digest of example {place}{where}"] = _digest(of, whole)
        sizes[f"sum of squares of example {place}{where}"] = _squares(enumerate(computed))
    described[f"loss terms of an example{where}"] = _count(workload, dataset[0])
    return described, sizes


def _of_parts(workload: Workload, dataset: PartedDataset) -> tuple[dict[str, Any], dict[str, float | None]]:
    """Returns the same of the parts that this rank has opened; None stands for the examples of the others."""
    samples = max(2, EXAMPLES // dataset.parts)
    described: dict[str, Any] = {}
    sizes: dict[str, float | None] = {}
    for part, length in enumerate(dataset.lengths):
        where = f" of part {part}"
        if part in dataset.opened:
            found = _of_examples(workload, dataset.open(part), samples, where)
        else:
            places = _places(length, samples)
            digests = {f"digest of example {place}{where}": None for place in places}
            found = (
                {**digests, f"loss terms of an example{where}": None},
                {f"sum of squares of example {place}{where}": None for place in places},
            )
        described |= found[0]
        sizes |= found[1]
    return described, sizes


@dataclass(frozen=True)
class _Rows(Dataset[Any]):
    """Examples that were sent to this rank, as a data set."""

    examples: Sequence[Any]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


def _places(count: int, samples: int) -> list[int]:
    return sorted({round(i * (count - 1) / (samples - 1)) for i in range(samples)})


def describe_code(workload: Workload) -> dict[str, str | None]:
    """Returns a digest of each function of the workload, by name; None where it has none."""
    of = Digester(portable=True)
    return {name: _digest(of, getattr(workload, name)) for name in CODE}


def _parts(example: Any) -> tuple[list[Any], list[Tensor]]:
    """Returns the parts of an example that are the same bits on every processor, and those that may be rounded."""
    leaves = [torch.from_numpy(x) if _is_floating_array(x) else x for x in pytree.tree_leaves(example)]
    rounded = [x for x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
    return [tuple(x.shape) if any(x is r for r in rounded) else x for x in leaves], rounded


def _is_floating_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float64)


def _first_update(job: Job, workload: Workload) -> float | None:
    """Returns the size of what one update on a few rows makes of the network and of its optimizers' slots, in one
    process; None where that fails, since the run will tell why."""
    few = few_rows(workload, ROWS, 1, 1)
    for small in (short_sequences(few), few):
        try:
            with seeded_rng(workload.seed):
                state = next(iter(job.strategy.reference(small, 1)))
        except Exception:  # such as data that are not sequences
            continue
        return _squares(state.tensors())
    return None


def _count(workload: Workload, example: Any) -> float | None:
    """Returns how many loss terms ``count`` finds in one example; None where it cannot be asked."""
    try:
        return None if workload.terms is None else float(workload.terms(workload.collate([example])[1]))
    except Exception:  # the run will tell why
        return None


def _evaluation(workload: Workload) -> dict[str, Any]:
    found = workload.evaluation
    if found is None:
        return {"evaluation": "none"}
    return {
        "evaluation": ", ".join(found.metrics),
        **{f"evaluation {name}": _plain(getattr(found, name)) for name in ("every", "best", "batch_size")},
    }


def _optimizers(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """Returns the classes of the optimizers and the settings of their groups, by name."""
    made = workload.make_optimizer(model.named_parameters())
    described: dict[str, Any] = {}
    for name, optimizer in (made if isinstance(made, Mapping) else {"": made}).items():
        of = f"optimizer {name}".rstrip()
        described[of] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            place = of if number == 0 else f"{of} group {number}"
            described.update(
                {f"{place} {k}": _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
            )
    return described


def _rates(workload: Workload, optimizer: Optimizer, total: int) -> str | None:
    assert workload.schedule is not None
    try:
        rates = rates_ahead(workload.schedule, optimizer, total, min(total, FOLLOWED))
    except Exception:  # what it raises is raised where it is made for the training
        return None
    return _digest(Digester(portable=True), [f"{rate:.9g}" for rate in rates])


def _digest(of: Digester, value: Any) -> str | None:
    """Returns a short digest of a value; None where it has none, so that it cannot be distinguished from another."""
    try:
        return of("", value).hex()[:8]
    except UnhashableError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, int | float | str | bool) else repr(value)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _squares(tensors: Iterable[tuple[Any, Tensor]]) -> float:
    """Returns the sum of the squares of all elements, each weighed by its place."""
    total = 0.0
    for number, (_, tensor) in enumerate(tensors, start=1):
        if not tensor.is_meta:
            flat = tensor.detach().abs().double().reshape(-1)
            places = torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)
            total += float((flat.square() * places).sum()) / number
    return total
