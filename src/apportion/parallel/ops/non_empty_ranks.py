"""The ranks over which the statistics of a batch are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apportion.comm.group import Group


@dataclass
class NonEmptyRanks:
    """The group of ranks over which statistics are taken, and whether this rank takes part with its rows."""

    group: Group
    present: bool = True
    """Tells whether this rank's rows are its own. A rank without any computes a borrowed one, which must not count."""

    def __deepcopy__(self, memo: Any) -> NonEmptyRanks:
        """Whoever copies a model gets no layers that ask the other ranks, not even where there are none just now."""
        raise TypeError("a group of ranks is not copied with a model: make another model")
