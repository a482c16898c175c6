"""The evaluation, tried on its first batch before the training: a metric that raises does so now, not after an hour."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from apportion.comm.group import Group, collective
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.rng import fork_rng
from apportion.core.sampler import DataShard
from apportion.core.strategy import Step
from apportion.core.workload import Evaluation
from apportion.errors import ApportionError, MembershipChanged
from apportion.runtime.worker.evaluation import is_factory
from apportion.runtime.worker.metric_objects import MetricObjects

_MAY_NEED_MORE = (ValueError, ArithmeticError)
"""The exceptions that a metric over the whole set may raise where it has seen only a part, as one that needs every
class does."""


@collective
def try_evaluation(step: Step, evaluation: Evaluation, source: BatchSource, group: Group) -> None:
    """Computes every metric on the first batch, as an evaluation does. Raises ValueError, which names the metric and
    what it was given, where one cannot be computed. Called by all ranks of the group.

    It leaves no trace: buffers are put back, and so are the states of the generators."""
    buffers = [(b, b.detach().clone()) for b in step.model.buffers()]
    try:
        with fork_rng([step.device.index or 0] if step.device.type == "cuda" else ()):
            _try(step, evaluation, source, group)
            group.barrier()  # another rank may have the outputs
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _try(step: Step, evaluation: Evaluation, source: BatchSource, group: Group) -> None:
    metrics: Mapping[str, Any] = evaluation.metrics
    batch = source.at(0, DataShard() if step.whole else DataShard(group.rank, group.size))
    outputs = step.predict(batch)
    for name, metric in metrics.items():
        with _told(name, outputs, batch):
            if not is_factory(metric):
                if outputs is not None:
                    float(metric(outputs, batch.targets))
                continue
            objects = MetricObjects({name: metric}, step, source, group)
            if not step.whole:
                objects.feed(0, outputs, batch)
            elif outputs is not None:
                objects.update(outputs, batch.targets)
            if objects.shown:
                _compute(objects.made[name], whole=len(source) == 1)


def _compute(metric: Any, *, whole: bool) -> None:
    try:
        value = metric.compute()
    except _MAY_NEED_MORE:
        if whole:
            raise
        return
    float(value)


@contextmanager
def _told(name: str, outputs: Any, batch: Batch) -> Iterator[None]:
    """Raises what the metric raises as a ValueError that is a sentence."""
    try:
        yield
    except (ApportionError, MembershipChanged):
        raise
    except Exception as error:
        given = "" if outputs is None else f" of outputs {_shapes(outputs)} and targets {_shapes(batch.targets)}"
        raise ValueError(
            f"the metric {name!r} cannot be computed{given}: {type(error).__name__}: {error}, at {_where(error)}; "
            "it was tried on the first batch of the evaluation, before the training"
        ) from error


def _shapes(values: Any) -> str:
    told = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tree.tensors(values)]
    return " and ".join(told) or type(values).__name__


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"
