"""A gradient as a weighted sum of the gradients of single ranks or micro-batches, and the weights that rows have by
their micro-batch.

The latter are found from the gradients of the same rows in two distributions. Where a loss is a sum over rows, what
micro-batch i adds to a gradient is the sum over its rows, divided by a number n_i such as a count of tokens. The rows
of a window add up to the same in any distribution, so that the n_i and the n'_j of another distribution are the only
numbers with sum n_i g_i = sum n'_j g'_j. A loss that compares rows has no such numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from apportion.script_check.comparison.tensors import Array

EXACT = 1e-8
"""What rounding may leave of a sum, relative to its norm."""
SINGULAR = 1e-12


@dataclass(frozen=True)
class Combination:
    """Tensors as a sum of parts. ``factors``: of each part; ``residual``: the norm of what the sum leaves over that of
    the tensors. ``determined``: that no other factors give the same sum. ``rounding``: what rounding may change of the
    tensors and parts, relative to their norm."""

    factors: tuple[float, ...]
    residual: float
    determined: bool
    rounding: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the parts make up the tensors, by factors that are known."""
        return self.determined and self.residual < max(EXACT, self.rounding)

    @property
    def alike(self) -> bool:
        """Whether all parts have the same factor."""
        return bool(np.allclose(self.factors, self.factors[0], rtol=max(1e-7, self.rounding), atol=0.0))

    @property
    def left_out(self) -> list[int]:
        """The parts that have no weight beside the others."""
        largest = max(map(abs, self.factors), default=0.0)
        return [at for at, factor in enumerate(self.factors) if abs(factor) < max(1e-7, self.rounding) * largest]


def combination(
    target: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], rounding: float = 0.0
) -> Combination:
    """Returns the factors of the parts whose sum is nearest to the target; a tensor that a part lacks is zero in it.
    ``rounding``: see ``Combination``."""
    names = [name for name in target if any(name in part for part in parts)]
    columns = [
        np.concatenate([_flat(part.get(name), target[name]) for name in names] or [np.zeros(0)]) for part in parts
    ]
    goal = np.concatenate([target[name].ravel() for name in names] or [np.zeros(0)]).astype(np.float64)
    norms = [float(np.linalg.norm(column)) for column in columns]
    present = [at for at, norm in enumerate(norms) if norm]
    total = float(np.linalg.norm(goal))
    if not present or not total:
        return Combination(tuple(0.0 for _ in parts), 1.0 if total else 0.0, False, rounding)
    # Columns of norm 1, so that parts of very different size do not look dependent. The matrix of their products has
    # one row for each part, however many weights there are; its condition is the square of that of the columns.
    unit = np.stack([columns[at] / norms[at] for at in present])
    values, vectors = np.linalg.eigh(unit @ unit.T)
    # Parts that are zero, or nearly dependent, have no factors of their own: other ones give the same sum.
    determined = len(present) == len(parts) and float(values[0]) > SINGULAR * float(values[-1])
    usable = values > SINGULAR * values[-1]
    inverse = vectors[:, usable] / values[usable] @ vectors[:, usable].T
    solved = inverse @ (unit @ goal)
    solved += inverse @ (unit @ (goal - solved @ unit))  # once more, for what the squared condition has lost
    residual = float(np.linalg.norm(goal - solved @ unit)) / total
    factors = [0.0 for _ in parts]
    for at, value in zip(present, solved, strict=True):
        factors[at] = float(value) / norms[at]
    return Combination(tuple(factors), residual, determined, rounding)


def _flat(part: Array | None, like: Array) -> Array:
    return np.zeros(like.size) if part is None or part.shape != like.shape else part.ravel().astype(np.float64)


def proportional(a: Array, b: Array, rounding: float = 0.0) -> float | None:
    """Returns the factor c with a = c b; None where a is not a multiple of b, or b is zero. ``rounding``: what it may
    change, relative to the norm."""
    if a.shape != b.shape:
        return None
    x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    norm = float(y @ y)
    if not norm:
        return None
    factor = float(x @ y) / norm
    most = max(EXACT, rounding) * float(np.linalg.norm(x)) + 1e-300
    return factor if float(np.linalg.norm(x - factor * y)) <= most else None


SAMPLE = 1 << 13
"""The elements from which the numbers are found; they are confirmed by all."""
SINGLE = 1e-7
"""How far the next smallest singular value, relative to the largest, lies from zero where there is one solution."""
ALIKE = 1e-6


@dataclass(frozen=True)
class Divisors:
    """The numbers by which each micro-batch's sum over rows is divided in both distributions, up to one factor."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def same_total(self) -> bool:
        """Whether they add up to the same, as counts of the same rows do."""
        return bool(np.isclose(sum(self.first), sum(self.second), rtol=ALIKE))

    def proportional_to(self, sizes: Sequence[int]) -> bool:
        """Whether all are the same multiple of the numbers of rows, as those of means over rows are."""
        ratios = [n / size for n, size in zip((*self.first, *self.second), (*sizes, *sizes), strict=True)]
        return bool(np.allclose(ratios, ratios[0], rtol=ALIKE))


def divisors(first: Sequence[Array], second: Sequence[Array]) -> Divisors | None:
    """Returns the numbers with which two lists of gradients add up to the same; None where they are not unique.
    ``first``, ``second``: what each micro-batch adds, as vectors of equal length."""
    columns = [*first, *(-each for each in second)]
    norms = [float(np.linalg.norm(each)) for each in columns]
    length = len(columns[0])
    if not all(norms) or not np.isfinite(norms).all() or length <= len(columns):
        return None
    # The vector that the matrix maps to zero has the numbers, up to a factor. Few rows determine it, and all of them
    # confirm it in the end.
    stride = max(1, length // SAMPLE)
    matrix = np.stack([each[::stride] / norm for each, norm in zip(columns, norms, strict=True)], axis=1)
    if len(matrix) <= len(columns):
        return None
    _, values, vectors = np.linalg.svd(matrix, full_matrices=False)
    # The smallest singular value must be zero but for rounding, and the next one must not, or there are several
    # solutions.
    if values[-1] > EXACT * values[0] or values[-2] < SINGLE * values[0]:
        return None
    found = vectors[-1] / np.asarray(norms)
    found = found if found[0] > 0 else -found
    # Counts are positive. Numbers of mixed signs come from gradients that happen to be dependent.
    if not (found > 0).all():
        return None
    found = found / found.mean()
    parts = Divisors(tuple(map(float, found[: len(first)])), tuple(map(float, found[len(first) :])))
    return parts if adds_up(first, parts.first, second, parts.second) else None


def adds_up(
    first: Sequence[Array], of_first: Sequence[float], second: Sequence[Array], of_second: Sequence[float]
) -> bool:
    """Whether two lists of vectors add up to the same with the given factors."""
    a = sum(factor * each for factor, each in zip(of_first, first, strict=True))
    b = sum(factor * each for factor, each in zip(of_second, second, strict=True))
    scale = sum(abs(factor) * float(np.linalg.norm(each)) for factor, each in zip(of_first, first, strict=True))
    return bool(np.linalg.norm(a - b) <= EXACT * scale)


def position_weights(first: Sequence[Array], second: Sequence[Array]) -> tuple[float, ...] | None:
    """Returns the weight of each position in a window relative to the last one, where the micro-batches of ``second``
    are those of ``first``, each one place earlier; None where they do not differ by weights alone, or do not differ."""
    count = len(first)
    found = [proportional(second[at], first[(at + 1) % count]) for at in range(count)]
    factors = [factor for factor in found if factor is not None and factor > 0]
    if len(factors) != count:
        return None
    weights = [1.0]
    for factor in reversed(factors[:-1]):
        weights.insert(0, weights[0] * factor)
    consistent = np.isclose(weights[-1] / weights[0], factors[-1], rtol=ALIKE)
    return tuple(weights) if consistent and not np.allclose(weights, 1.0, rtol=ALIKE) else None
