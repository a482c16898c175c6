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
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.python_state.python_state import PythonState
from apportion.core.replica_digest import Replicated
from apportion.core.sampler import DataShard
from apportion.core.strategy import Recoverable, State, Step
from apportion.core.workload import Workload
from apportion.errors import StateLost
from apportion.parallel.partition.committed_shards import CommittedShards
from apportion.parallel.partition.gradient_reduction import GradientReduction
from apportion.parallel.partition.part import MakePart
from apportion.parallel.partition.partitioner import Partitioner
from apportion.parallel.partition.resharding import Resharder
from apportion.parallel.partition.supported import refuse_workload
from apportion.parallel.tracing.uncompiled import as_written


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
        # Rank 0's draws everywhere: whoever loads a batch loads the same one.
        self.source = BatchSource(workload, device=world.device, dtype=dtype, rank=0)
        self.source.must_act(self)  # no rank has the whole network
        self.data_shard = DataShard()
        self.rows = slice(0, workload.batch_size)
        """The rows of a carried state that are here; fewer than the batch where this is one of several replicas."""
        self.joined: Callable[[Tensor | None], Tensor | None] = lambda loss: loss
        """Adds up the gradients, and the loss, with those of other replicas; it is called before the sums over this
        replica's ranks."""
        self._partitioner = Partitioner(workload, self.source, look)
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
        # Where the state is kept, nobody is two updates ahead of another.
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

    def backward(self, batch: Batch) -> Tensor | None:
        self.replica.reseed(batch.step)
        with as_written():
            self._loss = self._own.part.backward(self.replica, batch)
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

    def own(self, state: State) -> State:
        """Return this rank's part of a whole state."""
        named = replace(state, model={key: state.model[key] for key in self.model.state_dict()})
        return self._resharder.own(named)

    def load_state_dict(self, state: State) -> None:
        self.replica.load(self.own(state), self.rows)
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
            buffers=replica.forward.beside(),
        )
        return own, self._resharder.pieces

    def together(self, parts: Sequence[tuple[State, Any]]) -> State:
        """Return the whole state, put together from what all ranks held."""
        return self._resharder.together(parts)

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
        self.load_state_dict(self.together(self._committed.latest()))

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
