"""Carry a trained net to other hardware."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from apportion.core import tree
from apportion.core.data.acted import ActedDataset
from apportion.core.named_arguments import named_arguments
from apportion.core.rng import mix
from apportion.core.value import parse
from apportion.core.workload import Workload
from apportion.exporting import exporter
from apportion.exporting.exporter import LIMIT, PACKAGE, Data
from apportion.exporting.target import Examples, Exported, Inputs, Target
from apportion.reporting.html.export_page import export_page
from apportion.runtime.checkpoint.load import load, workload_of
from apportion.runtime.worker.evaluation import is_factory

__all__ = ["Data", "Examples", "export", "export_run", "verified"]

EXAMPLES = 64
"""The number of examples of a run's data that its export is held against."""
CALIBRATION = 1024
"""The number of examples of a run's data by which a target makes its choices."""
HELD_OUT, LEAST_HELD_OUT, HELD_OUT_BYTES = 10_000, 250, 1 << 30
"""The largest number of examples of a run's evaluation on which network and file are compared."""


@named_arguments("export")
def export(  # noqa: PLR0913 (each is a separate thing that a user may say)
    model: nn.Module,
    sample: Inputs,
    path: str | os.PathLike[str],
    *,
    target: str | Target = "onnx",
    check: Sequence[Inputs] = (),
    data: Data | None = None,
    limit: float = LIMIT,
) -> Exported:
    """Write the model to the path, for the target, and compare what the file computes with what it must compute.

    ``sample``: inputs as the model takes them, with the examples in dimension 0: they give the shapes, and both compute
    them. ``check``: more such inputs that both compute. ``data``: the examples of the task, by which some targets make
    choices, and on which network and file are compared. ``limit``: the limit of the largest difference of any output,
    relative to the largest number in it, where the target has none of its own. The model is left as it was, in training
    mode if it was so. A report lies beside the file, as a page and as JSON: ``Exported.reports``. Raises ValueError
    where the model cannot be exported to the target, and NotVerified where the file computes something else, or is
    worse than the target allows; then no file is left.
    """
    return exporter.export(
        model, sample, path, target=target, check=check, data=data, limit=limit, report=_report
    )  # fmt: skip


def export_run(
    run: str | os.PathLike[str],
    *,
    target: str | Target = "onnx",
    path: str | os.PathLike[str] | None = None,
    trust: bool = False,
) -> Exported:
    """Exports the net of a run, or of one of its checkpoints, and holds it against itself on examples of its own data.

    Choices are made by examples that the net was trained on; its metrics, before and after, are taken on those of the
    run's evaluation. ``path``: None writes it into the run's folder, as ``model`` with the target's ending. ``trust``:
    the file that the run names may run whosever it is (see ``load``). Raises ValueError where ``run`` is a file.
    """
    chosen: Target = parse(target, PACKAGE) if isinstance(target, str) else target
    if Path(run).is_file():
        raise ValueError(_not_a_run(Path(run)))
    workload = workload_of(run, trust=trust)
    if workload.carry is not None:
        raise ValueError(
            "the net of this run takes a state besides its inputs (carry=), which is not part of the data: give a "
            "sample of both, apportion.export(apportion.load(run), (inputs, state), path)"
        )
    dataset = workload.open_data() if workload.parts is None else workload.open_part(0)
    to = Path(path) if path is not None else Path(run) / f"model{chosen.suffix}"
    if isinstance(dataset, ActedDataset):  # a deployed net is not called on rollouts
        data = Data()
        if workload.evaluation is not None:
            dataset = workload.evaluation.data()
            _check_observations(dataset[0][0])
    else:
        data = _data(workload, dataset)
    items = [dataset[n] for n in range(min(EXAMPLES, len(dataset)))]  # type: ignore[arg-type]
    inputs, _ = workload.collate(items)
    check = _of_each_size(workload.collate, items) if chosen.takes_any_size else []
    return export(load(run, trust=trust), inputs, to, target=chosen, check=check, data=data)


def _not_a_run(path: Path) -> str:
    if path.suffix == ".onnx":
        what = f"is an ONNX file already, which `apportion serve {path}` takes as it is"
    else:
        what = "is a file"
    return (
        f"{path} {what}: export takes the folder of a run, or one of its checkpoints, and from Python a module of "
        "torch, apportion.export(module, sample, path)"
    )


def _of_each_size(collate: Callable[[list[Any]], Any], items: Sequence[Any]) -> list[Inputs]:
    """Examples by themselves, not padded to the others: the smallest, the largest and one between, where they differ in
    shape."""
    found: dict[tuple[Any, ...], Inputs] = {}
    for item in items:
        inputs, _ = collate([item])
        found.setdefault(tuple(x.shape for x in tree.tensors(inputs)), inputs)
    if len(found) < 2:
        return []
    ordered = sorted(found.items(), key=lambda one: sum(shape.numel() for shape in one[0]))
    return [ordered[at][1] for at in sorted({0, len(ordered) // 2, len(ordered) - 1})]


def _check_observations(observation: object) -> None:
    """Raise ValueError for an observation that is a dict or a tuple, which is one argument of the net."""
    if isinstance(observation, tuple):
        raise ValueError(
            "the net of this run takes observations of several tensors as one argument, and the inputs of a file are "
            "tensors: write a module that takes each as an argument of its own and calls apportion.load(run) with the "
            "dict or tuple of them, and give it and a sample, apportion.export(module, sample, path)"
        )


def _report(made: Exported) -> dict[str, str]:
    """The page and the JSON about a file, by the endings that they add to its name."""
    about = made.to_json()
    del about["reports"]  # this is one of them
    return {".report.html": export_page(about), ".report.json": json.dumps(about, indent=2) + "\n"}


def verified(made: Exported) -> Iterator[str]:
    """How a file was verified, a sentence for each reader."""
    for one in made.verifications:
        by = f"by the rules of {one.reader}, simulated by {one.simulated_by}," if one.simulated_by else one.reader
        yield (
            f"{by} computes {one.examples} examples with outputs that differ by {one.difference:.1e} of their largest "
            f"number, of {one.limit:.0e} at most, from what the file is to compute, and by "
            f"{one.network_difference:.2g} from the network's own"
        )
        for name, before in one.before.items():
            yield f"{name} on {one.held_out} held-out examples: {before:.4f} of the net, {one.after[name]:.4f} of it"
    if made.conclusion:
        yield made.conclusion


def _data(workload: Workload, dataset: Any) -> Data:
    """What a compiler may look at, and what its file is judged by."""
    drawn = torch.Generator().manual_seed(mix(workload.seed, 0xCA11) & 0x7FFFFFFF)
    order = torch.randperm(len(dataset), generator=drawn).tolist()
    rows, others = order[:CALIBRATION], order[CALIBRATION:]
    apart = len(others) >= len(rows)  # or there are too few of them to train on
    evaluation = workload.evaluation
    held_out, metrics = None, None
    if evaluation is not None:
        judged: Any = evaluation.data()
        held_out = _examples(workload, judged, _spread(workload, judged))
        metrics = {name: metric for name, metric in evaluation.metrics.items() if not is_factory(metric)}
    return Data(
        calibration=_examples(workload, dataset, rows),
        training=Subset(dataset, others) if apart else dataset,
        collate=workload.collate,
        loss=workload.loss,
        held_out=held_out,
        metrics=metrics,  # type: ignore[arg-type]  # classes, which gather over an evaluation, are left out
    )


def _spread(workload: Workload, judged: Any) -> list[int]:
    """The rows that a file is judged by: all, or some that are spread over the data, which may be in an order."""
    inputs, _ = workload.collate([judged[0]])
    each = sum(x.nbytes for x in tree.tensors(inputs)) or 1
    count = min(len(judged), HELD_OUT, max(LEAST_HELD_OUT, HELD_OUT_BYTES // each))
    return [row * len(judged) // count for row in range(count)]


def _examples(workload: Workload, dataset: Any, rows: Sequence[int]) -> Examples:
    return Examples(*workload.collate([dataset[n] for n in rows]))
