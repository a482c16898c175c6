"""Evaluates a network over all ranks: means are weighted by examples; other metrics see every output."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from apportion.comm.group import Group, collective
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.sampler import DataShard
from apportion.core.workload import Evaluation
from apportion.runtime.worker.metric_objects import MetricObjects


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
    objects = MetricObjects({n: make for n, make in every.items() if is_factory(make)}, step, source, group)
    sums = torch.zeros(len(means) + 1, dtype=torch.float64)
    shard = DataShard() if step.whole else DataShard(group.rank, group.size)
    for number in range(len(source)):
        batch = source.at(number, shard)
        outputs = step.predict(batch)
        if outputs is not None:
            rows = batch.row_count if means else 0
            values = [float(metric(outputs, batch.targets)) * rows if rows else 0.0 for metric in means.values()]
            sums += torch.tensor([*values, float(rows)], dtype=torch.float64)
        if objects.made and not step.whole:
            objects.feed(number, outputs, batch)
        elif outputs is not None:
            objects.update(outputs, batch.targets)
        beat()
    step.looked()
    sums = torch.cat([sums, torch.tensor(objects.computed(), dtype=torch.float64)]).to(step.device)
    group.all_reduce(sums).wait()
    totals = sums.tolist()
    results = {name: total / (totals[len(means)] or math.nan) for name, total in zip(means, totals, strict=False)}
    results |= zip(objects.made, totals[len(means) + 1 :], strict=True)
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
