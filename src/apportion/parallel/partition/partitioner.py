"""The division of a plain model among the ranks of a world, and the refusal of what would train another network.

::

    plain model --part()--> this rank's part --> its replica: the part with the optimizers that were made for the whole
        |                       |
    full model              layout: who holds which elements of which tensor, from what every rank tells
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from apportion.comm.group import collective, gather_messages
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.batch import Batch, rows_of
from apportion.core.data.source import BatchSource
from apportion.core.modes import refuse_making
from apportion.core.rng import seed_everything
from apportion.core.sampler import DataShard
from apportion.core.workload import Workload
from apportion.parallel.optim.elementwise import BY_PARAMETER, ELEMENTWISE
from apportion.parallel.optim.step_hooks import refuse_step_hooks
from apportion.parallel.partition import equivalence
from apportion.parallel.partition.equivalence import asked, refuse_gradients_of_gradients
from apportion.parallel.partition.full_model import FullModel
from apportion.parallel.partition.part import MakePart, Part
from apportion.parallel.partition.tensor_shards import ShardLayout, TensorShard
from apportion.parallel.replica.gradient_buckets import GradientHooks
from apportion.parallel.replica.initial_model import fresh_model, refuse_tied_by_memory
from apportion.parallel.replica.replica import Replica, called
from apportion.parallel.tracing.network import settle
from apportion.parallel.tracing.uncompiled import uncompiled
from apportion.process import give_back


def refuse_workload(workload: Workload) -> None:
    """Raise ValueError where a workload asks for what no part can give."""
    for given, why in (
        (workload.compile, "compile=True would compile a network that waits for other ranks: use compile=False, or"),
        (
            workload.precision == "float16",
            'precision="float16" scales the loss by what whole gradients overflow at: use "bfloat16", or',
        ),
    ):
        if given:
            raise ValueError(f"{why} data_parallel")


def refuse_optimizers(
    optimizers: Mapping[str, Optimizer], searching: Collection[str], layout: ShardLayout, ranks: int
) -> None:
    """Raise ValueError where an optimizer needs to see what other ranks hold. ``searching``: names of those that
    evaluate the loss themselves."""
    holders = layout.holders.values()
    cut = any(piece.index is not None for held in holders for _, piece in held)
    spread = cut or any(len(held) < ranks for held in holders)
    known = ELEMENTWISE if cut else BY_PARAMETER
    for name, optimizer in optimizers.items():
        kind = type(optimizer)
        if name in searching:
            raise ValueError(
                f"{kind.__name__} evaluates the loss several times an update: use map_reduce or single_device"
            )
        if spread and kind not in known:
            raise ValueError(
                f"{kind.__name__} is not known to update each {'weight' if cut else 'parameter'} by itself, and no "
                f"rank has all of them: use one of {', '.join(k.__name__ for k in known)}, or data_parallel"
            )
        if spread:
            refuse_step_hooks(
                optimizer, f"on each rank it would see a part of the {'weights' if cut else 'parameters'}"
            )


@dataclass(frozen=True)
class PartitionedModel:
    """This rank's part of a model before its first update, and the facts about the whole and the other ranks' parts."""

    full: FullModel
    part: Part
    replica: Replica
    """The part with its optimizers; its parameters go by the first of their plain names."""
    pieces: Mapping[str, Any]
    """The pieces that this rank holds, as JSON."""
    layout: ShardLayout
    hooks: GradientHooks
    """The hooks on the gradients of the plain model's parameters."""


@final
class Partitioner:
    """Divides the plain model of a workload: once, or again whenever the membership of its world has changed. ``look``
    may refuse the plain model and its batches."""

    def __init__(
        self, workload: Workload, source: BatchSource, look: Callable[[nn.Module, BatchSource], None] | None
    ) -> None:
        self._workload, self._source, self._look = workload, source, look
        self._sample: Batch | None = source.at(0, DataShard())

    @collective
    def divide(self, world: World, make: MakePart) -> PartitionedModel:
        """Return this rank's part of a model that is made anew. Called by all ranks."""
        workload, sample = self._workload, self._sample
        assert sample is not None, "only a world that may change is divided again"
        seed_everything(workload.seed)
        plain = fresh_model(workload, world.device, self._source.dtype)
        self._source.count_for(plain)
        with self._source.looking():
            _ = sample.inputs  # they stay loaded
        self._settle(plain, sample)
        if world.size > 1:
            refuse_tied_by_memory(plain, "each rank holds its own part of the weights")
            refuse_making(plain, "no rank has all of the weights")
        full = FullModel(plain, workload, self._source.deal)
        made = workload.make_optimizer(list(plain.named_parameters()))
        hooks = GradientHooks((name, p) for name, p in plain.named_parameters() if p.requires_grad)
        if world.size > 1 and workload.update is None and workload.carry is None:
            refuse_gradients_of_gradients(asked(plain, sample.inputs), plain)
        # With update= the model need not have a forward of its own.
        compares = world.size > 1 and not world.under_way and workload.update is None
        outputs = partial(called, workload, plain, sample, world.device)
        expected = equivalence.outputs_of(plain, outputs) if compares else None
        refused = self._refused(plain) if not world.under_way else None
        part = self._make_part(plain, make, sample, refused=refused)
        if part.model is not plain:
            refuse_making(plain, f"the layers are called without {type(plain).__name__}")
        del plain, outputs
        replica = self._replica(full, made, part, world)
        pieces, group = full.pieces(replica.model, part.pieces), world.group()
        layout = ShardLayout.from_plain(gather_messages(pieces, group, device=world.device))
        refuse_optimizers(replica.optimizers, replica.optimizers.searching, layout, group.size)
        _refuse_divided_hooks(hooks, pieces)
        if compares:
            found = partial(part.predict, replica, sample)
            equivalence.refuse_others(replica.model, found, expected, workload.precision, group)
        replica.start_schedules(self._source.total, self._source.deal.batches)
        sample.let_go()
        if world.members is None:  # it does not change
            self._sample = None
        give_back()  # the plain model
        return PartitionedModel(full, part, replica, pieces, layout, hooks)

    def _settle(self, plain: nn.Module, sample: Batch) -> None:
        """Call the model once, so that hooks that its forward pass installs when it is first called are there from the
        beginning."""
        if self._workload.update is not None or self._workload.carry is not None:
            return
        few = rows_of(sample.inputs, slice(0, 2))
        with suppress(Exception):  # a model that cannot be called: cutting it raises a better error
            settle(plain, partial(tree.call, plain, few))

    def _refused(self, plain: nn.Module) -> ValueError | None:
        """Return the error by which ``look`` refuses to divide the plain model's batches; None where it accepts them,
        or was not given."""
        try:
            if self._look is not None:
                with self._source.looking():
                    self._look(plain, self._source)
        except ValueError as error:
            return error
        return None

    def _make_part(self, plain: nn.Module, make: MakePart, sample: Batch, *, refused: ValueError | None) -> Part:
        """Make this rank's part of the plain model. Raises ``refused``, where the part says nothing else."""
        with uncompiled():
            self._last = part = make(plain, sample.inputs)
        if refused is not None:  # what the part says of the same layers is said first: it knows what to do instead
            raise refused
        if self._workload.update is not None and not part.alike:
            raise ValueError(
                "update= asks for the gradient of a loss that only one of the ranks computes: use data_parallel"
            )
        return part

    def _replica(self, full: FullModel, made: Optimizer | Mapping[str, Optimizer], part: Part, world: World) -> Replica:
        """Return the replica of this rank's part. It does not clip: that is done between the sums and the update."""
        model = part.model
        for owner, optimizer in ({"": made} if isinstance(made, Optimizer) else made).items():
            full.move(owner, optimizer, model, part.pieces)
        full.forget()
        workload = replace(self._workload, model=lambda: model, optimizer=lambda _: made)
        workload = replace(workload, clip_grad_norm=None, per_rank_draws=())
        replica = Replica(
            workload, rank=0 if part.alike else world.rank, device=world.device, data=self._source.dataset
        )
        replica.partly = True
        for p, name in replica.names.items():
            replica.names[p] = full.first[name]
        return replica

    def close(self) -> None:
        """Release what the last part holds, even one of a division that was interrupted."""
        self._last.close()


def _refuse_divided_hooks(hooks: GradientHooks, pieces: Mapping[str, Any]) -> None:
    """Raise ValueError where a parameter with a hook on its gradient is divided."""
    for name in hooks.names:
        if name in pieces and TensorShard.from_plain(pieces[name]).index is not None:
            raise ValueError(
                f"{name} has a hook on its gradient, of which each worker would have a part: remove the hook, or "
                "use data_parallel, which calls it with the whole gradient"
            )
