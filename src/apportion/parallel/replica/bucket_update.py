"""The update of replicas that each have a copy of the weights: gradients are summed in buckets, and every rank makes
the whole update."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from apportion.comm.group import Group
from apportion.comm.network.host_exchange import HostsGroup, HostSum
from apportion.comm.world import World
from apportion.core.strategy import State
from apportion.parallel.compression.compression import Compression
from apportion.parallel.compression.kept_errors import KeptErrors
from apportion.parallel.replica.gradient_buckets import GradientSum
from apportion.parallel.replica.gradient_hooks import GradientHooks
from apportion.parallel.replica.gradient_update import GradientUpdate
from apportion.parallel.replica.replica import Replica
from apportion.parallel.replica.resync import agree


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
        self._sums[None].begin()

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
