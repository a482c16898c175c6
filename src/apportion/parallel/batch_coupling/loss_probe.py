"""A loss by itself: is it the mean over its loss terms, whatever the outputs are?

A strategy that divides a batch gives the loss of each part the weight of its terms::

    n(A) L(A) + n(B) L(B) = (n(A) + n(B)) L(A and B)        n is the workload's count

and so the gradients of the rows of A and of B. Here this is tried on many rows, of which the outputs are made up: those
of the model in another order, a tenth and ten times as large, and normal numbers; the targets are the data's. Training
brings outputs that the first steps do not, such as rows that are beyond a margin.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apportion.core import tree
from apportion.core.loss_terms import Count, terms_of
from apportion.core.torch_private import pytree

ROWS, MOST_ROWS = 48, 512
"""The number of rows that are made up at least, and at most."""
MOST_ELEMENTS = 1 << 20
"""The number of elements of outputs that are made up at most, unless the least number of rows has more."""
BOUND = 1e-8
"""The difference, as a share of the loss or of its largest gradient, above which two sides are not equal; rounding that
is measured to be a thousandth of it raises it."""
COARSE = 1e-3
"""The share up to which rounding may raise the bound: another order of the rows that changes more is not rounding."""
ROUNDINGS = 1000.0
SAME = 1e-6
"""The share up to which two weights are one."""
_IGNORED = (-100, -1, 255, 0)
_MOST_VALUES = 32
"""The number of values of a label up to which each is tried as the one that is ignored."""


@dataclass(frozen=True)
class LossFinding:
    """What a loss shows by itself."""

    problem: str | None = None
    """What is wrong with it where a batch is divided, and the remedy; None: nothing was found."""
    left: str | None = None
    """Why it could not be tried; None where it was."""


@dataclass(frozen=True)
class _Value:
    """A loss and its gradient by each floating tensor of the outputs."""

    loss: float
    gradients: list[Tensor]
    wide: bool = True
    """False where the loss is computed in less than float64."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and all(bool(g.isfinite().all()) for g in self.gradients)


@dataclass(frozen=True)
class _Mismatch:
    """Two parts whose losses, weighted by their terms, are not the loss of both."""

    parts: tuple[list[int], list[int]]
    weights: tuple[float, float]
    """The shares of the terms, by ``count``."""
    shown: tuple[float, float] | None
    """The weights that the gradients of both have in that of the whole; None where these are not multiples."""
    losses: tuple[float, float, float]
    """The losses of the first part, of the second, and of both."""
    couples: bool = False
    """True where the order of the rows alone changes the loss."""

    def measured(self, rows: int) -> str:
        """What the losses of the parts and of the whole are. ``rows``: the number of all."""
        one, other, both = self.losses
        return (
            f"it gives {one:.6g} for rows 1 to {len(self.parts[0])} of {rows}, {other:.6g} for the others and "
            f"{both:.6g} for all, where the weights that count= gives these parts, {self.weights[0]:.4g} and "
            f"{self.weights[1]:.4g}, make {self.weights[0] * one + self.weights[1] * other:.6g}"
        )


def probe_loss(
    loss: Callable[[Any, Any], Tensor], count: Count, outputs: Any, targets: Any, *, rows: int = ROWS
) -> LossFinding:
    """Tries a loss on made-up outputs of ``rows`` rows. ``outputs``: what the model gives for some rows; ``targets``:
    those of at least two rows. Every tensor of both has the row as dimension 0."""
    try:
        probe = _Probe(loss, count, outputs, targets, rows)
    except ValueError as error:
        return LossFinding(left=str(error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return probe.finding()


class _Probe:
    def __init__(self, loss: Any, count: Count, outputs: Any, targets: Any, rows: int) -> None:
        self._loss, self._count = loss, count
        self._real, self._given = leaves_of(outputs, "outputs"), leaves_of(targets, "targets")
        self._outputs, self._targets = outputs, targets
        self._draws = torch.Generator().manual_seed(0)
        each = max(1, sum(t[0].numel() for t in self._real))
        self._rows = max(ROWS, min(rows, MOST_ROWS, MOST_ELEMENTS // each))
        self._fixed = self._sample(self._targets, self._given)

    def finding(self) -> LossFinding:
        tried, found = 0, list[_Mismatch]()
        for made in self._variants():
            whole, again = self._value(made, self._all), self._value(made, self._all)
            if whole is None or again is None:
                continue
            if whole.loss != again.loss:
                return LossFinding(left="it draws random numbers, or keeps a state that changes with its calls")
            tried += 1
            for parts in self._splits():
                mismatch = self._mismatch(made, whole, parts)
                if mismatch is not None:
                    found.append(mismatch)
        if not tried:
            return LossFinding(left="it does not take outputs and targets that are made up row by row")
        return LossFinding(problem=self._problem(found) if found else None)

    @property
    def _all(self) -> list[int]:
        return list(range(self._rows))

    def _sample(self, values: Any, leaves: Sequence[Tensor]) -> Any:
        """Returns as many rows as are tried, taken from those that are there: each of them as often as the others."""
        there = len(leaves[0])
        drawn = torch.randperm(self._rows, generator=self._draws) % there
        return tree.map_tensors(lambda t: t[drawn], values)

    def _variants(self) -> Iterator[Any]:
        """Yields outputs of all rows."""
        mixed = self._sample(self._outputs, self._real)

        def scaled(by: float) -> Any:
            return tree.map_tensors(lambda t: t * by if t.is_floating_point() else t, mixed)

        def normal(by: float) -> Any:
            def draw(t: Tensor) -> Tensor:
                if not t.is_floating_point():
                    return t
                return torch.randn(t.shape, generator=self._draws, dtype=torch.float64).to(t.dtype) * by

            return tree.map_tensors(draw, mixed)

        yield mixed
        for make, by in ((scaled, 0.1), (scaled, 10.0), (normal, 1.0), (normal, 10.0)):
            yield make(by)

    def _splits(self) -> Iterator[tuple[list[int], list[int]]]:
        for first in (self._rows // 2, self._rows // 3, 1):
            yield self._all[:first], self._all[first:]

    def _value(self, made: Any, rows: list[int]) -> _Value | None:
        """Returns the loss of some rows; None where it cannot be computed, or is not finite."""
        outputs = tree.map_tensors(lambda t: t[rows].detach().clone().requires_grad_(t.is_floating_point()), made)
        leaves = [t for t in tree.tensors(outputs) if t.requires_grad]
        targets = tree.map_tensors(lambda t: t[rows], self._fixed)
        try:
            with torch.enable_grad():
                given = tree.map_tensors(lambda t: t * 1 if t.requires_grad else t, outputs)  # it may work in place
                loss = self._loss(given, targets).reshape(())
                found = torch.autograd.grad(loss, leaves, allow_unused=True)
        except Exception:  # what it says of real outputs is its own affair
            return None
        gradients = [torch.zeros_like(t) if g is None else g.detach() for t, g in zip(leaves, found, strict=True)]
        value = _Value(float(loss.detach()), gradients, loss.dtype is torch.float64)
        return value if value.finite else None

    def _terms(self, rows: list[int]) -> float:
        return terms_of(self._count, tree.map_tensors(lambda t: t[rows], self._fixed))

    def _mismatch(self, made: Any, whole: _Value, parts: tuple[list[int], list[int]]) -> _Mismatch | None:
        terms = [self._terms(part) for part in parts]
        if not sum(terms):
            return None
        weights = terms[0] / sum(terms), terms[1] / sum(terms)
        # A part without terms takes no part; its loss may be a mean of nothing.
        apart = [
            self._value(made, part) if weight else _nothing(whole, part)
            for part, weight in zip(parts, weights, strict=True)
        ]
        if apart[0] is None or apart[1] is None:
            return None
        first, second = apart[0], apart[1]
        noise = self._noise(made, whole)
        expected = _Value(
            weights[0] * first.loss + weights[1] * second.loss,
            [
                torch.cat([weights[0] * a, weights[1] * b])
                for a, b in zip(first.gradients, second.gradients, strict=True)
            ],
        )
        if self._distance(expected, whole) <= max(BOUND, min(ROUNDINGS * noise, COARSE)):
            return None
        shown = _shown(whole, first, second, parts)
        if (
            shown is not None
            and noise <= COARSE
            and all(abs(a - b) < SAME for a, b in zip(shown, weights, strict=True))
        ):
            return None  # the weights are right: this is rounding
        losses = first.loss, second.loss, whole.loss
        return _Mismatch(parts, weights, shown, losses, couples=noise > COARSE)

    def _noise(self, made: Any, whole: _Value) -> float:
        """Returns what other orders of the same rows change: rounding, or a loss that depends on the order."""
        noise = 0.0 if whole.wide else COARSE / ROUNDINGS
        for step in (-1, 5, 7):
            order = [number * step % self._rows for number in self._all]
            if len({*order}) == self._rows and (other := self._value(made, order)) is not None:
                back = torch.tensor(order).argsort()
                turned = _Value(other.loss, [g[back] for g in other.gradients], other.wide)
                noise = max(noise, self._distance(turned, whole))
        return noise

    def _distance(self, found: _Value, expected: _Value) -> float:
        scale = max(abs(expected.loss), abs(found.loss), 1e-30)
        apart = [abs(found.loss - expected.loss) / scale]
        largest = max((float(g.abs().max()) for g in expected.gradients if g.numel()), default=0.0)
        if largest > 0.0:
            pairs = zip(found.gradients, expected.gradients, strict=True)
            apart += [float((a - b).abs().max()) / largest for a, b in pairs if a.numel()]
        return max(apart)

    # What it comes from

    def _problem(self, found: Sequence[_Mismatch]) -> str:
        first = found[0]
        measured = first.measured(self._rows)
        if any(mismatch.couples for mismatch in found) or not self._one_weight(found):
            return (
                f"the loss couples the rows of a batch: {measured}; give count=None, with which every worker computes "
                "it on the outputs of the whole batch"
            )
        shown = first.shown
        assert shown is not None
        if abs(shown[0] - 1.0) < SAME and abs(shown[1] - 1.0) < SAME:
            return (
                f"the loss is a sum over the rows where a mean is expected: {measured}; divide it by the number of its "
                'terms (reduction="mean")'
            )
        return _of_count(found, self._fixed, self._rows)

    def _one_weight(self, found: Sequence[_Mismatch]) -> bool:
        """Tells whether the loss of a part has a weight that does not depend on the outputs."""
        shown: dict[int, tuple[float, float]] = {}
        for mismatch in found:
            if mismatch.shown is None:
                return False
            one, other = shown.setdefault(len(mismatch.parts[0]), mismatch.shown)
            if abs(one - mismatch.shown[0]) > SAME or abs(other - mismatch.shown[1]) > SAME:
                return False
        return all(abs(a + b - 1.0) < SAME or abs(a + b - 2.0) < SAME for a, b in shown.values())


@dataclass(frozen=True)
class ModelValue:
    """The loss that a model computes of some rows, and its gradient by all parameters, as one vector."""

    loss: float
    gradient: Tensor
    wide: bool
    """False where the loss is computed in less than float64."""

    def distance(self, other: ModelValue) -> float:
        """Returns the largest difference of two gradients, as a share of the largest element."""
        scale = max(float(self.gradient.abs().max()), 1e-30)
        return float((self.gradient - other.gradient).abs().max()) / scale


def probe_model(
    value: Callable[[list[int]], ModelValue], count: Count, targets: Any, *, rows: int, weights: Iterable[object] = (1,)
) -> LossFinding:
    """Tries a loss that a model computes by itself, on ``rows`` real rows. ``value`` returns the loss of some rows;
    ``weights``: for each of these the loss is tried once more, so that they may change the weights of the model."""
    everything = list(range(rows))
    for _ in weights:
        whole = value(everything)
        if not (math.isfinite(whole.loss) and bool(whole.gradient.isfinite().all())):
            continue
        if value(everything).loss != whole.loss:
            return LossFinding(left="it draws random numbers, or keeps a state that changes with its calls")
        noise = max(whole.distance(value(everything[::-1])), 0.0 if whole.wide else COARSE / ROUNDINGS)
        if noise > COARSE:  # rounding grows with these weights, or the order of the rows is a part of what is learned
            continue
        found = list[_Mismatch]()
        for first in (rows // 2, rows // 3, 1):
            parts = everything[:first], everything[first:]
            problem = _parts_of_model(value, whole, count, targets, parts, min(max(SAME, ROUNDINGS * noise), COARSE))
            if isinstance(problem, str):
                return LossFinding(problem)
            found += [] if problem is None else [problem]
        if found:
            return LossFinding(_of_count(found, targets, rows))
    return LossFinding(left=f"it was tried through the model, on {rows} real rows")


def _parts_of_model(
    value: Callable[[list[int]], ModelValue],
    whole: ModelValue,
    count: Count,
    targets: Any,
    parts: tuple[list[int], list[int]],
    bound: float,
) -> _Mismatch | str | None:
    """Returns two parts that are weighed otherwise than by their terms, or what is wrong with them in words."""
    terms = [terms_of(count, tree.map_tensors(lambda t, p=part: t[p], targets)) for part in parts]  # type: ignore[misc]
    if not all(terms):
        return None
    one, other = value(parts[0]), value(parts[1])
    apart = one.gradient - other.gradient
    squares, scale = float(apart @ apart), float(whole.gradient.abs().max())
    if not squares or not scale or not math.isfinite(squares):
        return None
    weight = float(apart @ (whole.gradient - other.gradient)) / squares
    weights = terms[0] / sum(terms), terms[1] / sum(terms)
    mismatch = _Mismatch(parts, weights, (weight, 1.0 - weight), (one.loss, other.loss, whole.loss))
    if float((whole.gradient - other.gradient - weight * apart).abs().max()) <= bound * scale:
        within = max(SAME, bound * scale / float(apart.abs().max()))
        return mismatch if abs(weight - weights[0]) > within else None
    measured = mismatch.measured(len(parts[0]) + len(parts[1]))
    if float((whole.gradient - one.gradient - other.gradient).abs().max()) <= bound * scale:
        return f"the loss is a sum over the rows where a mean is expected: {measured}"
    return (
        f"the loss couples the rows of a batch: {measured}; where the model computes it, compute it outside of the "
        "model, as loss= of its outputs, with count=None, or use a strategy that gives every worker whole batches "
        "(tensor_parallel, layer_placement)"
    )


def _of_count(found: Sequence[_Mismatch], fixed: Any, rows: int) -> str:
    """Returns what is wrong with a count, by what the first mismatch shows, and the line to write."""
    first = found[0]
    assert first.shown is not None
    return (
        f"the mean of the loss does not divide by count=: {first.measured(rows)}; it weighs them by "
        f"{first.shown[0]:.4g} and {first.shown[1]:.4g}. Say what it divides by: {_line(fixed, found)}"
    )


def _line(fixed: Any, found: Sequence[_Mismatch]) -> str:
    """Returns the line to write: of the counts that such losses usually have the one that fits, or some of them."""
    for text, count in _usual(fixed):
        if all(_fits(fixed, count, mismatch) for mismatch in found):
            return f"count=lambda targets: {text}"
    return (
        "count=lambda targets: float((targets != -100).sum()) where such labels are ignored, "
        "count=lambda targets: float(weight[targets].sum()) where classes have weights, or count=None where the "
        "loss couples the rows"
    )


def _fits(fixed: Any, count: Callable[[Any], float], mismatch: _Mismatch) -> bool:
    try:
        one, other = (count(tree.map_tensors(lambda t, p=part: t[p], fixed)) for part in mismatch.parts)  # type: ignore[misc]
    except Exception:  # these targets have no such number
        return False
    assert mismatch.shown is not None
    return bool(one + other) and abs(one / (one + other) - mismatch.shown[0]) < SAME


def leaves_of(values: Any, what: str) -> list[Tensor]:
    """Returns the tensors of a tree whose dimension 0 is the row. Raises ValueError where they are not rows."""
    leaves = tree.tensors(values)
    others = [leaf for leaf in pytree.tree_leaves(values) if not isinstance(leaf, Tensor | None | int | float | str)]
    if not leaves or others or any(t.dim() == 0 or len(t) != len(leaves[0]) for t in leaves):
        raise ValueError(f"its {what} are not tensors of as many rows each")
    if len(leaves[0]) < 2:
        raise ValueError(f"there are not two rows of its {what}")
    return leaves


def _nothing(whole: _Value, rows: Sequence[int]) -> _Value:
    return _Value(0.0, [torch.zeros_like(g[: len(rows)]) for g in whole.gradients])


def _shown(
    whole: _Value, first: _Value, second: _Value, parts: tuple[list[int], list[int]]
) -> tuple[float, float] | None:
    """Returns the weights that the gradients of two parts have in the gradient of both, where it is a multiple."""
    found = []
    for own, rows in ((first, parts[0]), (second, parts[1])):
        mine = torch.cat([g.flatten().double() for g in own.gradients])
        within = torch.cat([g[rows].flatten().double() for g in whole.gradients])
        squares = float(mine @ mine)
        if not squares:
            if float(within.abs().max()):
                return None
            found.append(0.0)
            continue
        weight = float(mine @ within) / squares
        if float((within - weight * mine).abs().max()) > SAME * max(float(within.abs().max()), 1e-30):
            return None
        found.append(weight)
    return found[0], found[1]


def _usual(targets: Any) -> Iterator[tuple[str, Callable[[Any], float]]]:
    """Yields the counts that losses over these targets usually have: as they are written, and as functions."""
    for place, leaf in _places(targets):
        take = _taker(place)
        if leaf.is_floating_point() or leaf.dtype is torch.bool:
            yield f"float(targets{place}.sum())", lambda t, take=take: float(take(t).sum())  # type: ignore[misc]
            yield f"float((targets{place} != 0).sum())", lambda t, take=take: float((take(t) != 0).sum())  # type: ignore[misc]
            yield f"float((~targets{place}.isnan()).sum())", lambda t, take=take: float((~take(t).isnan()).sum())  # type: ignore[misc]
        else:
            values = leaf.unique().tolist()
            tried = dict.fromkeys([*_IGNORED, *(values if len(values) <= _MOST_VALUES else ())])
            for ignored, shift in itertools.product(tried, ("", "[:, 1:]")):
                where = f"targets{place}{shift}"

                def count_labels(t: Any, take: Any = take, ignored: int = ignored, shift: str = shift) -> float:
                    labels = take(t)
                    return float(((labels[:, 1:] if shift else labels) != ignored).sum())

                yield f"float(({where} != {ignored}).sum())", count_labels
            yield f"float(targets{place}.sum())", lambda t, take=take: float(take(t).sum())  # type: ignore[misc]
        yield f"float(targets{place}.numel())", lambda t, take=take: float(take(t).numel())  # type: ignore[misc]
        yield f"float(len(targets{place}))", lambda t, take=take: float(len(take(t)))  # type: ignore[misc]


def _places(targets: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of some targets, each with how it is written after ``targets``."""
    if isinstance(targets, Tensor):
        yield "", targets
    elif isinstance(targets, tuple | list):
        for number, value in enumerate(targets):
            yield from ((f"[{number}]{place}", leaf) for place, leaf in _places(value))
    elif isinstance(targets, dict):
        for name, value in targets.items():
            yield from ((f"[{name!r}]{place}", leaf) for place, leaf in _places(value))


def _taker(place: str) -> Callable[[Any], Tensor]:
    return lambda targets: dict(_places(targets))[place]
