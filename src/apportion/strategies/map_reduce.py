"""map_reduce: the gradient of a batch of any size, of the whole training set if you like, as a weighted sum over parts.

Paper: Chu, Kim, Lin, Yu, Bradski, Ng and Olukotun, "Map-Reduce for Machine Learning on Multicore", NIPS 2006: whatever
an algorithm asks of the data as a sum over examples can be mapped to workers and reduced.

::

    batch of B    rank 0: part, part, ...  \\                    / update
                           each loaded,     sum of count * grad
                           summed, dropped  over all parts
                  rank 1: part, part, ...  /                    \\ update, or the next evaluation of a line search

Exact: each part's mean has the weight of its count, so parts may be uneven. A rank holds one part of ``part`` examples
at a time, whatever the batch: with ``batch_size`` the size of the training set this is gradient descent, and under
torch's L-BFGS every evaluation of the loss is such a pass over the data (``step.backward`` is its closure).

Price: ``t = passes * (t_loading(B / n) + t_compute(B / n) + 2 (n - 1) / n * bytes(gradient) / bandwidth) + t_update +
bytes(state) / memory bandwidth``; one pass an update, with L-BFGS as many as it evaluates. Memory: weights, gradient,
optimizer and one part on each worker; and two copies of the state that all have in common.

Wins for full-batch methods on data that do not fit the memory. Loses where a small batch would do: stochastic steps
learn far more from a pass over the data.

A worker's death, or that of all of them, loses the passes of the update under way. They are made again from the last
update, which lies in shared memory (``parallel/replica/committed_state.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.strategy import Recoverable, State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_reduce
from apportion.cost_model.compute import computed, dealt
from apportion.cost_model.constraints import must_feed
from apportion.cost_model.cost import Cost, MemoryUse, copies, of_replica
from apportion.cost_model.profile import Profile
from apportion.errors import StateLost
from apportion.parallel.batch_coupling.analysis import refuse_coupling
from apportion.parallel.replica.committed_state import CommittedState
from apportion.parallel.replica.gradient_buckets import LARGE_BYTES, GradientHooks, GradientSum
from apportion.parallel.replica.initial_model import refuse_renormalising
from apportion.parallel.replica.step import ReplicaStep, reference

STEP_CALLS, PART_CALLS, LAYER_CALLS = 10.0, 5.0, 2.0
"""The time of Python, in ``Device.call_seconds``: of a step (the state is kept, and its tensors are found by name), of
a part of the batch, and for each layer. Chosen so that the measured step of the digits comes out, where a call took 8
us."""


@final
@dataclass(frozen=True, repr=False)
class MapReduce(Strategy):
    """Each worker goes through its share of the batch in parts; the gradient is the sum over all of them."""

    exact = True
    survives = True
    deals_parts = True

    part: int = 1024
    """The number of examples that a worker has in memory at once."""

    def __post_init__(self) -> None:
        self._must_be_whole("part", unit="example")

    @property
    def recovers_across_hosts(self) -> bool:
        return False

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        """Yields the strategy at any batch, since its step is exact: that a small one is better left to data_parallel,
        the prices say."""
        if layout.ranks > 1:
            yield cls()

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        must_feed(profile, layout.ranks)
        _refuse_whole(not profile.cut_by_rows, profile.own_update, profile.carries)
        if profile.batch_norm:
            raise ValueError(
                "map_reduce would give batch normalisation the statistics of a part of the batch: use a normalisation "
                "that looks at one example (GroupNorm, LayerNorm), or data_parallel"
            )
        rows, device, together = dealt(profile.batch_size, layout.ranks), layout.device(0), layout.together(0)
        parts, state = math.ceil(rows[0] / self.part), profile.parameter_bytes * (1 + profile.slots)
        found = computed(profile, layout, rows, parts=parts)
        rate = device.rate(layout.threads, together).bytes_per_second
        alone = device.rate(layout.threads, 1).bytes_per_second
        keeping = 4 * state / alone if len(layout.hosts) == 1 else 0.0  # by one rank; the others begin, and wait for it
        calls = (STEP_CALLS + PART_CALLS * parts + LAYER_CALLS * len(profile.layers)) * device.call_seconds
        packed = sum(layer.parameter_bytes for layer in profile.layers if layer.parameter_bytes < LARGE_BYTES)
        packing = 2 * packed / rate if layout.ranks > 1 else 0.0  # small gradients travel side by side
        update = profile.update_seconds(device, threads=layout.threads, together=together)
        return Cost(
            terms={
                "computing": found.both,
                "updating": update + keeping + calls,
                "communicating": packing + all_reduce(layout, range(layout.ranks), profile.parameter_bytes),
                "waiting": found.waiting,
                "loading": found.loading,
            },
            memory=MemoryUse(
                own=of_replica(profile, min(rows[0], self.part)),
                shared=copies(profile, weights=2, slots=2, buffers=2) if len(layout.hosts) == 1 else {},
            ).a_worker(layout.ranks),
            examples=profile.batch_size,
        )

    def build(self, workload: Workload, world: World) -> Step:
        workload.must_feed(world.size)
        _refuse_whole(workload.count is None, workload.update is not None, workload.carry is not None)
        return MapReduceStep(workload, world, self.part)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


@final
class MapReduceStep(ReplicaStep, Recoverable):
    """Computes this rank's parts of each batch, and the update that is the same on all ranks."""

    deals_parts = True
    repeats = True

    def __init__(self, workload: Workload, world: World, part: int) -> None:
        self._part, self._looks = part, not world.under_way
        super().__init__(workload, world)
        self._replica.begin_batch(first=True)
        sparse: list[Any] = [
            m.weight for m in self.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        ]
        if world.size > 1:
            refuse_renormalising(self.model, "each rank would rescale what its own examples look up")
        self._sum = GradientSum(
            self._replica.trainable(), self._group, sparse=sparse, optimizers=[*self.optimizers.values()]
        )
        self._trained = {p: self._replica.names[p] for p in self._replica.trainable() if self._divides}
        self._hooks = GradientHooks((name, p) for p, name in self._trained.items())
        self._before: State | None = None
        """The state that an optimizer started from, while it searches."""
        self._committed = CommittedState(world) if world.members is not None else None

    @property
    def _divides(self) -> bool:
        most = min(self._workload.update_size, self.source.deal.examples)
        return self._group.size > 1 or self._part < most

    def prepare(self, model: nn.Module) -> None:
        _refuse_batch_norm(model)
        if self._divides and self._looks:
            refuse_coupling(model, self._workload, self.source.sample, strategy="map_reduce")

    @collective
    def backward(self, batch: Batch) -> Tensor:
        """Makes one pass: ``p.grad`` becomes the gradient of the whole global batch, on every rank; returns its mean
        loss. Called by all ranks. This is the closure of an optimizer that asks for one: ``optimizer.step(lambda:
        step.backward(b))``.
        """
        replica = self._replica
        replica.reseed(batch.step)
        replica.begin_batch()
        self._batch = batch
        for p in replica.trainable():
            p.grad = None
        # Weighted by the share of the rows at first: how many loss terms there are is only known at the end.
        mean, count = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        for number, part in enumerate((batch if len(batch) else batch.borrowed()).stream(self._part)):
            if number:  # what the forward pass changes is changed once a step, not once a part
                replica.again(batch.step)
            with replica.autocast():
                loss, terms = self._loss_of(part)
            replica.backward(loss, terms / batch.size)
            mean += loss.detach() * (terms / batch.size)
            count += terms
        self._loss = self._reduce(mean, count, batch)
        if self._hooks:
            self._hooks(self._trained)
        return self._loss

    def _loss_of(self, part: Batch) -> tuple[Tensor, float]:
        """Returns the mean loss of a part, and how many terms it is the mean of."""
        outputs, count = self._replica.outputs(part), part.count
        if count:
            return self._replica.loss(outputs, part.targets), count
        # No terms: a mean of nothing is a NaN, and 0 times NaN is one too. Zero, through the same layers.
        return torch.stack([(t * 0.0).sum() for t in tree.tensors(outputs) if t.is_floating_point()]).sum(), 0.0

    def _reduce(self, mean: Tensor, count: float, batch: Batch) -> Tensor:
        """Sums gradients and losses over all ranks, and divides them by the number of terms."""
        loss = self._sum(mean, 1.0)
        if batch.counts_rows:
            return loss
        total = torch.tensor([count], dtype=torch.float64, device=self.device)
        self._group.all_reduce(total).wait()
        scale = batch.size / (total.item() or 1.0)
        for p in self._replica.trainable():
            if p.grad is not None:
                p.grad.mul_(scale)
        return loss * scale

    def update(self) -> Mapping[str, Tensor]:
        if self._replica.optimizers.searching:  # it moves the weights between passes, where the state may be asked for
            self._before = self._replica.state()
        values = super().update()
        self._before = None
        self._keep()
        return values

    def _keep(self) -> None:
        """Keeps this state as the one to go on from. All ranks have the same: one writes it, and has it before it
        reports."""
        if self._committed is not None and self.rank == 0:
            self._committed.write(self._replica.state())

    def load_state_dict(self, state: State) -> None:
        self._load(state)
        self._keep()

    def _load(self, state: State) -> None:
        self._batch = self._loss = self._before = None
        super().load_state_dict(state)
        for p in self.model.parameters():
            p.grad = None

    def rejoin(self, world: World) -> None:
        assert self._committed is not None, "a launcher that replaces workers holds memory for them"
        state = self._committed.read()
        if state is None:
            raise StateLost("a worker was lost before the first update: there is nothing to go on from")
        # A rank that was one update further, because rank 0 died before it had kept that, makes it again.
        self._load(state)
        self._join_world(world)
        self._sum.rejoin(self._group)

    def committed(self) -> State | None:
        before = self._before
        return before if before is not None else super().committed()


def _refuse_whole(couples: bool, own_update: bool, carries: bool) -> None:
    for given, what in (
        (couples, "a loss that couples examples"),
        (own_update, "an update= of your own"),
        (carries, "a recurrent state that is carried along"),
    ):
        if given:
            raise ValueError(f"map_reduce sums over parts of the batch, which {what} is not: use data_parallel")


def _refuse_batch_norm(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"map_reduce would give {name} the statistics of a part of the batch: use a normalisation that looks "
                "at one example (GroupNorm, LayerNorm), or data_parallel"
            )
