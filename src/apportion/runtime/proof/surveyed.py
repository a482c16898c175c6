"""The findings of a survey of a workload: its rare rows, and what its loss shows by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Surveyed:
    """What a look at a workload has found."""

    rare: tuple[int, ...] = ()
    """The rows that few others are like, the rarest first."""
    read: int = 0
    """The number of rows whose targets were read."""
    of: int = 0
    """The number of rows of the data; 0: they were not looked at."""
    terms: str = ""
    """What the loss terms are, in words."""
    problem: str | None = None
    """What is wrong with the loss, or with a batch, where a batch is divided."""
    left: str | None = None
    """Why the loss could not be tried by itself."""

    @property
    def scope(self) -> str:
        """What of the rows and of the loss the look has covered, as the end of a sentence."""
        said = []
        if self.of and self.read == self.of:
            said.append(f"rare rows were looked for among the targets of all {self.of:,}")
        elif self.of:
            share = 100 * self.read / self.of
            said.append(f"rare rows were looked for among the targets of {share:.2g} % of {self.of:,}")
        else:
            said.append("rare rows were not looked for")
        if self.terms.startswith("derived"):
            said.append(f"loss terms {self.terms}")
        if self.left is not None:
            said.append(f"the loss was not tried by itself: {self.left}")
        return "".join(f"; {text}" for text in said)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Makes the value from its fields as plain data."""
        return cls(**{**stored, "rare": tuple(stored["rare"])})
