"""Cross-entropy of logits that are cut by classes: the logits are never gathered.

::

    loss_i = Q_i log sum_c exp(z_ic) - sum_c q_ic z_ic        Q_i = sum_c q_ic

with q_ic the weight of class c in example i: 1 for its target, else 0; or what class weights, label smoothing or
targets that are probabilities make of that. Each rank sends three numbers an example (its largest logit, its sum of
exponentials, its part of the last sum), and then has the gradient of its own logits without another message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from apportion.comm.differentiable import gather_from
from apportion.comm.group import Group
from apportion.core.loss_terms import classification_of


@dataclass(frozen=True)
class CrossEntropy:
    """The options of a workload's ``F.cross_entropy``."""

    weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0


def cross_entropy_of(loss: Callable[[Any, Any], Tensor] | None) -> CrossEntropy | None:
    """The options of the loss, where it is ``F.cross_entropy``, a partial of it, or ``nn.CrossEntropyLoss``, with a
    mean; None: it is something else, or its options cannot be seen (a lambda)."""
    found = classification_of(loss)
    if found is None or found.function is not functional.cross_entropy:
        return None
    options = dict(found.options)
    return CrossEntropy(**options) if options.pop("reduction") == "mean" else None


@dataclass(frozen=True)
class _Terms:
    """The terms of a loss over the rows 0..N-1 that do not depend on the logits."""

    whole: Tensor
    """The sums Q of the rows (N); 0 for a row that is ignored."""
    total: Tensor
    """The number that the sum of the rows is divided by."""
    spread: Tensor | None = None
    """The value (own classes) that q has everywhere, but for a class number's own place."""
    place: Tensor | None = None
    """The place (N) of the target among the own classes; anywhere, where it is another rank's."""
    there: Tensor | None = None
    """The value (N) of q at that place; 0 where it is another rank's."""
    dense: Tensor | None = None
    """The values (N, own classes) of q, for targets that are probabilities."""


def sliced_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group, sizes: list[int], options: CrossEntropy
) -> Tensor:
    """The mean loss, the same on every rank.

    logits: (N, own classes, ...), the classes in slices of these ``sizes``; targets: (N, ...) class numbers, or
    (N, classes, ...) probabilities. In float32 or float64; another type is gathered.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        whole = gather_from(logits, group, 1, sizes)
        return functional.cross_entropy(
            whole, targets, options.weight, ignore_index=options.ignore_index, label_smoothing=options.label_smoothing
        )
    start, classes = sum(sizes[: group.rank]), sum(sizes)
    own = slice(start, start + sizes[group.rank])
    rows = logits.movedim(1, -1).flatten(0, -2)
    if targets.is_floating_point():
        terms = _of_probabilities(targets.movedim(1, -1).reshape(-1, classes), own, options)
    else:
        terms = _of_classes(targets.flatten(), own, classes, options, rows)
    loss: Tensor = _SlicedCrossEntropy.apply(rows, terms, group)
    return loss


def _of_classes(targets: Tensor, own: slice, classes: int, options: CrossEntropy, rows: Tensor) -> _Terms:
    smoothing, weight = options.label_smoothing, options.weight
    kept = targets != options.ignore_index
    targets = targets.masked_fill(~kept, 0)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        outside = targets[(targets < 0) | (targets >= classes)]
        raise IndexError(f"Target {int(outside[0])} is out of bounds.")  # torch's own words
    weights = (rows.new_ones(len(targets)) if weight is None else weight[targets]).masked_fill(~kept, 0.0)
    whole, spread = weights * (1 - smoothing), None
    if smoothing:
        total = float(classes) if weight is None else weight.sum()
        whole = whole + smoothing / classes * total * kept.to(rows.dtype)
        share = rows.new_ones(own.stop - own.start) if weight is None else weight[own]
        spread = share * (smoothing / classes)
    place = targets - own.start
    mine = (place >= 0) & (place < own.stop - own.start)
    there = (weights * (1 - smoothing)).masked_fill(~mine, 0.0)
    return _Terms(whole, weights.sum(), spread, place.masked_fill(~mine, 0), there)


def _of_probabilities(targets: Tensor, own: slice, options: CrossEntropy) -> _Terms:
    q = targets * (1 - options.label_smoothing) + options.label_smoothing / targets.shape[1]
    if options.weight is not None:
        q = q * options.weight
    return _Terms(q.sum(1), q.new_tensor(float(len(q))), dense=q[:, own])


class _SlicedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, terms: _Terms, group: Group) -> Tensor:
        if rows.shape[1]:
            largest = rows.amax(1)
            base = largest.masked_fill(largest == float("-inf"), 0.0)
        else:  # fewer classes than ranks
            largest, base = rows.new_full((len(rows),), float("-inf")), rows.new_zeros(len(rows))
        powers = torch.sub(rows, base.unsqueeze(1)).exp_()
        gathered = group.all_gather(torch.stack((largest, powers.sum(1), _inner(rows, terms))))
        top = gathered[:, 0].amax(0)
        logs = top + ((gathered[:, 0] - top).exp() * gathered[:, 1]).sum(0).log()
        kept = terms.whole != 0
        each = (terms.whole * logs - gathered[:, 2].sum(0)).masked_fill(~kept, 0.0)
        ctx.save_for_backward(powers, (base - logs).exp() * terms.whole, kept)
        ctx.terms = terms
        return each.sum() / terms.total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        powers, weights, kept = ctx.saved_tensors
        terms: _Terms = ctx.terms
        scale = (gradient / terms.total).expand(len(kept)).masked_fill(~kept, 0.0)  # nothing but ignored rows: 1 / 0
        d = powers * (weights * scale).masked_fill(~kept, 0.0).unsqueeze(1)
        if terms.dense is not None:
            d.addcmul_(terms.dense, scale.unsqueeze(1), value=-1)
        if terms.spread is not None:
            d.addcmul_(scale.unsqueeze(1), terms.spread.unsqueeze(0), value=-1)
        if terms.place is not None and terms.there is not None and powers.shape[1]:
            d.scatter_add_(1, terms.place.unsqueeze(1), (terms.there * scale).neg_().unsqueeze(1))
        return d, None, None


def _inner(rows: Tensor, terms: _Terms) -> Tensor:
    """The part of sum_c q_c z_c that this rank's classes have."""
    if terms.dense is not None:
        return (terms.dense * rows).sum(1)
    sums = rows.new_zeros(len(rows))
    if terms.spread is not None:
        sums = rows @ terms.spread
    if terms.place is not None and terms.there is not None and rows.shape[1]:
        found = rows.gather(1, terms.place.unsqueeze(1)).squeeze(1)
        sums = sums + torch.where(terms.there != 0, found * terms.there, 0.0)
    return sums
