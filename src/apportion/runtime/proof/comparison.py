"""The comparison of two trainings: how far they differ in what they have changed, and what rounding allows.

A difference is held against the change since the start, not against the values: weights of 1e-3 that were to move by
1e-6 and stood still differ by all that there was to learn, though only by a thousandth of themselves. It is the
tensor's own change where rounding makes less than a thousandth of that, and the largest of its kind elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from apportion.runtime.proof.proof import Difference, Round, Verdict

FLOOR = 1e-10
"""Differences below this share of the change are rounding in float64, whatever the noise measured."""
NOISE_FACTOR = 100.0
ROUNDINGS = 64.0
"""A buffer that has moved by at most this many roundings of what buffers of its kind have moved by was moved by
rounding."""
MULTIPLE = 1e-6
"""A change is a multiple of another where a share of at most this is left beside the factor."""
PIECE = 1 << 16
"""The number of elements of a tensor that are compared at once: half a megabyte."""
CAP = 1e-3
"""A difference above this share of the change is never called equal, however much rounding is amplified: a mistake
might hide in it."""

OWN_SHARE = 1e-3
"""A tensor is held against its own change where rounding makes less than this share of it."""
OWN_LEAST = 1e3
"""The own change of a tensor is at least this many roundings of the largest change of its kind: below that a sum in
another order may make all of it."""

EPS = torch.finfo(torch.float64).eps
WEIGHTS = "weights"

Tensors = Mapping[str, Tensor]


def verdict_of(difference: float, noise: float, bound: float) -> Verdict:
    """The verdict on one measure: ``difference``, ``noise`` and ``bound`` are shares of the change."""
    if noise == float("inf"):
        return "undecided"
    if difference <= bound:
        return "equal"
    return "different" if difference > NOISE_FACTOR * noise else "undecided"


class Comparison:
    """Compares a strategy's states with its reference's, step by step, from what both began with."""

    def __init__(self, start: Mapping[str, Tensor], weights: Collection[str], *, eps: float = 0.0) -> None:
        """Starts from ``start``: the reference's tensors before the first step; a slot that is not there yet counts as
        zeros. ``weights``: which of them are parameters; what else is the model's are buffers. ``eps``: the rounding of
        the arithmetic, which a moved weight may not show where it is coarser than weights are."""
        self._start, self._weights, self._eps = dict(start), frozenset(weights), eps
        self._worst: Difference | None = None
        self._worst_bound, self._worst_noise = FLOOR, 0.0
        self._widened: tuple[Difference, float] | None = None
        """The largest difference that is called equal by its rounding alone, and that."""
        self._verdict: Verdict = "equal"
        self._moved = False
        self._tensors = 0
        self._lost = False
        self._own: dict[str, float] = {}
        """The tensors that are held against their own change, with the share of it that rounding has made."""
        self._largest: dict[str, float] = {}
        """The largest change of each kind of tensor."""
        self._share = self._noisiest = 0.0

    def compare(self, step: int, found: Tensors, expected: Tensors, nudged: Tensors) -> None:
        """Compares the states after a step: the strategy's, the reference's, and the reference's that rounding leads
        astray."""
        self._tensors = len(expected)
        self._lost = self._lost or any(bool(t.isnan().any()) for t in expected.values() if _numeric(t))
        moved = self._moved_by(expected)
        changes, rounding = self._changes(expected, moved), self._rounding(nudged, expected)
        noise = self._noise(rounding, changes)
        self._note_own(moved, rounding)
        for difference in _differences(found, expected, changes, step):
            name = difference.name
            self._share = max(self._share, difference.relative)
            allowed = noise.get(self._group(name), 0.0)
            if self._is_own(name, moved, rounding):
                allowed = self._own[name]
                difference = replace(difference, own=True, relative=difference.absolute / moved[name])
            self._noisiest = max(self._noisiest, allowed)
            # The cap keeps an amplified rounding from widening the bound until a real mistake fits into it.
            bound = max(FLOOR, min(CAP, NOISE_FACTOR * allowed))
            verdict = verdict_of(difference.relative, allowed, bound) if difference.absolute else "equal"
            if verdict == "different" and self._may_come_and_go(name, found, expected):
                verdict = "undecided"
            widest = FLOOR if self._widened is None else self._widened[0].relative
            if verdict == "equal" and difference.relative > widest:
                self._widened = difference, allowed
            if _graver(verdict, difference, self._verdict, self._worst):
                self._worst, self._verdict = difference, verdict
                if verdict == "different":
                    self._worst = self._with_direction(difference, found, expected)
                self._worst_bound, self._worst_noise = bound, allowed
        # A strategy that stood still would differ by the whole change: was that more than rounding can hide?
        if NOISE_FACTOR * noise.get(WEIGHTS, float("inf")) <= 1.0:
            self._moved = True

    def _may_come_and_go(self, name: str, found: Tensors, expected: Tensors) -> bool:
        """Tells whether rounding may decide if this tensor is there: L-BFGS keeps as many slots as it has accepted
        steps, and accepts them by the sign of a small number. In float64 rounding cannot decide it."""
        return self._eps > EPS and name.startswith("optimizer/") and (name in found) != (name in expected)

    def _is_own(self, name: str, moved: Mapping[str, float], rounding: Mapping[str, float]) -> bool:
        """Tells whether a tensor is held against its own change."""
        change = moved.get(name, 0.0)
        together = max(self._largest.get(self._kind(name), 0.0), self._largest.get(self._alike(name), 0.0))
        # A tensor whose own change is of the size of rounding in its neighbours says nothing about the strategy.
        least = OWN_LEAST * max(self._eps, EPS) * together
        return change > least and rounding[name] < OWN_SHARE * change

    def _note_own(self, moved: Mapping[str, float], rounding: Mapping[str, float]) -> None:
        """Notes the share of its own change that rounding has made of each tensor, the largest of all steps: of a few
        elements a single step may show next to none."""
        for name, change in moved.items():
            if self._is_own(name, moved, rounding):
                self._own[name] = max(self._own.get(name, 0.0), self._eps, rounding[name] / change)

    def _with_direction(self, difference: Difference, found: Tensors, expected: Tensors) -> Difference:
        """Returns the difference with the length and the direction of the tensor's change beside what they should
        be."""
        name = difference.name
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            return difference
        before = self._start.get(name, torch.zeros_like(expected[name]))
        if before.shape != expected[name].shape:
            return difference
        a, b = ((_wide(t[name]) - _wide(before)).flatten() for t in (found, expected))
        lengths, product = (float(a.norm()), float(b.norm())), float(a @ b)
        if not lengths[1] or not math.isfinite(sum(lengths)):
            return difference
        factor = product / lengths[1] ** 2
        multiple = float((a - factor * b).abs().max()) <= MULTIPLE * float(a.abs().max())
        cosine = product / (lengths[0] * lengths[1]) if lengths[0] else 0.0
        ratio = lengths[0] / lengths[1]
        return replace(difference, factor=factor if multiple else None, ratio=ratio, cosine=cosine)

    @property
    def widened(self) -> bool:
        """True where something is called equal only because of what rounding was measured to make of it."""
        return self._widened is not None

    @property
    def noisy(self) -> bool:
        """True where two runs of the reference, of which one is moved by a rounding, differ by more than a rounding."""
        return self._noisiest > FLOOR / NOISE_FACTOR

    def not_widened(self, found: Round) -> Round:
        """Returns the round without what was called equal by its rounding alone, where one device is not the same when
        it is repeated: what was measured is not of rounding."""
        if self._widened is not None and found.verdict == "equal":
            worst, noise = self._widened
            return replace(found, worst=worst, noise=noise, bound=FLOOR, verdict="undecided")
        return replace(found, bound=FLOOR)

    def round(self, precision: str, steps: int, disagreement: str | None) -> Round:
        """Returns what all steps together show."""
        worst = self._worst or Difference(name="nothing", step=steps, absolute=0.0, relative=0.0)
        verdict, noise = self._verdict, self._worst_noise
        if self._lost:
            verdict, noise = "undecided", float("inf")
        elif verdict == "equal" and not self._moved:
            verdict, noise = "undecided", max(noise, 1.0 / NOISE_FACTOR)
        return Round(
            precision=precision,
            steps=steps,
            tensors=self._tensors,
            own=len(self._own),
            share=self._share,
            worst=worst,
            noise=noise,
            bound=self._worst_bound,
            disagreement=disagreement,
            verdict="different" if disagreement is not None else verdict,
        )

    def _moved_by(self, expected: Tensors) -> dict[str, float]:
        """Returns how far each tensor has moved since the start."""
        own: dict[str, float] = {}
        for name, tensor in expected.items():
            before = self._start.get(name)
            if before is None or before.shape != tensor.shape:
                before = torch.zeros_like(tensor)
            own[name] = _distance(tensor, before)
        return own

    def _changes(self, expected: Tensors, own: Mapping[str, float]) -> dict[str, float]:
        """Returns how far the tensors of each one's kind have moved: all weights together, all slots of a kind
        together, each buffer and each carried tensor by itself, since nothing says that two of these are of one size. A
        buffer that rounding alone has moved, as the mean of what is 0 by itself (behind a normalisation and a linear
        layer), is held against those of other layers."""
        together: dict[str, float] = {}
        for name, change in own.items():
            for kind in (self._kind(name), self._alike(name)):
                together[kind] = max(together.get(kind, 0.0), change)
        self._largest = together
        found = {name: together[self._kind(name)] for name in own}
        for name, change in found.items():
            others = together[self._alike(name)]
            if _numeric(expected[name]) and change < ROUNDINGS * torch.finfo(expected[name].dtype).eps * others:
                found[name] = others
        return found

    def _rounding(self, nudged: Tensors, expected: Tensors) -> dict[str, float]:
        """Returns how far rounding alone has moved each tensor: at least by a rounding of the largest value, which a
        coarser arithmetic in between may have swallowed."""
        found: dict[str, float] = {}
        for name, tensor in expected.items():
            moved = _distance(nudged[name], tensor) if name in nudged else 0.0
            # One rounding of the largest element is the least that any change of the order of a sum can make.
            found[name] = max(moved, torch.finfo(tensor.dtype).eps * _size(tensor)) if _numeric(tensor) else moved
        return found

    def _noise(self, rounding: Mapping[str, float], changes: Mapping[str, float]) -> dict[str, float]:
        """Returns the largest share of the change that rounding alone has made, in each group."""
        noise: dict[str, float] = {}
        for name, change in changes.items():
            group = self._group(name)
            # A buffer that did not move shows no noise; weights move together, or none of them does.
            # A noise of exactly zero would make the bound zero: rounding may have been swallowed by a coarser type.
            share = max(self._eps, rounding[name] / change) if change else (float("inf") if group == WEIGHTS else 0.0)
            noise[group] = max(noise.get(group, 0.0), share)
        return noise

    def _group(self, name: str) -> str:
        """Returns the group of tensors that share their noise."""
        part, _, rest = name.partition("/")
        if part == "model":
            return WEIGHTS if rest in self._weights else "buffers"
        return f"slots {name.rpartition('/')[2]}" if part == "optimizer" else part

    def _alike(self, name: str) -> str:
        """Returns the buffers of one name in all layers; for other tensors, the group that shares their scale."""
        return f"buffers {name.rpartition('.')[2]}" if self._group(name) == "buffers" else self._kind(name)

    def _kind(self, name: str) -> str:
        """Returns the group of tensors that share their scale."""
        group = self._group(name)
        return group if group == WEIGHTS or group.startswith("slots") else name


def _graver(verdict: Verdict, difference: Difference, before: Verdict, worst: Difference | None) -> bool:
    """Tells whether this difference takes the place of the worst so far. A difference at an earlier step is nearer to
    its cause, so a later one does not take its place."""
    order = ("equal", "undecided", "different")
    if worst is None or order.index(verdict) != order.index(before):
        return worst is None or order.index(verdict) > order.index(before)
    if verdict == "different" and difference.step != worst.step:
        return False
    return difference.relative > worst.relative


def largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], step: int) -> Difference:
    """Returns the tensor that differs most, relative to its largest value; a missing or foreign one differs without
    bound."""
    values = {name: max(1.0, _size(t)) for name, t in expected.items()}
    return max(
        _differences(found, expected, values, step),
        key=lambda d: d.relative,
        default=Difference(name="nothing", step=step, absolute=0, relative=0),
    )


def _differences(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scales: Mapping[str, float], step: int
) -> list[Difference]:
    infinite = float("inf")
    foreign = sorted(found.keys() ^ expected.keys())
    if foreign:
        return [Difference(name=name, step=step, absolute=infinite, relative=infinite) for name in foreign]
    differences = []
    for name in sorted(expected):
        absolute = _distance(found[name], expected[name])
        scale = scales[name]
        relative = absolute / scale if scale else (infinite if absolute else 0.0)
        differences.append(Difference(name=name, step=step, absolute=absolute, relative=relative))
    return differences


def _numeric(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensor as float64, in pieces that stay in a cache; complex elements as pairs."""
    flat = tensor.detach().reshape(-1)
    for piece in (torch.view_as_real(flat) if flat.is_complex() else flat).split(PIECE):
        yield piece.to(torch.float64)


def _wide(tensor: Tensor) -> Tensor:
    """Returns the tensor as float64; a complex one as pairs."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.to(torch.float64)


def _distance(a: Tensor, b: Tensor) -> float:
    """Returns the largest absolute difference of two elements; infinite where the shapes differ or one is NaN."""
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return float("inf")
    if not a.numel():
        return 0.0
    return max(_piece_distance(left, right) for left, right in zip(_pieces(a), _pieces(b), strict=True))


def _piece_distance(left: Tensor, right: Tensor) -> float:
    found = float((left - right).abs_().max())
    if math.isfinite(found):
        return found
    same = (left == right) | (left.isnan() & right.isnan())  # equal infinities, whose difference is NaN
    return float(torch.where(same, 0.0, (left - right).abs()).nan_to_num(nan=float("inf")).max())


def _size(tensor: Tensor) -> float:
    """Returns the largest absolute value of an element, of those that are finite."""
    return max((_piece_size(piece) for piece in _pieces(tensor)), default=0.0) if tensor.numel() else 0.0


def _piece_size(piece: Tensor) -> float:
    found = float(piece.abs().max())
    return found if math.isfinite(found) else float(piece.abs().nan_to_num(nan=0.0, posinf=0.0).max())
