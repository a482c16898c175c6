"""What a file loses beside its network, example by example, and how sure that is.

Both have computed the same examples, so that the loss of each example is known, and with it the interval of their mean:

::

    loss of an example    accuracy: 1 where the network alone is right, -1 where the file alone is; else 0
                          otherwise: the file's value of the first metric - (1 + most_lost) * the network's
    mean - 1.645 * standard deviation / sqrt(examples)      the lower end of the one-sided 95 % interval

A file is refused where that end is above what is allowed: one answer of 150 that changed proves no loss of 0.3 points.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.core.torch_private import pytree
from apportion.core.workload import accuracy

MeanMetric = Callable[[Any, Any], Any]
CONFIDENCE = statistics.NormalDist().inv_cdf(0.95)
"""The number of standard errors from the mean to the end of a one-sided 95 % interval."""
BLOCKS = 10_000, 50, 10, 1
"""The largest numbers of blocks of examples that a metric is taken on: fewer where it has no value on small ones."""


@dataclass(frozen=True, kw_only=True)
class PairedLoss:
    """What a file loses of one metric, on the same examples."""

    metric: str
    relative: bool
    """True where the loss is a share of the network's own value; False: a difference of accuracies."""
    examples: int
    before: float
    after: float
    most_lost: float
    lost: float
    """What is lost: a difference of accuracies, or the share by which the value is worse."""
    excess: float
    """The lower end of the one-sided 95 % interval of what is lost beyond ``most_lost``, in the unit of the metric."""

    @property
    def proved(self) -> bool:
        """Is more lost than is allowed, beyond the uncertainty?"""
        return self.excess > 1e-12

    @property
    def sentence(self) -> str:
        """The values, the number of examples, what is allowed, and which value of ``most_lost`` would allow more."""
        if self.relative:
            values = (
                f"has {self.metric} {self.after:.6g} on the {self.examples:,} examples that were held out, and the "
                f"model {self.before:.6g}, which is {self.lost:.2%} worse: {self.most_lost:.2%} at most"
            )
            return f"{values} was allowed beyond its uncertainty{_allowing(self.lost)}"
        values = (
            f"is right in {self.after:.2%} of the {self.examples:,} examples that were held out, and the model in "
            f"{self.before:.2%} ({round(self.lost * self.examples):,} answers): {self.most_lost * 100:g} points less "
            "at most"
        )
        return f"{values} were allowed, beyond the uncertainty of {self.examples:,} examples{_allowing(self.lost)}"


def _allowing(lost: float) -> str:
    least = math.ceil(lost * 1000) / 1000
    return f"; most_lost={least:g} allows it" if least <= 1 else ""


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparedOutputs:
    """A batch of held-out examples, and what network and file have computed for it."""

    targets: Any
    before: Any
    """The outputs of the network."""
    after: Any
    """The outputs of the file."""
    examples: int

    def in_blocks(self, size: int) -> Iterator[ComparedOutputs]:
        """Return the same in blocks of at most ``size`` examples; as it is where an output has other rows than the
        examples."""
        trees = self.targets, self.before, self.after
        if size >= self.examples or any(_rows(x) != self.examples for tree in trees for x in pytree.tree_leaves(tree)):
            yield self
            return
        for at in range(0, self.examples, size):
            some = slice(at, min(at + size, self.examples))
            targets, before, after = (pytree.tree_map(operator.itemgetter(some), tree) for tree in trees)
            yield ComparedOutputs(targets=targets, before=before, after=after, examples=some.stop - at)


def _rows(x: Any) -> int | None:
    return len(x) if isinstance(x, torch.Tensor) and x.ndim else None


def paired_loss(
    metric: str, function: MeanMetric, computed: Sequence[ComparedOutputs], *, most_lost: float, classes: bool
) -> PairedLoss:
    """Return what the file's outputs lose beside the network's. ``function``: the metric, a mean over examples, of
    (outputs, targets). ``classes``: it is an accuracy, of which a difference may be lost; otherwise a share may be, of
    an error, or of a score where the targets themselves have a larger value than the network's outputs have."""
    total = sum(one.examples for one in computed)
    weights, before, after = _values(function, computed, total)
    means = [sum(w * v for w, v in zip(weights, one, strict=True)) / total for one in (before, after)]
    if classes:
        losses, allowed, lost = [a - b for a, b in zip(before, after, strict=True)], most_lost, means[0] - means[1]
    else:
        sign = -1.0 if _is_score(function, computed[0]) else 1.0
        losses = [sign * (b - a) - most_lost * abs(a) for a, b in zip(before, after, strict=True)]
        allowed, lost = 0.0, sign * (means[1] - means[0]) / max(abs(means[0]), 1e-300)
    excess = _lower_end(losses, weights) - allowed
    if not math.isfinite(means[1]):  # no number of the file; where the network has none either, nothing is lost
        excess = math.inf if math.isfinite(means[0]) else -math.inf
    return PairedLoss(
        metric=metric,
        relative=not classes,
        examples=total,
        before=means[0],
        after=means[1],
        most_lost=most_lost,
        lost=lost if math.isfinite(lost) else math.inf,
        excess=excess,
    )


def are_classes(outputs: Any, targets: Any) -> bool:
    """Return whether the targets are the classes that the one output has a number for each of."""
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
        return False
    leaves = pytree.tree_leaves(outputs)
    if len(leaves) != 1 or leaves[0].ndim < 2:
        return False
    return bool(leaves[0].shape[:1] + leaves[0].shape[2:] == targets.shape)


def held_metric(
    metrics: Mapping[str, MeanMetric] | None, outputs: Any, targets: Any
) -> tuple[str, MeanMetric, bool] | None:
    """Return (the name, the function, whether it is an accuracy) of the metric that a file is held to: "accuracy" where
    there is one, the accuracy of classes, or else the first metric. None: there is none."""
    if metrics is not None and "accuracy" in metrics:
        return "accuracy", metrics["accuracy"], True
    if are_classes(outputs, targets) and (metrics is None or metrics):
        return "accuracy", accuracy, True
    for name, function in (metrics or {}).items():
        return name, function, False
    return None


def _values(
    function: MeanMetric, computed: Sequence[ComparedOutputs], total: int
) -> tuple[list[int], list[float], list[float]]:
    """Return the number of examples of each block, and the metric of the network and of the file on it."""
    for most in BLOCKS:
        blocks = [block for one in computed for block in one.in_blocks(max(1, total // most))]
        before = [_value(function, block.before, block.targets) for block in blocks]
        after = [_value(function, block.after, block.targets) for block in blocks]
        if all(map(math.isfinite, (*before, *after))):
            break
    return [block.examples for block in blocks], before, after


def _value(function: MeanMetric, outputs: Any, targets: Any) -> float:
    try:
        return float(function(outputs, targets))
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError):  # of a metric that needs several examples
        return math.nan


def _is_score(function: MeanMetric, some: ComparedOutputs) -> bool:
    """Is a metric larger for better outputs? The best outputs are the targets themselves, where those can be such."""
    try:
        best = float(function(some.targets, some.targets))
    except Exception:  # whatever a metric raises for targets that cannot be outputs
        return False
    return math.isfinite(best) and best > float(function(some.before, some.targets))


def _lower_end(losses: Sequence[float], weights: Sequence[int]) -> float:
    """The lower end of the one-sided 95 % interval of the mean loss of an example. A single block has no spread
    to estimate it from: the result is then the mean itself, or minus infinity for a single example."""
    total, blocks = sum(weights), len(losses)
    mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / total
    if blocks == 1:
        return mean if total > 1 else -math.inf
    scaled = [w * x * blocks / total for w, x in zip(weights, losses, strict=True)]  # their mean is that of examples
    return mean - CONFIDENCE * statistics.stdev(scaled) / math.sqrt(blocks)
