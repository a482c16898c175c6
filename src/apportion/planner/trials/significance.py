"""A test whether two candidates can be distinguished, by their rounds, which took turns: whatever else the machine did
slowed both."""

from __future__ import annotations

import math
from collections.abc import Sequence

SURE = 0.9
"""The confidence from which the first candidate counts as the faster one."""
ALIKE = 0.05
"""The share by which two candidates differ at most for it to make no difference which is taken, where they cannot be
distinguished."""


def faster_confidence(first: Sequence[float], second: Sequence[float]) -> float:
    """Return how confident one can be that the first takes less time than the second, from rounds that took turns (the
    nth of one beside the nth of the other): 1 minus the chance that a fair coin gives as many heads (the sign test).
    One round more or less of either does not count; without a round it is 0."""
    won = lost = 0
    for a, b in zip(first, second, strict=False):
        won += a < b
        lost += a > b
    rounds = won + lost
    if not won:
        return 0.0
    return 1.0 - sum(math.comb(rounds, heads) for heads in range(won, rounds + 1)) / float(2**rounds)


def alike(first: Sequence[float], second: Sequence[float], ratio: float) -> bool:
    """Report whether it makes no difference which is taken. ``ratio``: how many times as long the second takes."""
    return ratio < 1 + ALIKE and faster_confidence(first, second) < SURE
