"""The update of replicas that each have a copy of the weights: gradients are summed in buckets, and every rank makes
the whole update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

from torch import Tensor, nn

from apportion.comm.group import Group, collective, inherit_collectives
from apportion.comm.network.host_exchange import HostsGroup, HostSum
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.strategy import State
from apportion.parallel.compression.compression import Compression, KeptErrors
from apportion.parallel.replica.gradient_buckets import GradientHooks, GradientSum
from apportion.parallel.replica.replica import Replica
from apportion.parallel.replica.resync import agree


class GradientUpdate(ABC):
    """One way to make the update that is the same on every rank."""

    seconds: float = 0.0
    """The seconds spent in updates that the replica does not count itself."""

    def __init_subclass__(cls) -> None:
        inherit_collectives(cls)

    @property
    def shared_memory(self) -> memoryview | None:
        """The memory in which the ranks of a host have weights, slots and buffers in common; None: each has its
        own."""
        return None

    def begin_batch(self, batch: Batch) -> None:  # noqa: B027 (gradients that stay in p.grad need no place)
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


@final
class BucketUpdate(GradientUpdate):
    """The sums of a replica's gradients, and the update by its own optimizers. ``divides``: a rank's gradient is only a
    part of the batch's. ``compress``: what travels between hosts is compressed."""

    def __init__(self, replica: Replica, world: World, *, divides: bool, compress: Compression | None = None) -> None:
        self._replica, group = replica, world.group()
        self._kept = None
        if compress is not None and world.local_size < world.size:
            _refuse(compress, replica, group)
            self._kept = KeptErrors(compress, world.hosts(), group) if compress.keeps_errors else None
        self._trained = {p: replica.names[p] for p in replica.trainable() if divides}
        self._hooks = GradientHooks((name, p) for p, name in self._trained.items())
        several = replica.workload.update is not None
        self._whole = replica.state() if several and world.members is not None else None
        """The state to go back to with several updates in a step, should another rank be lost between them."""
        sparse: list[Any] = [
            m.weight for m in replica.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        ]
        scopes: list[str | None] = [*replica.optimizers] if several else [None]
        self._sums = {
            name: GradientSum(
                replica.trainable(name),
                group,
                sparse=sparse,
                early=name is None,
                optimizers=[*replica.optimizers.values()],
                compress=compress,
            )
            for name in scopes
        }
        """What is summed at once: all gradients, or with ``update=`` one optimizer's at a time."""

    def begin_last(self) -> None:
        self._sums[None].begin_backward()

    def __call__(self, loss: Tensor | None, weight: float) -> Tensor:
        total = self._sums[None](loss, weight)
        if self._hooks:
            self._hooks(self._trained)
        for name in self._replica.optimizers:
            self._replica.apply(name)
        self._replica.commit()
        return total

    def minimize(self, loss: Tensor, weight: float, optimizer: str) -> None:
        self._replica.gradient(loss, weight, optimizer)
        self._sums[optimizer](None, 0.0)
        if self._hooks:
            self._hooks({p: self._trained[p] for p in self._replica.trainable(optimizer)}, of_parameters=False)
        self._replica.apply(optimizer)

    def commit(self) -> None:
        self._replica.commit()
        if self._whole is not None:
            self._whole = self._replica.state()

    def attach(self, world: World, group: Group) -> None:
        for sums in self._sums.values():
            sums.rejoin(group)
        for p in self._replica.model.parameters():
            p.grad = None
        if self._replica.updating and self._whole is not None:
            self._replica.load(self._whole, slice(0, 0))
        agree(self._replica, world)

    def add_kept(self, state: State) -> State:
        return state if self._kept is None else self._kept.add_to(state, *self._between())

    def load_kept(self, state: State) -> None:
        if self._kept is not None:
            self._kept.load(state, *self._between())

    def _between(self) -> tuple[list[HostSum], list[int]]:
        """The compressed sums between hosts, and of how many numbers each of them is."""
        each = [found for sums in self._sums.values() for found in sums.between]
        return [between for between, _ in each], [numbers for _, numbers in each]

    def close(self) -> None:
        for sums in self._sums.values():
            sums.close()


def _refuse(compress: Compression, replica: Replica, group: Group) -> None:
    """Raises ValueError where what travels between these hosts cannot be compressed so."""
    if not isinstance(group, HostsGroup):
        raise ValueError(
            f"compress={compress} is for ranks on CPUs that meet over connections of apportion's own, and these have "
            f"{type(group).__name__}: leave compress out"
        )
    if compress.keeps_errors and replica.optimizers.scaler is not None:
        raise ValueError(
            f'compress={compress} keeps what it leaves out for the next step, and precision="float16" scales each '
            'step otherwise: use compress="fp16", or precision="bfloat16"'
        )
