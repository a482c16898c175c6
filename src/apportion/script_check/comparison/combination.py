"""A gradient as a weighted sum of the gradients of single ranks or micro-batches."""

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
    unit = np.stack([columns[at] / norms[at] for at in present])
    values, vectors = np.linalg.eigh(unit @ unit.T)
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
