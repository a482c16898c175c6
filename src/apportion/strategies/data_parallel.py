"""data_parallel: synchronous towers. Every rank has the whole network and a share of each batch; gradients are summed.

Papers: the towers of TensorFlow's CIFAR-10 tutorial (Abadi et al., 2016); Goyal et al., "Accurate, Large Minibatch
SGD", 2017; Li et al., "PyTorch Distributed", VLDB 2020 (what DDP does).

::

    batch of B      rank 0: rows 0..B/2    forward, backward \\            / update
                                                               sum(grad)
                    rank 1: rows B/2..B    forward, backward /            \\ update

Exact: each rank's mean loss is weighted by its share of the loss terms, so 61 examples over 3 ranks give the gradient
of 61 examples. Batch normalisation takes its statistics over all ranks; a rank without rows in a short batch takes
part with weight 0; losses that couple examples (``count=None``) see the outputs of all ranks.

On one host the weights lie in shared pages in two versions (``parallel/shared_weights/update.py``): each rank reduces
and updates its own slice. Elsewhere, and for what is not updated element by element, every rank has a copy, and the sum
of a layer's gradients begins as soon as the backward pass has them (``parallel/replica/gradient_buckets.py``).

Price, on one host: ``t = t_compute(B / n) + 2 bytes(gradient) / memory bandwidth + t_update / n + 2 meetings``; on
several hosts and on GPUs the gradients of the last layers leave while those before them are computed, and
``t = t_compute(B / n) + t_update`` and what the backward pass does not hide of
``2 (n - 1) / n * bytes(gradient) / bandwidth + latency``; with batch normalisation two small messages a layer more.

Wins when the compute of a share outweighs the gradient's way: convolutions, large batches. Loses when the gradient is
larger than what it is made of: fully connected layers at a small batch. ``microbatches`` trades time for memory: the
share is computed in that many parts, one after the other. ``shares="measured"``: ranks that are found to be slower take
fewer rows. ``of=pipeline_parallel(...)``: each of ``replicas`` replicas is a group of workers that hold the network in
parts, as that strategy cuts it (``parallel/partition/replicated_step.py``); the gradients of a part are summed over the
replicas.

``compress="fp16"``, or another of ``parallel/compression/methods/``: what hosts send each other is less than the
gradient, and the network is no longer to the bit the one of one device. The sum within a host stays as it is.

A data set in parts is dealt out part by part: a rank's share of a batch is the rows of its own parts.

A worker's death loses nothing: the others and its replacement make the step under way again, with the same draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import Tensor, nn

from apportion.comm.world import World
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch
from apportion.core.replica_digest import Replicated, apart_from
from apportion.core.strategy import Held, Recoverable, State, Step, Strategy, held
from apportion.core.value import NESTED
from apportion.core.workload import Workload
from apportion.parallel.compression.compression import METHODS, Compression, compression
from apportion.parallel.ops.sync_batch_norm import NonEmptyRanks, RunningStatistics, use_whole_batch
from apportion.parallel.partition.replica_groups import check_of, check_replicas
from apportion.parallel.partition.replicated_step import ReplicatedStep
from apportion.parallel.replica.accumulation import batches_in
from apportion.parallel.replica.bucket_update import BucketUpdate, GradientUpdate
from apportion.parallel.replica.gradient_buckets import LARGE_BYTES, early_bytes
from apportion.parallel.replica.initial_model import refuse_renormalising
from apportion.parallel.replica.load_balancing import MeasuredShares
from apportion.parallel.replica.step import ReplicaStep, reference
from apportion.parallel.shared_weights.suitability import unsuited
from apportion.parallel.shared_weights.update import SharedUpdate

if TYPE_CHECKING:
    from apportion.cost_model.cluster import Placement
    from apportion.cost_model.cost import Cost
    from apportion.cost_model.profile import Profile


COMPRESSIONS = "fp16", "power_sgd"
"""The compressions that a plan prices between hosts: the one that hardly changes a training, and the one that sends
least."""


@final
@dataclass(frozen=True, repr=False)
class DataParallel(Strategy):
    """Each worker computes a share of every batch."""

    survives = True

    microbatches: int = 1
    """The number of parts that a rank computes its share in, accumulating the gradient: less memory, the same
    result."""
    shares: str = "equal"
    """The shares of the ranks: "equal", or "measured": each rank's share of a batch is in proportion to its speed,
    measured as it goes."""

    of: Strategy | None = None
    """The kind of a replica: a strategy that splits the network among some of the workers. None: one worker."""
    replicas: int | None = None
    """The number of replicas with ``of``; the workers are shared out evenly. None: as ``of`` says by its number of
    stages, or else the fewest."""

    compress: Compression | str | None = field(default=None, metadata={NESTED: METHODS})
    """What travels between hosts is compressed: "fp16", "bf16", "int8", "top_k(fraction=0.01)", "power_sgd(rank=2)", or
    one of these as a value. Then the result is not that of one device. None, and within a host: it is not
    compressed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compress", compression(self.compress))
        if self.of is not None:
            check_of(self.of)
            if self.microbatches != 1 or self.shares != "equal" or self.compress is not None:
                raise ValueError(
                    f"microbatches=, shares= and compress= are of replicas of one worker each: leave them out with "
                    f"of={self.of}"
                )
        elif self.replicas is not None:
            raise ValueError(f"replicas={self.replicas!r} goes with of=, as of=pipeline_parallel(): leave it out")
        check_replicas(self.replicas)
        if self.shares not in ("equal", "measured"):
            raise ValueError(f'shares={self.shares!r} must be "equal" or "measured"')
        self._must_be_whole("microbatches")

    @property
    def exact(self) -> bool:
        return self.compress is None and (self.of is None or self.of.exact)

    @property
    def referenced_across_hosts(self) -> bool:
        return self.compress is None

    @property
    def recovers_across_hosts(self) -> bool:
        return self.compress is None

    @property
    def deals_parts(self) -> bool:
        return self.of is None

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        from apportion.cost_model.cost import parts_that_fit

        if layout.ranks < 2:
            return
        yield cls()
        if len(layout.kinds) > 1 and not profile.carries:
            yield cls(shares="measured")
        if (parts := parts_that_fit(profile, layout)) > 1:
            yield cls(microbatches=parts)
        if len(layout.hosts) > 1 and all(layout.device(rank).kind == "cpu" for rank in layout.kinds):
            yield from (cls(compress=method) for method in COMPRESSIONS)

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        from apportion.cost_model.compute import by_speed, computed, dealt
        from apportion.cost_model.constraints import must_be_whole, must_feed
        from apportion.cost_model.strategies import data_parallel, shared_weights
        from apportion.parallel.partition import replica_groups  # a run needs no prices, and begins sooner without

        if self.of is not None:
            return replica_groups.cost(self.of, self.replicas, profile, layout)
        must_feed(profile, layout.ranks)
        must_be_whole(profile, self.microbatches)
        self._refuse_carried(profile.carries)
        even: list[float] = [*dealt(profile.batch_size, layout.ranks)]
        rows = by_speed(profile, layout) if self.shares == "measured" else even
        found = computed(profile, layout, rows, parts=self.microbatches)
        at_once = max(rows) / self.microbatches
        if shared_weights.suits(profile, layout):
            cost = shared_weights.cost(profile, layout, found, at_once)
        else:
            way = data_parallel.Summed(LARGE_BYTES, early_bytes(layout.ranks), self.microbatches)
            if (method := compression(self.compress)) is not None:
                way = replace(way, compressed=data_parallel.Compressed(method.sent_bytes, method.passes))
            cost = data_parallel.cost(profile, layout, found, at_once, way)
        asked = data_parallel.asked_while_computing(profile, layout)
        return replace(cost, terms={**cost.terms, "communicating": cost.terms["communicating"] + asked})

    def _refuse_carried(self, carries: bool) -> None:
        if self.shares == "measured" and carries:
            raise ValueError(
                'shares="measured" would move rows between ranks, and a carried state stays with its rank: '
                'use shares="equal"'
            )

    def build(self, workload: Workload, world: World) -> Step:
        if self.of is not None:
            return ReplicatedStep(workload, world, self.of, self.replicas)
        workload.must_feed(world.size)
        if self.microbatches > 1 and (workload.count is None or workload.update is not None):
            what = "a loss that couples examples" if workload.count is None else "update="
            raise ValueError(f"microbatches={self.microbatches} would cut the batch under {what}: use microbatches=1")
        self._refuse_carried(workload.carry is not None)
        if self.shares == "measured" and workload.parts is not None:
            raise ValueError(
                f'shares="measured" would move rows between ranks, and the data set is in parts={workload.parts}, of '
                'which each rank has its own: use shares="equal"'
            )
        return DataParallelStep(
            workload, world, self.microbatches, measured=self.shares == "measured", compress=compression(self.compress)
        )

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


@final
class DataParallelStep(ReplicaStep, Recoverable):
    """Computes this rank's share of each batch, and the update that is the same on all ranks."""

    deals_parts = True

    def __init__(
        self,
        workload: Workload,
        world: World,
        microbatches: int,
        *,
        measured: bool = False,
        compress: Compression | None = None,
    ) -> None:
        self._microbatches, self._again = microbatches, world.under_way
        # A rank may be alone only until a lost host is back, and then goes on with the layers that are built now.
        self._divides = world.most > 1
        self._attendance = NonEmptyRanks(world.group())
        super().__init__(workload, world)
        if microbatches * workload.accumulate > 1:
            self._replica.begin_batch(first=True)
        if measured and isinstance(self.source.dataset, ActedDataset):
            raise ValueError(
                'shares="measured" would move actors between workers, and their environments stay where they are: use '
                'shares="equal"'
            )
        self._measured = MeasuredShares(world.rank, world.size, workload.update_size) if measured else None
        self._waited = 0.0
        self.gradient_update: GradientUpdate
        if world.slots > 1 and unsuited(self._replica, world) is None:
            self.gradient_update = SharedUpdate(self._replica, world)
        else:
            divides = self._divides or microbatches * workload.accumulate > 1
            self.gradient_update = BucketUpdate(self._replica, world, divides=divides, compress=compress)

    def prepare(self, model: nn.Module) -> None:
        if self._divides:
            refuse_renormalising(model, "each rank would rescale what its own examples look up")
            normalised = use_whole_batch(model, self._attendance)
        else:
            kinds = nn.modules.batchnorm._BatchNorm, RunningStatistics
            normalised = [name for name, layer in model.named_modules() if isinstance(layer, kinds)]
        if normalised and self._microbatches > 1:
            raise ValueError(
                f"microbatches={self._microbatches} would give {normalised[0]} the statistics of a part of the batch: "
                "use microbatches=1, or a normalisation that looks at one example (GroupNorm, LayerNorm)"
            )
        from apportion.parallel.batch_coupling.analysis import refuse_coupling, whole_batch_functions
        from apportion.parallel.batch_coupling.sync_batch_functions import (
            use_whole_functions,  # here: a driver need not import them
        )

        if self._microbatches > 1 or self._workload.accumulate > 1:
            strategy = f"data_parallel(microbatches={self._microbatches})"
            if self._microbatches == 1:
                strategy = f"accumulate={self._workload.accumulate}"
            refuse_coupling(model, self._workload, self.source.sample, strategy=strategy)
        elif self._divides:
            own = whole_batch_functions(
                model, self._workload, self.source.sample, strategy="data_parallel", again=self._again
            )
            use_whole_functions(model, own, self._attendance)

    def predict(self, batch: Batch) -> Any | None:
        self._attendance.present = len(batch) > 0
        if len(batch):
            return self._replica.predict(batch)
        self._replica.predict(batch.borrowed())
        return None

    def backward(self, batch: Batch) -> Tensor | None:
        if self._measured is not None:  # from here: the time between two steps (an evaluation) is not measured
            self._measured.start_clock()
            self._waited = self._group.waited
        self._attend(batch)
        own = batch if len(batch) else batch.borrowed()
        total = self._share.total(own)
        mean, weight = None, 0.0
        parts = own.parts(self._microbatches * batches_in(batch, self._workload))
        for part in parts:
            if part is not parts[0]:
                self._replica.again(batch.step)
            loss, share = self._share.weighted_loss(part, own=len(batch) > 0, total=total)
            if part is parts[-1]:
                self.gradient_update.begin_last()
            self._replica.backward(loss, share)
            weight += share
            mean = loss.detach() * share if mean is None else mean + loss.detach() * share
        assert mean is not None
        self._loss = mean
        return mean / weight if len(batch) and weight else None

    def _attend(self, batch: Batch) -> None:
        self._replica.reseed(batch.step)
        self._attendance.present = len(batch) > 0
        self._own_rows = len(batch)
        self.gradient_update.begin_batch(batch)

    def update(self) -> Mapping[str, Tensor]:
        if self._measured is not None:
            self._measured.computed(self._own_rows or 0, self._group.waited - self._waited)
        assert self._loss is not None, "update() follows backward()"
        mean, self._loss = self._loss, None
        loss = self.gradient_update(mean, self._share.reported_factor())
        if self._measured is not None:
            self._measured.update_shares(self._group)
            self.data_shard = self._measured.shard
        return {"loss": loss}

    def minimize(self, loss: Tensor, batch: Batch, *, optimizer: str = "") -> Tensor:
        self.gradient_update.minimize(loss, batch.count / self._share.total(batch), optimizer)
        return loss.detach()

    def __call__(self, batch: Batch) -> Mapping[str, Tensor]:
        if self._workload.update is None:
            self.backward(batch)
            return self.update()
        self._attend(batch)
        own = batch if len(batch) else batch.borrowed()
        with self._replica.autocast():
            values = self._workload.update(self, own)
        self.gradient_update.commit()
        return self._means(values, own)

    def _means(self, values: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        weight = batch.count / self._share.total(batch)
        stacked = torch.stack([v.detach().reshape(()) for v in values.values()])
        stacked = stacked * weight if weight else torch.zeros_like(stacked)
        self._group.all_reduce(stacked).wait()
        return dict(zip(values, stacked.unbind(0), strict=True))

    def replicated(self) -> Iterable[Replicated]:
        held = self._replica.tensors()
        kept = self.gradient_update.shared_memory
        yield Replicated(self._group, held if kept is None else apart_from(kept, held))

    def state_dict(self) -> State:
        return self.gradient_update.add_kept(super().state_dict())

    def load_state_dict(self, state: State) -> None:
        self.gradient_update.loading()
        super().load_state_dict(state)
        self.gradient_update.load_kept(state)
        self.gradient_update.loaded()

    def rejoin(self, world: World) -> None:
        self._join_world(world)
        self._attendance.group = self._group
        if self._measured is not None:
            self._measured.start_over(world.rank, world.size)
        self._loss = None
        self.gradient_update.attach(world, self._group)

    def spent(self) -> Mapping[str, float]:
        own = super().spent()
        return {**own, "updating": own["updating"] + self.gradient_update.seconds}

    def held(self) -> Held:
        return held(self.model, self.optimizers, self.gradient_update.shared_memory)

    def close(self) -> None:
        self.gradient_update.close()
