"""Evaluates a network over all ranks: means are weighted by examples; other metrics see every output."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from apportion.comm.group import Group, collective
from apportion.comm.objects import broadcast_message
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.sampling.sampler import DataShard
from apportion.core.torch_private import pytree
from apportion.core.workload import Evaluation


class Predicting(Protocol):
    """What a network is evaluated by: a ``Step``, of which these are a part."""

    @property
    def whole(self) -> bool:
        """Does one rank have the outputs of whole batches?"""

    @property
    def device(self) -> torch.device:
        """Where the sums are taken."""

    def predict(self, batch: Batch) -> Any | None:
        """Outputs for this rank's rows, in evaluation mode."""

    def looked(self) -> None:
        """Called once all have been predicted."""


@collective
def evaluate(
    step: Predicting, evaluation: Evaluation, source: BatchSource, group: Group, beat: Callable[[], None]
) -> Mapping[str, float]:
    """Returns every metric over the evaluation set, the same on every rank. Called by all ranks of the group; ``beat``
    is called after each batch."""
    means: dict[str, Any] = {name: metric for name, metric in evaluation.metrics.items() if not is_factory(metric)}
    every: Mapping[str, Any] = evaluation.metrics
    objects = {name: make() for name, make in every.items() if is_factory(make)}
    sums = torch.zeros(len(means) + 1, dtype=torch.float64)
    seen = False
    shard = DataShard() if step.whole else DataShard(group.rank, group.size)
    for number in range(len(source)):
        batch = source.at(number, shard)
        outputs = step.predict(batch)
        if outputs is not None:
            rows = batch.row_count if means else 0
            values = [float(metric(outputs, batch.targets)) * rows if rows else 0.0 for metric in means.values()]
            sums += torch.tensor([*values, float(rows)], dtype=torch.float64)
            seen = True
        if objects and not step.whole:
            feed(objects, outputs, batch, group, step.device)
        elif outputs is not None:
            _update(objects, outputs, batch.targets)
        beat()
    step.looked()
    computed = [float(metric.compute()) if seen or not step.whole else 0.0 for metric in objects.values()]
    sums = torch.cat([sums, torch.tensor(computed if step.whole else [], dtype=torch.float64)]).to(step.device)
    group.all_reduce(sums).wait()
    totals = sums.tolist()
    results = {name: total / (totals[len(means)] or math.nan) for name, total in zip(means, totals, strict=False)}
    results |= zip(objects, totals[len(means) + 1 :] if step.whole else computed, strict=True)
    return {name: results[name] for name in evaluation.metrics}


def is_factory(metric: Any) -> bool:
    """Tells whether a metric is a factory: a metric object's class (or any callable without parameters) is called
    without arguments; a mean takes two."""
    if isinstance(metric, type):
        return True
    try:
        return not inspect.signature(metric).parameters
    except (TypeError, ValueError):
        return False


def feed(objects: Mapping[str, Any], outputs: Any, batch: Batch, group: Group, device: torch.device) -> None:
    """Shows the whole batch, in row order, to each rank's objects, so that each of them computes the same value."""
    if group.size > 1:
        outputs, targets = _whole(outputs, batch, group, device)
    else:
        targets = batch.targets
    _update(objects, outputs, targets)


def _update(objects: Mapping[str, Any], outputs: Any, targets: Any) -> None:
    for metric in objects.values():
        metric.update(outputs, targets)


def _whole(outputs: Any, batch: Batch, group: Group, device: torch.device) -> tuple[Any, Any]:
    """Gathers all ranks' outputs and targets. A rank without rows knows the shape of neither: it learns them from the
    others."""
    have = group.all_gather(torch.tensor([0 if outputs is None else 1], device=device))
    pair = (outputs, batch.targets) if outputs is not None else None
    if int(have.sum()) == group.size:
        return _gather(pair, group)
    shapes = _templates(pair, int(have.argmax()), group, device)
    return _gather(pair if pair is not None else shapes, group)


def _gather(pair: Any, group: Group) -> tuple[Any, Any]:
    gathered: tuple[Any, Any] = tree.map_tensors(lambda t: torch.cat(group.all_gather_rows(t)), pair)
    return gathered


def _templates(pair: Any, source: int, group: Group, device: torch.device) -> Any:
    """Returns the tree of one rank's tensors with empty tensors in their places, on every rank."""
    if pair is not None:
        leaves, spec = pytree.tree_flatten(pair)
        described = {
            "spec": pytree.treespec_dumps(spec),
            "leaves": [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape[1:])] for leaf in leaves],
        }
    else:
        described = None
    told = broadcast_message(described, group, source=source, device=device)
    empties: list[Tensor] = [
        torch.zeros((0, *shape), dtype=getattr(torch, dtype), device=device) for dtype, shape in told["leaves"]
    ]
    return pytree.tree_unflatten(empties, pytree.treespec_loads(told["spec"]))
