"""A rank's description of what it was given to train: settings by their values, and the numbers that they lead to.

Functions are described by what they compute, on a few rows, and not by their code: a function that writes a path, or
that only rank 0 lets print, trains the same network. The digests of their code name what to look at where the numbers
differ.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from apportion.core.parts import PartedDataset
from apportion.core.rng import seeded_rng
from apportion.core.strategy import Step
from apportion.core.torch_private import pytree
from apportion.core.workload import Workload
from apportion.parallel.replica.initial_model import fresh_model
from apportion.runtime.proof.installed_packages import own_contents
from apportion.runtime.proof.proof_workload import few_rows, short_sequences
from apportion.runtime.proof.value_digest import Digester, UnhashableError
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.schedule_lookahead import FOLLOWED, rates_ahead

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
