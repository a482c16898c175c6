"""How a run's strategy is to be chosen, and what was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apportion.planner.drift import Expected
from apportion.trial import Candidate


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How the choice is to be made."""

    trial: bool = True
    """Try the best few? False: take what is predicted."""
    remeasure: bool = False
    """Measure again what is known from earlier runs?"""
    approximate: bool = False
    """May an approximate strategy be taken, where it learns more in the same time?"""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a run takes."""

    chosen: Candidate
    told: dict[str, Any] | None
    """The data of a ``plan`` event; None where there was nothing to decide."""
    expected: Expected | None
    """What its steps should take; None: nobody knows."""
