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
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.comm.group import collective
from apportion.comm.objects import gather_messages
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.replica_digest import Replicated
from apportion.core.rng import seed_everything
from apportion.core.sampler import DataShard
from apportion.core.strategy import Recoverable, State, Step
from apportion.core.workload import Workload
from apportion.errors import StateLost
from apportion.parallel.partition import equivalence
from apportion.parallel.partition.autograd_use import asked, refuse_gradients_of_gradients
from apportion.parallel.partition.committed_shards import CommittedShards, whole
from apportion.parallel.partition.full_model import FullModel
from apportion.parallel.partition.part import MakePart
from apportion.parallel.partition.resharding import Resharder
from apportion.parallel.partition.supported import refuse_optimizers, refuse_workload
from apportion.parallel.partition.tensor_shards import ShardLayout, TensorShard
from apportion.parallel.replica.gradient_buckets import GradientSum
from apportion.parallel.replica.gradient_hooks import GradientHooks
from apportion.parallel.replica.initial_model import fresh_model, refuse_tied_by_memory
from apportion.parallel.replica.replica import Replica
from apportion.parallel.tracing.network import settle
from apportion.parallel.tracing.uncompiled import as_written, uncompiled
from apportion.process import give_back


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
        self._workload, self._again, self._look = workload, again, look
        dtype = torch.float64 if workload.precision == "float64" else None
        # Rank 0's draws everywhere: whoever loads a batch loads the same one.
        self.source = BatchSource(workload, device=world.device, dtype=dtype, rank=0)
        self.data_shard = DataShard()
        self.rows = slice(0, workload.batch_size)
        """The rows of a carried state that are here; fewer than the batch where this is one of several replicas."""
        self.joined: Callable[[Tensor | None], Tensor | None] = lambda loss: loss
        """Adds up the gradients, and the loss, with those of other replicas; it is called before the sums over this
        replica's ranks."""
        self._sample: Batch | None = self.source.at(0, self.data_shard)
        self._build(world, part)
        if world.members is None:
            self._sample = None

    @collective
    def _build(self, world: World, part: MakePart) -> None:
        """Build everything that depends on the other ranks, as it is before the first update. Called by all ranks."""
        workload = self._workload
        self.rank, self.device = world.rank, world.device
        self._group, self._built = world.group(), world.generation
        seed_everything(workload.seed)
        plain = fresh_model(workload, world.device, self.source.dtype)
        self._settle(plain)
        if world.size > 1:
            refuse_tied_by_memory(plain, "each rank holds its own part of the weights")
        self._plain = FullModel(plain, workload, len(self.source.dataset))  # type: ignore[arg-type]
        made = workload.optimizer(list(plain.named_parameters()))
        self._hooks = GradientHooks((name, p) for name, p in plain.named_parameters() if p.requires_grad)
        sample, expected = self._sample, None
        assert sample is not None, "only a world that may change builds again"
        if world.size > 1 and workload.update is None and workload.carry is None:
            refuse_gradients_of_gradients(asked(plain, sample.inputs), plain)
        # With update= the model need not have a forward of its own.
        compares = world.size > 1 and world.generation == 0 and workload.update is None
        if compares:
            expected = equivalence.outputs_of(plain, partial(self._called, plain, sample))
        self._divide(plain, part, sample, refused=self._refused(plain) if world.generation == 0 else None)
        del plain
        rank = 0 if self._part.alike else world.rank
        self._replica = Replica(self._own_workload(made), rank=rank, device=world.device)
        self.model, self.optimizers = self._replica.model, self._replica.optimizers
        for p, name in self._replica.names.items():
            self._replica.names[p] = self._plain.first[name]
        pieces = self._plain.pieces(self.model, self._part.pieces)
        self._layout = ShardLayout.of(gather_messages(pieces, self._group, device=world.device))
        self._spread = Resharder(self._plain, self._layout, pieces, world.rank, list(self.optimizers))
        refuse_optimizers(self.optimizers, self._replica.optimizers.searching, self._layout, self._group.size)
        self._counted = self._layout.owned(world.rank)
        self._refuse_divided_hooks(pieces)
        self._others: list[nn.Parameter] = []
        """The parameters whose gradients other ranks sum, and of which nothing is held here."""
        self._sums = self._make_sums()
        if compares:
            equivalence.refuse_others(
                self.model,
                lambda: self._part.predict(self._replica, sample),
                expected,
                workload.precision,
                self._group,
            )
        self._replica.start_schedules(self.source.total)
        self._loss: Tensor | None = None
        survives = self._again is not None and world.members is not None and world.size == world.local_size
        survives = survives and world.outer is None  # who has divided a world keeps what all of its ranks have
        self._committed = CommittedShards(world) if survives else None
        sample.let_go()
        give_back()  # the plain model

    def _divide(self, plain: nn.Module, part: MakePart, sample: Batch, *, refused: ValueError | None) -> None:
        """Make this rank's part of the plain model. Raises ``refused``, where the part says nothing else."""
        with uncompiled():
            self._part = part(plain, sample.inputs)
        if refused is not None:  # what the part says of the same layers is said first: it knows what to do instead
            raise refused
        if self._workload.update is not None and not self._part.alike:
            raise ValueError(
                "update= asks for the gradient of a loss that only one of the ranks computes: use data_parallel"
            )

    def _refuse_divided_hooks(self, pieces: Mapping[str, Any]) -> None:
        """Raise ValueError where a parameter with a hook on its gradient is divided."""
        for name in self._hooks.names:
            if name in pieces and TensorShard.from_plain(pieces[name]).index is not None:
                raise ValueError(
                    f"{name} has a hook on its gradient, of which each worker would have a part: remove the hook, or "
                    "use data_parallel, which calls it with the whole gradient"
                )

    def _settle(self, plain: nn.Module) -> None:
        """Call the model once, so that hooks that its forward pass installs when it is first called are there from the
        beginning."""
        if self._sample is None or self._workload.update is not None or self._workload.carry is not None:
            return
        few = tree.rows(self._sample.inputs, slice(0, 2))
        with suppress(Exception):  # a model that cannot be called: whoever cuts it has more to say about that
            settle(plain, partial(tree.call, plain, few))

    def _refused(self, plain: nn.Module) -> ValueError | None:
        """Return the error by which ``look`` refuses to divide the plain model's batches; None where it accepts them,
        or was not given."""
        try:
            if self._look is not None:
                self._look(plain, self.source)
        except ValueError as error:
            return error
        return None

    def _called(self, plain: nn.Module, batch: Batch) -> Any:
        """Return the outputs of the plain model."""
        workload = self._workload
        kind = {"bfloat16": torch.bfloat16}.get(workload.precision)
        with torch.autocast(self.device.type, dtype=kind, enabled=kind is not None):
            if workload.carry is None:
                return tree.call(plain, batch.inputs)
            state = tree.cast(workload.carry(len(batch)), self.device, workload.dtype)
            return tree.call(plain, batch.inputs, state)[0]

    def _own_workload(self, made: Optimizer | Mapping[str, Optimizer]) -> Workload:
        """Return the workload of this rank's part. It does not clip: that is done between the sums and the update."""
        for owner, optimizer in ({"": made} if isinstance(made, Optimizer) else made).items():
            self._plain.move(owner, optimizer, self._part.model, self._part.pieces)
        self._plain.forget()
        model = self._part.model
        return replace(self._workload, model=lambda: model, optimizer=lambda _: made, clip_grad_norm=None)

    def _make_sums(self) -> dict[str | None, GradientSum]:
        """Make the sums of the partial gradients: one of all, or with ``update`` one of each optimizer's."""
        plain, own = self._plain, {name: p for p, name in self._replica.names.items()}
        found: dict[str | None, GradientSum] = {}
        for scope in [None] if self._workload.update is None else list(self.optimizers):
            terms, sparse = [], []
            for name, piece, ranks in self._layout.sums():
                if name in plain.trained and scope in (None, plain.trained[name]):
                    # Who does not hold it adds nothing.
                    terms.append(own[name] if self.rank in ranks else _nothing(piece, plain.dtypes[name], self.device))
                    self._others += terms[-1:] if self.rank not in ranks else []
                    sparse += terms[-1:] if name in plain.sparse else []
            if terms:
                found[scope] = GradientSum(terms, self._group, sparse=sparse, optimizers=[*self.optimizers.values()])
        return found

    @property
    def done(self) -> int:
        return self._replica.step

    def predict(self, batch: Batch) -> Any | None:
        with as_written():
            outputs = self._part.predict(self._replica, batch)
        return outputs if self.rank == 0 or not self._part.alike else None

    def looked(self) -> None:
        self._replica.forward.put_back()

    def backward(self, batch: Batch) -> Tensor | None:
        self._replica.reseed(batch.step)
        with as_written():
            self._loss = self._part.backward(self._replica, batch)
        return self._loss

    def update(self) -> Mapping[str, Tensor]:
        loss = self.finish()
        for name in self.optimizers:
            self._replica.apply(name)
        self._commit()
        return {"loss": loss}

    def finish(self) -> Tensor:
        """Complete the gradients, as ``update`` does first: whole gradients in ``p.grad``, clipped. Returns the
        loss."""
        loss, self._loss = self._loss, None
        loss = self._finish(None, self.joined(loss))
        assert loss is not None, "update() follows backward()"
        return loss

    def _commit(self) -> None:
        self._replica.commit()
        self._keep()

    def minimize(self, loss: Tensor, batch: Batch, *, optimizer: str = "") -> Tensor:
        self._replica.gradient(loss, 1.0, optimizer)
        self._finish(optimizer, loss.detach())
        self._replica.apply(optimizer)
        return loss.detach()

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        if self._workload.update is None:
            self.backward(batch)
            return self.update()
        self._replica.reseed(batch.step)
        with self._replica.autocast(), as_written():
            values = self._workload.update(self, batch)
        self._commit()
        return {name: value.detach() for name, value in values.items()}

    @torch.no_grad()
    def _finish(self, scope: str | None, loss: Tensor | None) -> Tensor | None:
        """Complete the gradients in ``p.grad`` of one optimizer's parameters or of all, clipped; returns the loss, on
        every rank. This is all that an update waits for."""
        if scope in self._sums:
            self._sums[scope](None, 0.0)
            for p in self._others:
                p.grad = None
        if self._hooks:
            named = {p: self._replica.names[p] for p in self._replica.trainable(scope)}
            self._hooks(named, of_parameters=scope is None)
        largest = self._workload.clip_grad_norm
        if largest is None and self._part.alike:
            if self._committed is not None:  # nobody is two updates ahead of another
                self._group.barrier()
            return loss
        gradients = [(p, p.grad) for p in self._replica.trainable(scope) if p.grad is not None]
        tail = torch.zeros(3, dtype=torch.float64, device=self.device)
        if loss is not None:
            tail[0], tail[1] = loss, 1.0
        if largest is not None:
            counted = [g for p, g in gradients if self._replica.names[p] in self._counted]
            norms = [torch.linalg.vector_norm(g).double() for g in counted]
            tail[2] = torch.stack(norms).square().sum() if norms else 0.0
        self._group.all_reduce(tail).wait()
        if largest is not None:
            scale = (largest / (tail[2].sqrt() + 1e-6)).clamp(max=1.0)
            for _, gradient in gradients:
                gradient.mul_(scale.to(gradient.dtype))
        return (tail[0] / tail[1]).to(self._workload.dtype) if tail[1] else None

    # State

    def state_dict(self) -> State:
        return self.gathered(self._replica.state())

    @collective
    def gathered(self, own: State) -> State:
        """Return the whole state, gathered from this rank's part and the others'. Called by all ranks."""
        return self._spread.gathered(own, self._group, self.device)

    def replicated(self) -> Iterable[Replicated]:
        own, _ = self.held_here()
        yield Replicated(self._group, self._spread.replicated(own))

    def own(self, state: State) -> State:
        """Return this rank's part of a whole state."""
        named = replace(state, model={key: state.model[key] for key in self.model.state_dict()})
        return self._spread.own(named)

    def load_state_dict(self, state: State) -> None:
        self._replica.load(self.own(state), self.rows)
        self._keep()

    def _keep(self) -> None:
        """Keep the state as it is now in memory that outlives this process."""
        if self._committed is not None:
            self._committed.write(*self.held_here())

    def held_here(self) -> tuple[State, Mapping[str, Any]]:
        """Return this rank's part of the state, without copies, and which pieces it consists of."""
        replica = self._replica
        model = {self._plain.first[k]: t.detach() for k, t in self.model.state_dict().items()}
        own = State(
            step=replica.step,
            model=model,
            optimizer=dict(replica.optimizers.slots()),
            settings=replica.optimizers.settings(),
            buffers=replica.forward.beside(),
        )
        return own, self._spread.pieces

    def together(self, parts: Sequence[tuple[State, Any]]) -> State:
        """Return the whole state, put together from what all ranks held."""
        return self._spread.together(parts)

    @property
    def replica(self) -> Replica:
        """The replica that this rank trains."""
        return self._replica

    @property
    def sparse(self) -> list[nn.Parameter]:
        """The weights that this rank trains whose gradients are sparse."""
        return [p for p in self._replica.trainable() if self._replica.names[p] in self._plain.sparse]

    @collective
    def move(self, world: World) -> None:
        """Move into another world, in the condition before the first update. Called by all ranks."""
        assert self._again is not None
        self._part.close()
        self._build(world, self._again(world))

    def rejoin(self, world: World) -> None:
        assert self._again is not None, "the strategy says that it does not survive the loss of a worker"
        if self._workload.carry is not None:
            raise StateLost("the recurrent state of a rank's rows died with it")
        if self._built != world.generation:  # who has come anew has just built
            self.move(world)
        assert self._committed is not None
        found = whole(self._committed.versions())
        if found is None:
            raise StateLost("no update had been kept by all ranks")
        parts = self._committed.read(found)
        self._group.barrier()  # nobody writes while another still looks
        self.load_state_dict(self._spread.together(parts))

    def fingerprint(self, workload: Workload) -> dict[str, Any]:
        return self._plain.fingerprint(self.optimizers)

    @property
    def parameters(self) -> int:
        return self._plain.parameters

    @property
    def cuts(self) -> tuple[str, ...] | None:
        return self._part.cuts

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": self._group.waited, "updating": self._replica.seconds}

    def close(self) -> None:
        self._part.close()


def _nothing(piece: TensorShard, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter of a piece's shape that takes no memory."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(piece.held))
