"""The number of loss terms in some targets, derived from the loss where it is one of torch's that can be inspected.

The mean of a classification loss divides by the labels that are not ignored, each with the weight of its class, and not
by the rows. A share of the batch has the weight of its terms, so that a wrong number trains another network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from apportion.core import tree
from apportion.core.torch_private import hooked

Count = Callable[[Any], float]
Derived = Literal["derived"]

_NLL: Mapping[str, Any] = {"weight": None, "ignore_index": -100, "reduction": "mean"}
_CROSS_ENTROPY: Mapping[str, Any] = {**_NLL, "label_smoothing": 0.0}
_FUNCTIONS: Mapping[Any, Mapping[str, Any]] = {functional.cross_entropy: _CROSS_ENTROPY, functional.nll_loss: _NLL}
_MODULES: Mapping[type, Any] = {nn.CrossEntropyLoss: functional.cross_entropy, nn.NLLLoss: functional.nll_loss}


def examples(targets: Any) -> float:
    """Counts one loss term an example (the size of dimension 0)."""
    return float(tree.length(targets))


@dataclass(frozen=True, eq=False)
class LabelTerms:
    """Counts the labels that a classification loss of torch's divides its mean by: those that are not ignored, each
    with the weight of its class. Targets that are probabilities count one a row, or one a row and place."""

    ignore_index: int = -100
    weight: Tensor | None = None

    def __call__(self, targets: Tensor) -> float:
        if targets.is_floating_point():
            return float(targets.numel() // targets.shape[min(1, targets.dim() - 1)])
        kept = targets != self.ignore_index
        if self.weight is None:
            return float(kept.sum())
        # In float64: the weights of many rows are added up.
        return float(self.weight.detach().double()[targets.masked_fill(~kept, 0)].masked_fill(~kept, 0.0).sum())

    def __str__(self) -> str:
        labels = f"labels other than {self.ignore_index}"
        return labels if self.weight is None else f"class weights of the {labels}"

    def one_each(self, targets: Tensor) -> bool:
        """Tells whether every row of these targets has as many terms as every other, so that rows can be counted."""
        return self.weight is None and (targets.is_floating_point() or not bool((targets == self.ignore_index).any()))


@dataclass(frozen=True)
class Classification:
    """One of torch's classification losses, and its options by name."""

    function: Callable[..., Tensor]
    """``F.cross_entropy`` or ``F.nll_loss``."""
    options: Mapping[str, Any]


def classification_of(loss: Any) -> Classification | None:
    """Returns the function and the options of a loss that is ``F.cross_entropy``, ``F.nll_loss``, a partial of one of
    them, ``nn.CrossEntropyLoss`` or ``nn.NLLLoss``; None where it is something else, or where its options cannot be
    seen (a lambda)."""
    if isinstance(loss, functools.partial):
        inner = classification_of(loss.func)
        if inner is None or loss.args or not loss.keywords.keys() <= inner.options.keys():
            return None
        return Classification(inner.function, {**inner.options, **loss.keywords})
    if type(loss) in _MODULES and not hooked(loss, forward_only=True):
        function = _MODULES[type(loss)]
        return Classification(function, {name: getattr(loss, name) for name in _FUNCTIONS[function]})
    try:
        options = _FUNCTIONS.get(loss)
    except TypeError:  # it has no hash
        return None
    return None if options is None else Classification(loss, options)


def terms_of(count: Count, targets: Any) -> float:
    """Returns the number of loss terms that a workload's ``count`` gives for some targets. ValueError, by the name of
    the function, where that is not one finite number of at least 0: a share of a batch would have no weight."""
    given = count(targets)
    try:
        terms = float(given)
    except (TypeError, ValueError, RuntimeError):
        terms = math.nan
    if not 0.0 <= terms < math.inf:
        name = getattr(count, "__name__", type(count).__name__)
        raise ValueError(
            f"count={name} returned {given!r}, which must be one finite number of at least 0, the number of loss terms "
            "in the targets that it is given: count=lambda targets: float((targets != -100).sum())"
        )
    return terms


def derived_count(loss: Any) -> Count:
    """Returns what the mean of this loss divides by, where that can be seen; else one term an example."""
    found = classification_of(loss)
    if found is None or found.options["reduction"] != "mean":
        return examples
    return LabelTerms(found.options["ignore_index"], found.options["weight"])


def description_of(given: Any, count: Count | None) -> str:
    """Returns in words what a workload's loss terms are. ``given``: its ``count`` as it is written; ``count``: what a
    step takes for it."""
    if given is None:
        return "the loss couples the rows (count=None)"
    if given != "derived":
        return "as count= says"
    return f"derived from the loss: {count}" if isinstance(count, LabelTerms) else "one a row"
