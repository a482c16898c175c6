"""The interface of what sums the gradients of all ranks and updates a replica with them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from apportion.comm.group import Group, collective, inherit_collectives
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.strategy import State


class GradientUpdate(ABC):
    """One way to make the update that is the same on every rank."""

    seconds: float = 0.0
    """The seconds spent in updates that the replica does not count itself."""

    def __init_subclass__(cls) -> None:
        inherit_collectives(cls)

    @property
    def kept(self) -> memoryview | None:
        """The memory in which the ranks of a host have weights, slots and buffers in common; None: each has its
        own."""
        return None

    def begin(self, batch: Batch) -> None:  # noqa: B027 (gradients that stay in p.grad need no place)
        """Prepare for the backward passes of these rows."""

    def begin_last(self) -> None:  # noqa: B027 (nothing leaves before the end)
        """Begin the last backward pass of the step, which makes the gradients whole."""

    @abstractmethod
    def __call__(self, loss: Tensor | None, weight: float) -> Tensor:
        """Make one update with everyone's gradients, and end the step; returns the sum over ranks of weight times
        loss."""

    def minimize(self, loss: Tensor, weight: float, optimizer: str) -> None:
        """Make one update of this optimizer's parameters along the gradient of weight times loss."""
        raise AssertionError(f"{type(self).__name__} makes one update a step")

    def commit(self) -> None:
        """End a step whose updates were made one by one."""
        raise AssertionError(f"{type(self).__name__} makes one update a step")

    @abstractmethod
    @collective
    def attach(self, world: World, group: Group) -> None:
        """Go on among these ranks from the last whole update. Called by all of them."""

    def loading(self) -> None:  # noqa: B027 (what is a rank's own may be written over)
        """Prepare for another state to be loaded into the replica."""

    @collective  # noqa: B027 (every rank has loaded it)
    def loaded(self) -> None:
        """Go on from the state that the replica has loaded. Called by all ranks."""

    @collective
    def add_kept(self, state: State) -> State:
        """Return the replica's state with what this update keeps from step to step. Called by all ranks."""
        return state

    def load_kept(self, state: State) -> None:  # noqa: B027 (nothing is kept)
        """Go on from what a state has of that."""

    def close(self) -> None:  # noqa: B027 (nothing is held)
        """Close the connections that are this update's own."""
