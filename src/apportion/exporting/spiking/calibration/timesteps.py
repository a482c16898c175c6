"""How many steps a spiking net is run for: as few as lose no more than is allowed on calibration examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apportion.exporting.spiking.graph import SpikingGraph

GRID = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The numbers of steps that are tried, from the least."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Chosen:
    """A graph for its number of steps, and what was found on the way to it."""

    graph: SpikingGraph
    accuracies: tuple[tuple[int, float], ...]
    """(number of steps, accuracy on the examples that chose)."""


def chosen(build: Callable[[int], SpikingGraph], judge: Callable[[SpikingGraph], float], *, at_least: float) -> Chosen:
    """The graph with the least number of steps of ``GRID`` whose accuracy is at least so much. Raises ValueError where
    none is."""
    tried: list[tuple[int, float]] = []
    for steps in GRID:
        graph = build(steps)
        tried.append((steps, judge(graph)))
        if tried[-1][1] >= at_least:
            return Chosen(graph=graph, accuracies=tuple(tried))
    steps, best = max(tried, key=lambda one: one[1])
    raise ValueError(
        f"no number of steps up to {GRID[-1]} is right in {at_least:.2%} of the calibration examples: the best is "
        f"{steps} with {best:.2%}; allow more to be lost (most_lost=), or train for few steps (fine_tune_examples=)"
    )
