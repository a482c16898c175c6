"""What is tried: a step and all that it is called with, and the place of each process that tries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from apportion.testing.division import Division

Step = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class StepTrial:
    """The arguments of ``assert_same_network`` that the ranks need, under the same names."""

    step: Step
    model: nn.Module | Callable[[], nn.Module]
    wrap: Callable[[nn.Module], Any] | None
    optimizer: Callable[[Any], Any] | None
    reference: Step | None
    rows: Any
    steps: int
    division: Division


@dataclass(frozen=True)
class RankPlace:
    """One process of a pass. ``folder``: where its pass leaves records and outputs. ``source``: the folder whose files
    count as the user's. ``weights``: the file of the weights that the network is set to; None leaves its own.
    ``alone``: that it is the reference, and not a rank. ``wait``: seconds for each collective."""

    rank: int
    ranks: int
    folder: str
    source: str
    backend: str
    wait: float
    alone: bool = False
    weights: str | None = None
