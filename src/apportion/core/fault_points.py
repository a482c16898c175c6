"""Named points of an update, at which a test plants a fault: a worker that dies there, or memory that is torn.

Where nothing is planted, a point is a look at one name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

FaultPoint = Literal["gradient", "arriving", "arrived", "slice", "written", "met", "committed", "bound"]
"""The points of an update of shared weights, in order: a product of a layer's factors has been taken; this rank is
about to say that its gradient is there, and has said it; its slice of the next version is computed; it is about to meet
the others, and has met them; the commit word is written; the parameters lie in a version."""

_planted: Callable[[FaultPoint], None] | None = None


def reached(point: FaultPoint) -> None:
    """Tell that this process has come to a point."""
    if _planted is not None:
        _planted(point)


def plant(fault: Callable[[FaultPoint], None] | None) -> None:
    """Let this function be called at every point from now on, in place of what was planted before; None: nothing."""
    global _planted
    _planted = fault
