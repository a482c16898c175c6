"""The findings of a proof: how far two trainings differ in what they have changed, what rounding allows, the verdict.

A difference is held against the largest change since the start, not against the values: weights of 1e-3 that were to
move by 1e-6 and stood still differ by all that there was to learn, though only by a thousandth of themselves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

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

WEIGHTS = "weights"

Tensors = Mapping[str, Tensor]
Verdict = Literal["equal", "different", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The tensor that differs most, at the step where it does."""

    name: str
    """The name of the tensor: ``model/...``, ``optimizer/...`` or ``carry/...``."""
    step: int
    """The step at which it differs; the first is 1."""
    absolute: float
    relative: float
    """The difference as a share of the largest change since the start, of all weights, of all slots of its kind, or of
    this buffer; the bound is for this one."""
    factor: float | None = None
    """The factor between what the tensor has changed by and what it should have; None where the one is not a multiple
    of the other."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The proof in one precision."""

    precision: str
    steps: int
    tensors: int
    worst: Difference
    noise: float
    """The relative difference between two runs of the reference, one of them with every weight and gradient moved by a
    rounding; infinite where the reference comes to be NaN, or where nothing has moved."""
    bound: float
    disagreement: str | None
    """A rank whose state differs from rank 0's, and when."""
    verdict: Verdict
    """The verdict of the round. ``undecided``: above what may be called equal, within 100 times the noise; or too
    little has moved."""
    coarsest: str | None = None
    """A type that rounds more coarsely than the precision, in which the model computes in places; the round is held
    against its rounding where it could not be told within the precision's own."""

    @property
    def holds(self) -> bool:
        return self.verdict == "equal"

    @property
    def arithmetic(self) -> str:
        """The types that the round is computed in."""
        return self.precision if self.coarsest is None else f"{self.precision} with {self.coarsest} in places"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The findings of ``check``."""

    strategy: str
    workers: int
    exact: bool
    """True where the reference is the one-device step, False where it is the strategy's own (an approximate one)."""
    rounds: tuple[Round, ...]
    by_design: tuple[str, ...]
    """The things that differ by design, or could not be checked, in words."""
    hosts: int = 1
    """The number of hosts that the workers ran on."""
    gradients: Round | None = None
    """The round where every optimizer is plain SGD of rate 1, so that the change is the gradient: an optimizer that
    divides by its size (Adam) hides a factor. None: the state shows it already, or the strategy is approximate."""
    many: Round | None = None
    """One step in float64 on as many rows as the run has in a batch, or the most that fitted the time."""
    rows: int = 0
    """The largest number of rows that a rank had in a step; 0: it is not known."""
    cuts: tuple[str, ...] = ()
    """The parts that were left out for want of time, as clauses."""
    first: str | None = None
    """The first module whose output or gradient differs in the step that does, in words."""
    causes: tuple[str, ...] = ()
    """The likely origins of a difference, in whole sentences."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of all rounds: the first and the gradients have to show it; the run's own precision may leave it
        open."""
        shown = self.rounds if self.gradients is None else (*self.rounds, self.gradients)
        if any(r.verdict == "different" for r in (*shown, *filter(None, [self.many]))):
            return "different"
        first = self.rounds[0].holds and (self.gradients is None or self.gradients.holds)
        return "equal" if first else "undecided"

    @property
    def holds(self) -> bool:
        """True where it is shown to be the same network."""
        return self.verdict == "equal"

    @property
    def sentence(self) -> str:
        """The verdict as one sentence."""
        whose = "one device" if self.exact else "its own reference (it is approximate by design)"
        what = f"{self.strategy} on {self.workers} worker{'s' if self.workers != 1 else ''}"
        what += f" of {self.hosts} hosts" if self.hosts > 1 else ""
        if self.verdict == "equal":
            left = [r.arithmetic for r in self.rounds[1:] if not r.holds]
            own = f"; in {left[0]} rounding alone is too large to show it as well" if left else ""
            shown = f"in its first steps, shown in {self.rounds[0].precision}{own}"
            return f"{what} trains the same network as {whose} {shown}"
        if self.verdict == "undecided":
            why = "rounding hides the answer, or too little moves"
            return f"it is not shown that {what} trains the same network as {whose} in its first steps: {why}"
        first = "" if self.first is None else f"; {self.first}"
        likely = first + "".join(f"; likely, {cause}" for cause in self.causes)
        return f"{what} does not train the same network as {whose}: {self.evidence}{likely}"

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, from which ``from_json`` makes the same value."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Makes the value that ``to_json`` has described."""
        rounds = tuple(_round(found) for found in told["rounds"])
        gradients, many = (None if told[name] is None else _round(told[name]) for name in ("gradients", "many"))
        words = {name: tuple(told[name]) for name in ("by_design", "causes", "cuts")}
        return cls(**{**told, **words, "rounds": rounds, "gradients": gradients, "many": many})

    @property
    def evidence(self) -> str:
        """The evidence of a difference: what differs, where, and by how much."""
        shown = (*self.rounds, *filter(None, [self.gradients, self.many]))
        found = next((r for r in shown if r.verdict == "different"), self.rounds[0])
        if found.disagreement is not None:
            return found.disagreement
        worst = found.worst
        what = "the gradient of " if found is self.gradients else ""
        return (
            f"{what}{worst.name} differs after step {worst.step} by {worst.absolute:.2g}, which is "
            f"{worst.relative:.2g} of the largest change, in {found.precision}"
        )


def _round(told: Mapping[str, Any]) -> Round:
    return Round(**{**told, "worst": Difference(**told["worst"])})


Answer = Literal["equal", "different", "undecided", "not proved"]


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The knowledge that a run has of its strategy before it trains."""

    verdict: Answer
    sentence: str
    """The answer in words."""
    seconds: float
    """The seconds that finding out took."""
    remembered: bool = False
    """True where the answer is an earlier run's."""
    plain: tuple[str, ...] = ()
    """The fast paths that had to be switched off."""

    @property
    def proved(self) -> bool:
        return self.verdict == "equal"


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
        self._verdict: Verdict = "equal"
        self._moved = False
        self._tensors = 0
        self._lost = False

    def take(self, step: int, found: Tensors, expected: Tensors, nudged: Tensors) -> None:
        """Compares the states after a step: the strategy's, the reference's, and the reference's that rounding leads
        astray."""
        self._tensors = len(expected)
        self._lost = self._lost or any(bool(t.isnan().any()) for t in expected.values() if _numeric(t))
        changes = self._changes(expected)
        noise = self._noise(nudged, expected, changes)
        for difference in _differences(found, expected, changes, step):
            own = noise.get(self._group(difference.name), 0.0)
            bound = max(FLOOR, min(CAP, NOISE_FACTOR * own))
            verdict = verdict_of(difference.relative, own, bound) if difference.absolute else "equal"
            if _graver(verdict, difference, self._verdict, self._worst):
                factor = self._factor(found, expected, difference.name) if verdict == "different" else None
                self._worst, self._verdict = replace(difference, factor=factor), verdict
                self._worst_bound, self._worst_noise = bound, own
        # A strategy that stood still would differ by the whole change: was that more than rounding can hide?
        if NOISE_FACTOR * noise.get(WEIGHTS, float("inf")) <= 1.0:
            self._moved = True

    def _factor(self, found: Tensors, expected: Tensors, name: str) -> float | None:
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            return None
        before = self._start.get(name, torch.zeros_like(expected[name]))
        if before.shape != expected[name].shape:
            return None
        a, b = (_wide(t[name]) - _wide(before) for t in (found, expected))
        if not float((b * b).sum()):
            return None
        factor = float((a * b).sum() / (b * b).sum())
        return factor if float((a - factor * b).abs().max()) <= MULTIPLE * float(a.abs().max()) else None

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
            worst=worst,
            noise=noise,
            bound=self._worst_bound,
            disagreement=disagreement,
            verdict="different" if disagreement is not None else verdict,
        )

    def _changes(self, expected: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns how far the tensors of each one's kind have moved: all weights together, all slots of a kind
        together, each buffer and each carried tensor by itself, since nothing says that two of these are of one size. A
        buffer that rounding alone has moved, as the mean of what is 0 by itself (behind a normalisation and a linear
        layer), is held against those of other layers."""
        own: dict[str, float] = {}
        for name, tensor in expected.items():
            before = self._start.get(name)
            if before is None or before.shape != tensor.shape:
                before = torch.zeros_like(tensor)
            own[name] = _distance(tensor, before)
        together: dict[str, float] = {}
        for name, change in own.items():
            for kind in (self._kind(name), self._alike(name)):
                together[kind] = max(together.get(kind, 0.0), change)
        found = {name: together[self._kind(name)] for name in own}
        for name, change in found.items():
            others = together[self._alike(name)]
            if _numeric(expected[name]) and change < ROUNDINGS * torch.finfo(expected[name].dtype).eps * others:
                found[name] = others
        return found

    def _noise(
        self, nudged: Mapping[str, Tensor], expected: Mapping[str, Tensor], changes: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the largest share of the change that rounding alone has made, in each group; at least a rounding of
        the largest value, which a coarser arithmetic in between may have swallowed."""
        noise: dict[str, float] = {}
        for name, change in changes.items():
            group, tensor = self._group(name), expected[name]
            moved = _distance(nudged[name], tensor) if name in nudged else 0.0
            if _numeric(tensor):
                moved = max(moved, torch.finfo(tensor.dtype).eps * _size(tensor))
            # A buffer that did not move shows no noise; weights move together, or none of them does.
            share = max(self._eps, moved / change) if change else (float("inf") if group == WEIGHTS else 0.0)
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
    same = (left == right) | (left.isnan() & right.isnan())  # of which the difference is no number
    return float(torch.where(same, 0.0, (left - right).abs()).nan_to_num(nan=float("inf")).max())


def _size(tensor: Tensor) -> float:
    """Returns the largest absolute value of an element, of those that are finite."""
    return max((_piece_size(piece) for piece in _pieces(tensor)), default=0.0) if tensor.numel() else 0.0


def _piece_size(piece: Tensor) -> float:
    found = float(piece.abs().max())
    return found if math.isfinite(found) else float(piece.abs().nan_to_num(nan=0.0, posinf=0.0).max())
