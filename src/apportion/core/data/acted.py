"""Data sets whose examples are made by the network that is trained on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from apportion.core.order import Index


class ActedDataset(ABC):
    """A data set of which example i is whatever the network makes of it next: it is not the same twice."""

    network: nn.Module | None = None
    """The network that acts, once there is one; None: examples are of the right shape, and made without it."""
    worker: int = 0
    """The number of the worker that acts, where each has examples of its own."""

    seed: int = 0
    """The seed of the workload, on which everything depends that is drawn."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of examples that are made at once."""

    @property
    @abstractmethod
    def frames(self) -> int:
        """The number of observations that an example has."""

    @abstractmethod
    def act(self, index: Index, step: int) -> tuple[Any, Any]:
        """The inputs and targets of these examples at a step, dimension 0 the example: made once, and the same where
        they are asked for again."""

    beat: Callable[[], None] = staticmethod(lambda: None)
    """Called now and then while examples are made that take long, by which others see that nothing hangs."""

    def record(self, folder: Path) -> Path | None:
        """Keep in a file of this folder what the network does, for people to look at; None where there is nothing to
        be seen."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release what examples are made with; examples that are made later open it again."""

    def news(self) -> list[str]:
        """What is to be reported of how examples were made, a sentence each, since this was last asked."""
        return []

    @abstractmethod
    def rollout_facts(self) -> Mapping[str, Any]:
        """What a ``rollouts`` event reports of the examples that were made since this was last asked."""
