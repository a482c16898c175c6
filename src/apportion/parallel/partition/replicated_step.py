"""Replicas of a network in parts: each group of ranks holds all of it, and computes a share of every batch.

::

    replica 0    rank 0 [part 0] -- rank 1 [part 1]     rows 0..B/2
                    |                  |
                   sum                sum               ranks of the same place hold the same pieces
                    |                  |
    replica 1    rank 2 [part 0] -- rank 3 [part 1]     rows B/2..B

A replica's share of the batch is a global batch to the strategy that cuts the network; its loss goes back with the
weight of its terms. Then the gradients of every piece are summed over the ranks of one place, and from there on each
replica makes the same update by itself, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.group import Alone, Group, collective
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.loss_terms import LabelTerms, examples
from apportion.core.python_state.python_state import PythonState
from apportion.core.replica_digest import Replicated
from apportion.core.rng import seed_everything
from apportion.core.sampler import DataShard
from apportion.core.strategy import FollowsMetrics, Recoverable, State, Step, Strategy
from apportion.core.torch_private import BatchNormBase
from apportion.core.workload import Workload
from apportion.errors import StateLost
from apportion.parallel.batch_coupling.analysis import whole_batch_functions
from apportion.parallel.ops.sync_batch_norm import NonEmptyRanks, use_whole_batch
from apportion.parallel.partition.committed_shards import CommittedShards
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.partition.replica_groups import ReplicaGroup, how_many, how_many_are_left, whole_network
from apportion.parallel.replica.gradient_buckets import GradientSum
from apportion.parallel.replica.initial_model import refuse_renormalising
from apportion.parallel.replica.loss_weighting import gathered


class _SharedLoss:
    """The loss of one replica's rows, as a part of the whole batch's."""

    def __init__(self, workload: Workload) -> None:
        assert workload.loss is not None
        self._loss, self._couples = workload.loss, workload.count is None
        self.group: Group = Alone()
        self.rows = 0
        """The number of this replica's own rows."""
        self.terms = 1.0

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if self._couples:  # of all rows, on every replica: its gradient goes back to the rows that were gathered here
            outputs, targets = gathered(outputs, targets, self.group, own=self.rows > 0)
        if not self.terms:  # a mean of nothing is a NaN, and 0 times NaN is one too: zero, through the same layers
            return torch.stack([(t * 0.0).sum() for t in tree.tensors(outputs) if t.is_floating_point()]).sum()
        return self._loss(outputs, targets)


class _Both(NonEmptyRanks):
    """The ranks that take part in statistics over every replica: those that take part in their own replica's, where
    that has rows."""

    def __init__(self, within: NonEmptyRanks, replica: NonEmptyRanks, group: Group) -> None:
        self._within, self._replica = within, replica
        self.group = group

    @property
    def present(self) -> bool:  # type: ignore[override]
        return self._within.present and self._replica.present


@final
class ReplicatedStep(Step, Recoverable):
    """This rank's part of one replica, and the sums over all of them."""

    whole = True

    def __init__(self, workload: Workload, world: World, of: Strategy, replicas: int | None) -> None:
        self._of, self._asked, self._workload = of, replicas, workload
        place = self._divide(world)
        _refuse(workload, of, place)
        self._loss = _SharedLoss(workload)
        if place.replicas > 1 and not world.under_way:
            _refuse_coupling(workload, world)
        # Where terms are examples none is missing, and a loss that is known by what it is stays that.
        seen = workload if _counts_rows(workload) else replace(workload, loss=self._loss, count=workload.terms)
        self._inner = inner = build_split(of, seen, place.within)
        self.source = inner.source
        self._settle(world, place)
        self._own_rows, self._reported_share = 0, 0.0

    def _divide(self, world: World) -> ReplicaGroup:
        number = how_many_are_left if world.under_way else how_many
        return ReplicaGroup.split(world, number(self._of, self._asked, world.size))

    @collective
    def _settle(self, world: World, place: ReplicaGroup) -> None:
        """Set up what depends on the other ranks, now that this rank's part is built. Called by all ranks."""
        inner, self._place, self._world = self._inner, place, world
        self.rank, self.device = world.rank, world.device
        self.model, self.optimizers = inner.model, inner.optimizers
        self.data_shard = shard = DataShard(place.replica, place.replicas)
        self._across = self._loss.group = place.across.group()
        self._attendance = NonEmptyRanks(self._across)
        if place.replicas > 1:
            refuse_renormalising(self.model, "each replica would rescale what its own examples look up")
            self._use_whole_batch()
        # Ranks that draw the same numbers within a replica go on doing so; those of other replicas draw others.
        inner.replica.set_rank(inner.replica.rank + place.replica * place.within.size)
        self.source.set_rank(place.replica)
        inner.python.shares = place.replicas
        inner.rows = shard.rows(self._workload.update_size)
        inner.joined = self._sum_gradients
        self._sums = GradientSum(
            inner.replica.trainable(), self._across, sparse=inner.sparse, optimizers=[*inner.optimizers.values()]
        )
        self._committed = None
        if world.members is not None:
            self._committed = CommittedShards(world, place.within, place.replica)

    def _use_whole_batch(self) -> None:
        """Make batch normalisation take its statistics over all replicas; where it takes them over the ranks of its
        replica already, over the ranks of all of them."""
        everyone = self._world.group()
        ours = set(use_whole_batch(self.model, self._attendance))
        for name, layer in self.model.named_modules():
            if not isinstance(layer, BatchNormBase) or (not layer.training and layer.running_mean is not None):
                continue
            if isinstance(asked := getattr(layer, "_whole", None), NonEmptyRanks):
                if name not in ours:
                    layer._whole = _Both(asked, self._attendance, everyone)  # type: ignore[assignment]
                continue
            raise ValueError(
                f"{name} normalises by a forward of its own, which would see the rows of one of "
                f"{self._place.replicas} replicas: use replicas=1, or torch's batch normalisation"
            )

    @property
    def done(self) -> int:
        return self._inner.done

    @property
    def python(self) -> PythonState:
        return self._inner.python

    def predict(self, batch: Batch) -> Any | None:
        """Compute a share of the outputs in every replica, where each gets one; the rows of a carried state do not
        move."""
        return predict(self._inner, self._place, batch, divides=self._workload.carry is None)

    def looked(self) -> None:
        self._inner.looked()

    @property
    def schedules(self) -> FollowsMetrics | None:
        return self._inner.schedules

    def backward(self, batch: Batch) -> Tensor | None:
        self._own_rows = self._loss.rows = len(batch)
        self._attendance.present = len(batch) > 0
        self._loss.terms, share, self._reported_share = self._shares(batch)
        self._inner.replica.share = share
        return self._inner.backward((batch if len(batch) else batch.borrowed()).by_itself())

    def _shares(self, batch: Batch) -> tuple[float, float, float]:
        """Return the loss terms of these rows; the weight of their gradient; and the weight of their loss in the
        reported one."""
        if self._workload.count is None:
            return 1.0, 1.0, 1.0 / self._place.replicas
        if batch.counts_rows:
            return 1.0, len(batch) / batch.size, len(batch) / batch.size
        count = batch.count
        total = torch.tensor([count], dtype=torch.float64, device=self.device)
        self._across.all_reduce(total).wait()
        share = count / (total.item() or 1.0)
        return count, share, share

    @torch.no_grad()
    def _sum_gradients(self, loss: Tensor | None) -> Tensor | None:
        """Sum the gradients of all replicas; returns the loss where it is known."""
        total = self._sums(loss if self._reported_share else None, self._reported_share)
        if self._committed is not None:  # no rank is two updates ahead of another
            self._world.group().barrier()
        return None if loss is None else total

    def update(self) -> Mapping[str, Tensor]:
        values = self._inner.update()
        self._keep()
        return values

    # State

    def state_dict(self) -> State:
        state, carry = self._inner.state_dict(), self._inner.replica.carry
        return state if carry is None else replace(state, carry=carry.gather(self._across, self._own_rows))

    def replicated(self) -> Iterable[Replicated]:
        yield from self._inner.replicated()
        own, _ = self._inner.held_here()
        yield Replicated(self._across, dict(own.tensors()))

    def load_state_dict(self, state: State) -> None:
        self._inner.load_state_dict(state)
        carry = self._inner.replica.carry
        self._own_rows = carry.row_count if carry is not None else 0
        self._keep()

    def _keep(self) -> None:
        if self._committed is not None:
            self._committed.write(*self._inner.held_here())

    def rejoin(self, world: World) -> None:
        if self._workload.carry is not None:
            raise StateLost("the recurrent state of a rank's rows died with it")
        if self._world.generation != world.generation:  # who has come anew has just built
            place = self._divide(world)
            self._inner.move(place.within)
            self._settle(world, place)
        assert self._committed is not None
        self.load_state_dict(self._inner.join_parts(self._committed.latest()))

    def fingerprint(self, workload: Workload) -> dict[str, Any]:
        return self._inner.fingerprint(workload)

    @property
    def parameters(self) -> int:
        return self._inner.parameters

    @property
    def cuts(self) -> tuple[str, ...] | None:
        return self._inner.cuts

    def spent(self) -> Mapping[str, float]:
        return self._inner.spent()

    def close(self) -> None:
        self._inner.close()


@collective
def predict(inner: SplitStep, place: ReplicaGroup, batch: Batch, *, divides: bool = True) -> Any | None:
    """Return the outputs of a whole batch on one rank of the first replica, None on the others. Called by all ranks."""
    replicas = place.replicas
    if replicas == 1 or not divides or len(batch) < replicas:
        outputs = inner.predict(batch)
    else:
        outputs = inner.predict(batch.parts(replicas)[place.replica])
        if outputs is not None:
            across = place.across.group()
            outputs = tree.map_tensors(lambda t: torch.cat(across.all_gather_rows(t)), outputs)
    return outputs if place.replica == 0 else None


def build_split(of: Strategy, workload: Workload, world: World) -> SplitStep:
    """Build the step of ``of``; ValueError where that is not a network in parts."""
    built = of.build(workload, world)
    if not isinstance(built, SplitStep):
        raise whole_network(of)
    return built


def _counts_rows(workload: Workload) -> bool:
    """Tell whether every row is one loss term. Where that depends on the labels, the data are opened to see them."""
    terms = workload.terms
    return terms is examples or (isinstance(terms, LabelTerms) and BatchSource(workload).count is examples)


def _refuse_coupling(workload: Workload, world: World) -> None:
    """Refuse, with ValueError, layers that couple the rows of a batch, except batch normalisation. They are looked for
    in a model that is made for this alone."""
    seed_everything(workload.seed)
    model = workload.make_model().to(device=world.device)
    source = BatchSource(workload, device=world.device)
    strategy = "data_parallel(of=...)"
    for name in whole_batch_functions(model, workload, source.sample, strategy=strategy):
        layer = model.get_submodule(name)
        if not isinstance(layer, BatchNormBase):  # of those it is said which of them there are
            raise ValueError(
                f"{name or type(layer).__name__} takes statistics of the batch by a function, which would see the rows "
                "of one replica: use replicas=1, torch's batch normalisation, or data_parallel"
            )


def _refuse(workload: Workload, of: Strategy, place: ReplicaGroup) -> None:
    if workload.update is not None:
        raise ValueError(f"update= sees the loss of its own rows, and replicas of {of} share one: use data_parallel")
    if workload.update_size < place.replicas:
        raise ValueError(
            f"batch_size={workload.update_size} cannot feed {place.replicas} replicas: each needs an example; "
            f"use replicas<={workload.update_size} or batch_size>={place.replicas}"
        )
