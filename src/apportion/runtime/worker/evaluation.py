"""Evaluates a network over all ranks: means are weighted by examples; metric objects see every output.

The evaluation is tried on its first batch before the training: a metric that raises does so then, not after an hour.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor

from apportion.comm.group import Group, collective
from apportion.core import tree
from apportion.core.data.batch import Batch, joined_structure, rows_of
from apportion.core.data.sent_rows import decode, encode
from apportion.core.data.source import BatchSource
from apportion.core.rng import fork_rng
from apportion.core.sampler import DataShard
from apportion.core.strategy import Step
from apportion.core.workload import Evaluation
from apportion.errors import ApportionError, MembershipChanged


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
    # Means and figures share one all_reduce; ranks other than 0 add zeros to the figures.
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


TRIED_BATCHES = 3
"""The number of batches on which metrics are tried whole and in parts: sums of one batch may agree by chance."""


@final
class MetricObjects:
    """The metric objects of an evaluation. Every rank has one, and calls it in the same order as the others; rank 0
    alone shows its metrics each whole batch, whose rows the ranks have computed.

    ::

        the ranks' outputs have one shape      joined, and shown at once, as one process would
        they have shapes of their own          shown rank by rank, in row order, as smaller batches would be
        ... and that gives another figure      rank 0 computes the batch alone, from rows that it collates itself

    Nothing is padded. Whether a metric gives the same figure for parts of a batch is tried where shapes first differ,
    with instances of its own, on the first batches of the evaluation: whole, and in two parts.
    """

    def __init__(
        self, makes: Mapping[str, Callable[[], Any]], step: Predicting, source: BatchSource, group: Group
    ) -> None:
        self._makes, self._step, self._source, self._group = makes, step, source, group
        self.made = {name: make() for name, make in makes.items()}
        """The metrics by name."""
        self._divisible: Mapping[str, bool] | None = None
        """Which of the metrics give the same figure for a batch and for its parts; None: not tried yet."""
        self.shown = False
        """True once the metrics have been shown a batch on this rank."""

    @collective
    def feed(self, number: int, outputs: Any, batch: Batch) -> None:
        """Show the metrics a whole batch, of which this rank has computed these outputs (None: it has no rows). Called
        by all ranks."""
        pair = None if outputs is None else (outputs, batch.targets)
        if self._group.size == 1:
            self._show(self.made, pair)
            return
        mark = 0 if pair is None else _mark(pair)
        header = torch.tensor([int(pair is not None), mark], dtype=torch.int64, device=self._step.device)
        gathered = self._group.all_gather(header).tolist()
        # All ranks see all marks, so that each of them takes the same branch and the same collectives.
        marks = [mark for has_rows, mark in gathered if has_rows]
        if len(marks) == 1 and gathered[0][0]:
            self._show(self.made, pair)
        elif marks[0] and len(set(marks)) == 1:
            self._feed_joined(pair, [bool(has_rows) for has_rows, _ in gathered])
        else:
            self._feed_apart(number, pair)

    def update(self, outputs: Any, targets: Any) -> None:
        """Show the metrics a whole batch that this rank alone has."""
        self.shown = True
        for metric in self.made.values():
            metric.update(outputs, targets)

    def computed(self) -> list[float]:
        """The figures of the metrics on the rank that has seen the batches; zeros on others, so that a sum over the
        ranks gives them to every rank."""
        return [float(metric.compute()) if self.shown else 0.0 for metric in self.made.values()]

    def _show(self, metrics: Mapping[str, Any], pair: tuple[Any, Any] | None) -> None:
        if self._group.rank == 0 and pair is not None:
            self.shown = True
            for metric in metrics.values():
                metric.update(*pair)

    # Outputs of one shape

    def _feed_joined(self, pair: Any, has_rows: list[bool]) -> None:
        data = None if pair is None else encode([tree.tensors(pair)])
        parts = [decode(received)[0] for received in self._received(data, has_rows)]
        if self._group.rank == 0 and self.made:
            others = iter([*zip(*parts, strict=True)])
            joined = tree.map_tensors(lambda t: torch.cat([t, *(other.to(t.device) for other in next(others))]), pair)
            self._show(self.made, joined)

    def _received(self, data: bytearray | None, sends: list[bool]) -> Iterator[bytearray]:
        """What each of the other ranks that send has given, in rank order, on rank 0; the others send theirs."""
        group, device = self._group, self._step.device
        length = torch.tensor([0 if data is None else len(data)], dtype=torch.int64, device=device)
        lengths = group.all_gather(length).flatten().tolist()
        if group.rank:
            if data:
                group.send(torch.frombuffer(data, dtype=torch.uint8).to(device), 0).wait()
            return
        for rank in range(1, group.size):
            if sends[rank]:
                buffer = torch.empty(lengths[rank], dtype=torch.uint8, device=device)
                group.receive(buffer, rank).wait()
                yield bytearray(buffer.cpu().numpy().tobytes())

    # Outputs with shapes of their own

    @collective
    def _feed_apart(self, number: int, pair: Any) -> None:
        """Show a batch rank by rank, or have rank 0 compute it alone for the metrics that are no sums over rows."""
        if self._divisible is None:
            self._divisible = self._tried()
        try:
            data = None if pair is None else encode([pair])
        except ValueError:  # of classes that are not sent
            data = None
        unsent = torch.tensor([int(data is None and pair is not None)], device=self._step.device)
        sends = torch.tensor([int(data is not None)], device=self._step.device)
        gathered = self._group.all_gather(torch.cat([unsent, sends])).tolist()
        sent = not any(unsent for unsent, _ in gathered)
        apart = {name: m for name, m in self.made.items() if sent and self._divisible[name]}
        if apart:
            self._show(apart, pair)
            for received in self._received(data, [bool(sends) for _, sends in gathered]):
                own: Any = tree.cast(decode(received)[0], self._step.device, None)
                self._show(apart, own)
        if len(apart) < len(self.made):
            alone = {name: m for name, m in self.made.items() if name not in apart}
            self._show(alone, self._alone(number, slice(0, self._source.deal.size(number))))

    @collective
    def _alone(self, number: int, rows: slice) -> tuple[Any, Any] | None:
        """Outputs and targets of rows of a batch that rank 0 collates by itself; None on the other ranks, which take
        part without rows."""
        if self._source.deal.lanes:
            raise ValueError(
                "the ranks' outputs have shapes of their own, and a metric needs them whole, while rows with a carried "
                "state are computed once: have collate pad to one length"
            )
        batch = self._source.rows(number, rows if self._group.rank == 0 else slice(0, 0))
        outputs = self._step.predict(batch)
        return None if outputs is None else (outputs, batch.targets)

    @collective
    def _tried(self) -> dict[str, bool]:
        """Tells which metrics give the same figure for batches and for their halves, each collated by itself."""
        whole, halves = ({name: make() for name, make in self._makes.items()} for _ in range(2))
        same = dict.fromkeys(self._makes, True)
        for number in range(min(TRIED_BATCHES, len(self._source))):
            size = self._source.deal.size(number)
            given = self._alone(number, slice(0, size))
            parts = [self._alone(number, part) for part in (slice(0, size // 2), slice(size // 2, size))]
            if given is not None and not _as_outputs_of_parts(given[0], parts):
                same = dict.fromkeys(same, False)  # the network sees how far the rows are padded
            for name in [name for name, is_same in same.items() if is_same and given is not None]:
                same[name] = _agree(whole[name], halves[name], given, parts)
        flags = torch.tensor([int(same[name]) for name in self._makes], device=self._step.device)
        self._group.broadcast(flags)
        return dict(zip(self._makes, map(bool, flags.tolist()), strict=True))


def _agree(whole: Any, halves: Any, given: Any, parts: list[Any]) -> bool:
    """Tells whether a metric that is shown a batch and one that is shown its parts compute the same figure. One that
    cannot be computed yet has shown nothing, and is not taken to."""
    try:
        whole.update(*given)
        for part in parts:
            if part is not None:
                halves.update(*part)
        figures = float(whole.compute()), float(halves.compute())
    except Exception:
        return False
    return figures[0] == figures[1] or all(map(math.isnan, figures))


def _as_outputs_of_parts(whole: Any, parts: list[Any]) -> bool:
    """Tells whether the outputs for a batch are, but for rounding, those for its parts, as far as these reach: a tensor
    that is longer in the whole batch is compared where both have numbers. True where they cannot be compared."""
    at = 0
    for part in parts:
        found = [] if part is None else tree.tensors(part[0])
        entries = part is not None and isinstance(part[0], list)
        rows = len(part[0]) if entries else next((t.shape[0] for t in found if t.dim()), 0)
        try:
            given = tree.tensors(rows_of(whole, slice(at, at + rows)))
        except ValueError:
            return True
        at += rows
        if len(given) != len(found) or any(a.dim() != b.dim() for a, b in zip(given, found, strict=True)):
            return True
        for a, b in zip(given, found, strict=True):
            common = tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
            if not _is_close(a[common], b[common]):
                return False
    return True


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return True  # numbers of classes may change where two are equal but for rounding
    bound = 1e4 * torch.finfo(one.dtype).eps
    scale = max(float(one.abs().max()) if one.numel() else 0.0, 1e-30)
    return bool(torch.isclose(one, other, rtol=0.0, atol=bound * scale, equal_nan=True).all())


def _mark(pair: tuple[Any, Any]) -> int:
    """A number that ranks have in common whose outputs and targets can be joined row by row; 0 where they cannot."""
    structure = joined_structure({"outputs": pair[0], "targets": pair[1]})
    if structure is None:
        return 0
    return int.from_bytes(hashlib.sha256(structure.encode()).digest()[:7], "big") | 1


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
        with _named(name, outputs, batch):
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
def _named(name: str, outputs: Any, batch: Batch) -> Iterator[None]:
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
    shapes = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tree.tensors(values)]
    return " and ".join(shapes) or type(values).__name__


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"
