"""A network of which every rank has a part: what the strategies that cut a model build on.

::

    plain model --part()--> this rank's part: a module that holds pieces of the plain tensors, under their plain names

    backward   the part runs the whole batch, with the other ranks' parts; gradients of its pieces are left in p.grad
    sums       partial gradients (a weight that several ranks use) are added up over those that hold it
    clip       by the norm of the whole gradient: each element is counted by one owner
    update     every rank updates its own pieces; the optimizer was made for the plain model, and its groups kept
    state      put together from the owners, tensor by tensor: the plain model's keys, whole tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.comm.group import Group, collective
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.python_state.python_state import PythonState
from apportion.core.replica_digest import Replicated
from apportion.core.sampler import DataShard
from apportion.core.strategy import Recoverable, State, Step
from apportion.core.workload import Workload
from apportion.errors import StateLost
from apportion.parallel.optim.replica_optimizers import ReplicaOptimizers
from apportion.parallel.partition.committed_shards import CommittedShards
from apportion.parallel.partition.part import MakePart
from apportion.parallel.partition.partitioner import PartitionedModel, Partitioner, refuse_workload
from apportion.parallel.partition.resharding import Resharder
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.replica.accumulation import accumulated, refuse_accumulation
from apportion.parallel.replica.gradient_buckets import GradientSum
from apportion.parallel.tracing.uncompiled import as_written


def _look(
    workload: Workload,
    look: Callable[[nn.Module, BatchSource], None] | None,
    model: nn.Module,
    source: BatchSource,
) -> None:
    """Refuses what the plain model ties together: for updates of several batches, and by what the strategy asks."""
    refuse_accumulation(model, workload, source)
    if look is not None:
        look(model, source)


@final
class GradientReduction:
    """The sums of partial gradients over those that hold them, the hooks, and the clipping by the norm of the whole
    gradient, of which each element is counted by one owner. ``waits``: no rank goes on before all have come here."""

    def __init__(self, workload: Workload, own: PartitionedModel, group: Group, *, waits: bool) -> None:
        self._workload, self._own, self._group, self._waits = workload, own, group, waits
        self._counted = own.layout.owned(group.rank)
        self._others: list[nn.Parameter] = []
        """The parameters whose gradients other ranks sum, and of which nothing is held here."""
        self._sums = self._make_sums()

    def _make_sums(self) -> dict[str | None, GradientSum]:
        """Make the sums of the partial gradients: one of all, or with ``update`` one of each optimizer's."""
        full, replica = self._own.full, self._own.replica
        own = {name: p for p, name in replica.names.items()}
        found: dict[str | None, GradientSum] = {}
        for scope in [None] if self._workload.update is None else list(replica.optimizers):
            terms, sparse = [], []
            for name, piece, ranks in self._own.layout.sums():
                if name in full.trained and scope in (None, full.trained[name]):
                    held = self._group.rank in ranks
                    # Who does not hold it adds nothing.
                    terms.append(own[name] if held else _nothing(piece, full.dtypes[name], replica.device))
                    self._others += [] if held else terms[-1:]
                    sparse += terms[-1:] if name in full.sparse else []
            if terms:
                optimizers = [*replica.optimizers.values()]
                found[scope] = GradientSum(terms, self._group, sparse=sparse, optimizers=optimizers)
        return found

    @torch.no_grad()
    def __call__(self, scope: str | None, loss: Tensor | None) -> Tensor | None:
        """Complete the gradients in ``p.grad`` of one optimizer's parameters or of all, clipped; returns the loss, on
        every rank. This is all that an update waits for."""
        replica, hooks, part = self._own.replica, self._own.hooks, self._own.part
        if scope in self._sums:
            self._sums[scope](None, 0.0)
            for p in self._others:
                p.grad = None
        if hooks:
            named = {p: replica.names[p] for p in replica.trainable(scope)}
            hooks(named, of_parameters=scope is None)
        largest = self._workload.clip_grad_norm
        if largest is None and part.alike:
            if self._waits:
                self._group.barrier()
            return loss
        gradients = [(p, p.grad) for p in replica.trainable(scope) if p.grad is not None]
        tail = torch.zeros(3, dtype=torch.float64, device=replica.device)
        if loss is not None:
            tail[0], tail[1] = loss, 1.0
        if largest is not None:
            counted = [g for p, g in gradients if replica.names[p] in self._counted]
            norms = [torch.linalg.vector_norm(g).double() for g in counted]
            tail[2] = torch.stack(norms).square().sum() if norms else 0.0
        self._group.all_reduce(tail).wait()
        if largest is not None:
            scale = (largest / (tail[2].sqrt() + 1e-6)).clamp(max=1.0)
            for _, gradient in gradients:
                gradient.mul_(scale.to(gradient.dtype))
        return (tail[0] / tail[1]).to(self._workload.dtype) if tail[1] else None


def _nothing(piece: TensorShard, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter of a piece's shape that takes no memory."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(piece.local_shape))


@final
class SplitStep(Step, Recoverable):
    """One update of a network that the ranks hold in parts.

    ``part``: given the plain model, seeded, and the inputs of a batch, returns this rank's part; it may take the
    model's own tensors, and change it. ``again(world)``: returns such a function for another world, where the loss of a
    worker is survived. ``look``: given the plain model and the batches before the model is taken apart, it may refuse
    them.
    """

    whole = True

    def __init__(
        self,
        workload: Workload,
        world: World,
        part: MakePart,
        *,
        again: Callable[[World], MakePart] | None = None,
        look: Callable[[nn.Module, BatchSource], None] | None = None,
    ) -> None:
        refuse_workload(workload)
        self._workload, self._again = workload, again
        dtype = torch.float64 if workload.precision == "float64" else None
        # Rank 0's draws everywhere: every rank that loads a batch loads the same one.
        self.source = BatchSource(workload, device=world.device, dtype=dtype, rank=0)
        self.source.must_act(self)  # no rank has the whole network
        self.data_shard = DataShard()
        self.rows = slice(0, workload.update_size)
        """The rows of a carried state that are here; fewer than the batch where this is one of several replicas."""
        self.joined: Callable[[Tensor | None], Tensor | None] = lambda loss: loss
        """Adds up the gradients, and the loss, with those of other replicas; it is called before the sums over this
        replica's ranks."""
        self._partitioner = Partitioner(workload, self.source, partial(_look, workload, look))
        self._build(world, part)

    @collective
    def _build(self, world: World, part: MakePart) -> None:
        """Build everything that depends on the other ranks, as it is before the first update. Called by all ranks."""
        self.rank, self.device = world.rank, world.device
        self._group, self._built = world.group(), world.generation
        self._own = own = self._partitioner.divide(world, part)
        self.replica = own.replica
        """The replica that this rank trains."""
        self.model, self.optimizers = self.replica.model, self.replica.optimizers
        self._resharder = Resharder(own.full, own.layout, own.pieces, world.rank, list(self.optimizers))
        survives = self._again is not None and world.members is not None
        survives = survives and world.outer is None  # who has divided a world keeps what all of its ranks have
        self._committed = CommittedShards(world) if survives else None
        # Where the state is kept, no rank is two updates ahead of another.
        if self._workload.accumulate > 1:
            self.replica.begin_batch(first=True)
        self._reduce = GradientReduction(self._workload, own, self._group, waits=survives)
        self._loss: Tensor | None = None

    @property
    def done(self) -> int:
        return self.replica.step

    @property
    def python(self) -> PythonState:
        return self.replica.python

    def predict(self, batch: Batch) -> Any | None:
        with as_written():
            outputs = self._own.part.predict(self.replica, batch)
        return outputs if self.rank == 0 or not self._own.part.alike else None

    def looked(self) -> None:
        self.replica.put_back()

    @property
    def schedules(self) -> ReplicaOptimizers:
        return self.replica.optimizers

    def backward(self, batch: Batch) -> Tensor | None:
        self.replica.reseed(batch.step)
        if self._workload.accumulate > 1:
            self.replica.begin_batch()
        with as_written():
            self._loss = accumulated(self.replica, batch, lambda part: self._own.part.backward(self.replica, part))
        return self._loss

    def update(self) -> Mapping[str, Tensor]:
        loss = self.finish()
        for name in self.optimizers:
            self.replica.apply(name)
        self._commit()
        return {"loss": loss}

    def finish(self) -> Tensor:
        """Complete the gradients, as ``update`` does first: whole gradients in ``p.grad``, clipped. Returns the
        loss."""
        loss, self._loss = self._loss, None
        loss = self._reduce(None, self.joined(loss))
        assert loss is not None, "update() follows backward()"
        return loss

    def _commit(self) -> None:
        self.replica.commit()
        self._keep()

    def minimize(self, loss: Tensor, batch: Batch, *, optimizer: str = "") -> Tensor:
        self.replica.gradient(loss, 1.0, optimizer)
        self._reduce(optimizer, loss.detach())
        self.replica.apply(optimizer)
        return loss.detach()

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        if self._workload.update is None:
            self.backward(batch)
            return self.update()
        self.replica.reseed(batch.step)
        with self.replica.autocast(), as_written():
            values = self._workload.update(self, batch)
        self._commit()
        return {name: value.detach() for name, value in values.items()}

    # State

    def state_dict(self) -> State:
        return self.gathered(self.replica.state())

    @collective
    def gathered(self, own: State) -> State:
        """Return the whole state, gathered from this rank's part and the others'. Called by all ranks."""
        state = self._resharder.gathered(own, self._group, self.device)
        for name, reason in state.settings["python"].get("lost", {}).items():
            self.python.lose(name, reason)
        return state

    def replicated(self) -> Iterable[Replicated]:
        own, _ = self.held_here()
        yield Replicated(self._group, self._resharder.replicated(own))

    def own_part(self, state: State) -> State:
        """Return this rank's part of a whole state."""
        named = replace(state, model={key: state.model[key] for key in self.model.state_dict()})
        return self._resharder.own_part(named)

    def load_state_dict(self, state: State) -> None:
        self.replica.load(self.own_part(state), self.rows)
        self._keep()

    def _keep(self) -> None:
        """Keep the state as it is now in memory that outlives this process."""
        if self._committed is not None:
            self._committed.write(*self.held_here())

    def held_here(self) -> tuple[State, Mapping[str, Any]]:
        """Return this rank's part of the state, without copies, and which pieces it consists of."""
        replica = self.replica
        model = {self._own.full.first[k]: t.detach() for k, t in self.model.state_dict().items()}
        python, tensors = replica.python.record()
        own = State(
            step=replica.step,
            model=model,
            optimizer=dict(replica.optimizers.slots()),
            python=tensors,
            settings={**replica.optimizers.settings(), "python": python},
            buffers=replica.forward.extra_buffers(),
        )
        return own, self._resharder.pieces

    def join_parts(self, parts: Sequence[tuple[State, Any]]) -> State:
        """Return the whole state, put together from what all ranks held."""
        return self._resharder.join_parts(parts)

    @property
    def sparse(self) -> list[nn.Parameter]:
        """The weights that this rank trains whose gradients are sparse."""
        return [p for p in self.replica.trainable() if self.replica.names[p] in self._own.full.sparse]

    @collective
    def move(self, world: World) -> None:
        """Move into another world, in the condition before the first update. Called by all ranks."""
        assert self._again is not None
        self._partitioner.close()
        self._build(world, self._again(world))

    def rejoin(self, world: World) -> None:
        assert self._again is not None, "the strategy says that it does not survive the loss of a worker"
        if self._workload.carry is not None:
            raise StateLost("the recurrent state of a rank's rows died with it")
        if self._built != world.generation:  # who has come anew has just built
            self.move(world)
        assert self._committed is not None
        self.load_state_dict(self.join_parts(self._committed.latest()))

    def fingerprint(self, workload: Workload) -> dict[str, Any]:
        return self._own.full.fingerprint(self.optimizers)

    @property
    def parameters(self) -> int:
        return self._own.full.parameters

    @property
    def cuts(self) -> tuple[str, ...] | None:
        return self._own.part.cuts

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": self._group.waited, "updating": self.replica.seconds}

    def close(self) -> None:
        self._partitioner.close()
