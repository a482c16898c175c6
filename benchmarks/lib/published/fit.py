"""Constants of a machine from steps that were measured on it: the rates and latencies with which the prices come out.

Levenberg and Marquardt's damped least squares on the logarithms of times and of constants, so that no constant becomes
negative and a short step counts as much as a long one; a measurement that fits to nothing counts little (the "soft L1"
loss, see Triggs et al., "Bundle Adjustment: A Modern Synthesis", 2000, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Constants = Mapping[str, float]
Vector = NDArray[np.float64]

USUAL_ERROR = 0.1
"""The usual relative error. A measurement that is further off than this is more and more of an outlier."""
FIRST_GUESS_WEIGHT = 0.03
"""A constant e times its first guess costs as much as an error of 3 % in one measurement: it stays where it is if no
measurement depends on it."""
ROUNDS = 30
STEP = 1e-4


def fitted(
    first_guess: Constants, predict: Callable[[Constants], Sequence[float]], measured: Sequence[float]
) -> dict[str, float]:
    """The constants with which ``predict`` comes nearest to the measured seconds, begun at ``first_guess`` (all
    positive). ValueError where there is nothing to fit to."""
    if not len(measured) or min(first_guess.values(), default=0.0) <= 0 or min(measured) <= 0:
        raise ValueError("a fit needs measurements, and constants to begin with, all above 0")
    names = list(first_guess)
    goal = np.log(np.asarray(measured))
    begun = np.log(np.array([first_guess[name] for name in names]))

    def constants(x: Vector) -> dict[str, float]:
        return {name: float(value) for name, value in zip(names, np.exp(x), strict=True)}

    def errors(x: Vector) -> Vector:
        off = np.log(np.asarray(predict(constants(x)))) - goal
        return np.concatenate([off, FIRST_GUESS_WEIGHT * (x - begun)])

    return constants(_least(errors, begun))


def _least(errors: Callable[[Vector], Vector], x: Vector) -> Vector:
    """The point where the errors are least, searched from ``x`` on."""
    damping, now = 1e-3, errors(x)
    for _ in range(ROUNDS):
        slopes = np.stack([(errors(x + step) - now) / STEP for step in STEP * np.eye(len(x))], axis=1)
        weights = 1.0 / np.sqrt(1.0 + (now / USUAL_ERROR) ** 2)
        curvature = slopes.T @ (weights[:, None] * slopes)
        downhill = -slopes.T @ (weights * now)
        while damping < 1e6:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            then = errors(x + step)
            if _loss(then) < _loss(now):
                break
            damping *= 10
        else:
            return x
        done = _loss(now) - _loss(then) < 1e-3 * _loss(now)
        x, now, damping = x + step, then, damping / 10
        if done:
            return x
    return x


def _loss(errors: Vector) -> float:
    return float(np.sum(np.sqrt(1.0 + (errors / USUAL_ERROR) ** 2) - 1.0))
