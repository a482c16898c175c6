"""What environments are to an actor: K of them that are never over, and what a step of them gives."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from apportion.parallel.rollouts.observations import ObservationFormat

Array = NDArray[Any]


class Transition(NamedTuple):
    """What one step of K environments gave."""

    observations: Array
    """(K, ...): those to act on next."""
    rewards: Array
    ended: Array
    cut: Array
    last: Array | None
    """(K, ...): the last observations of the episodes that are over, and anything elsewhere; None where none is, or
    where ``observations`` has them."""
    resets: Array | None
    """(K,): True where the next step only resets; None where no step ever does."""


class Environments(Protocol):
    """K environments, of which none is ever over."""

    width: int
    name: str
    """What messages call them."""
    observed: ObservationFormat
    """How observations are arrays, and tensors for the network."""
    action_space: Any

    def reset(self, seed: int) -> Array:
        """Begin new episodes everywhere, whose draws depend on the seed alone; returns the observations (K, ...)."""

    def step(self, actions: Array) -> Transition:
        """Do one action in each environment."""

    def close(self) -> None:
        """Let go of them."""
