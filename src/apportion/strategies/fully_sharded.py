"""fully_sharded: weights, gradients and optimizer slots spread over the ranks; each layer is gathered as it is needed.

Papers: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020 (stage 3);
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023. Built on torch's FSDP2,
``torch.distributed.fsdp.fully_shard``.

::

    rank 0: 1/2 of a layer \\                                                          / 1/2 of the gradient, update
                            gather -> forward -> drop ... gather -> backward -> sum
    rank 1: 1/2 of a layer /                                                          \\ 1/2 of the gradient, update

Exact, as data_parallel is: each rank takes a share of every batch, and its loss is weighted by its share of the terms.

Price: ``t = t_compute(B / n) + 3 (n - 1) / n * bytes(weights) / bandwidth + 3 messages a layer * latency``; each of k
``microbatches`` pays for its messages. Memory for each rank: ``(weights + gradient + slots) / n``, the largest layer
whole, and the activations of B / (n k) rows.

Between hosts the ranks of a host gather and sum in memory first, so that of h hosts each sends ``3 (h - 1) / h *
bytes(weights)`` a step, whatever the number of its ranks. On CPUs nothing of it goes on beside the computation: over a
slow cable data_parallel is faster wherever the network fits.

Wins when the network, or its optimizer's slots, do not fit one worker. Loses to data_parallel wherever they do: half as
much again goes over the wire, and a layer waits for its weights.

A worker's death ends the run with that worker's traceback, since the weights that it held are gone. What was learnt
since the last checkpoint is lost; from there the run resumes, on any number of workers and under any strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from apportion.comm.world import World
from apportion.core.data.acted import ActedDataset
from apportion.core.data.batch import Batch
from apportion.core.modes import refuse_making
from apportion.core.replica_digest import Replicated
from apportion.core.sampler import DataShard
from apportion.core.strategy import Held, State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_reduce
from apportion.cost_model.compute import call_seconds, computed, dealt, layer_seconds, updating
from apportion.cost_model.constraints import must_be_whole, must_feed
from apportion.cost_model.cost import Cost, MemoryUse, Span, activations, copies
from apportion.cost_model.profile import Profile
from apportion.cost_model.strategies import fully_sharded
from apportion.parallel.batch_coupling.analysis import refuse_coupling, whole_batch_functions
from apportion.parallel.batch_coupling.sync_batch_functions import use_whole_functions
from apportion.parallel.ops.sync_batch_norm import NonEmptyRanks, use_whole_batch
from apportion.parallel.replica.accumulation import batches_in
from apportion.parallel.replica.forward_state import moved_tensors
from apportion.parallel.replica.initial_model import refuse_written
from apportion.parallel.replica.replica import called
from apportion.parallel.replica.shardable import NOT_ELEMENTWISE, WHOLE_KERNEL, refuse_layers, refuse_optimizer
from apportion.parallel.replica.step import ReplicaStep, reference

if TYPE_CHECKING:
    from apportion.parallel.replica.fsdp import Sharded

STEP_CALLS, UNIT_CALLS, LAYER_CALLS = 100.0, 30.0, 30.0
"""The time of torch's Python, in ``Device.call_seconds``: of a step; of a unit each time that it is gathered or summed;
of a layer's update, whose weights are tensors in shards. Chosen so that the measured steps of a small MLP and of two
CNNs come out, where a call took 8 us."""


@final
@dataclass(frozen=True, repr=False)
class FullySharded(Strategy):
    """Each worker holds a share of the weights and computes a share of every batch."""

    exact = True
    imports = ("apportion.parallel.replica.fsdp",)

    min_num_params: int = 100_000
    """The number of parameters that a layer has at least to be gathered by itself; smaller ones travel with what they
    are part of."""
    microbatches: int = 1
    """The number of parts that a rank computes its share in, accumulating the gradient: less memory, the same
    result."""

    def __post_init__(self) -> None:
        self._must_be_whole("min_num_params", "microbatches")

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        self._refuse(profile, layout)
        n, parts = layout.ranks, self.microbatches
        rows = dealt(profile.batch_size, n)
        found = computed(profile, layout, rows, parts=parts)
        ahead, back = layer_seconds(profile, layout, rows[0] / parts, found.forward / parts, found.backward / parts)
        root, units = fully_sharded.units(profile, self.min_num_params, ahead, back)
        own_gpus = all(layout.device(r).kind == "cuda" for r in layout.kinds)
        timeline: tuple[Span, ...] = ()
        if n == 1:
            moving = 0.0
        elif own_gpus:
            moving, timeline = fully_sharded.overlapped(layout, root, units)
        else:
            moving = fully_sharded.in_turn(layout, root, units)
        counting = all_reduce(layout, range(n), 8.0 * (len(profile.layers) + 1))
        calls = STEP_CALLS + 3 * UNIT_CALLS * parts * len(units) + LAYER_CALLS * len(profile.layers)
        largest = max(unit.nbytes for unit in units)
        share = copies(profile, weights=1 / n, gradients=1 / n, slots=1 / n, buffers=2)
        whole = root + largest
        return Cost(
            terms={
                "computing": found.both,
                "updating": updating(profile, layout, profile.parameter_bytes / n) + calls * call_seconds(layout),
                "communicating": parts * moving + counting,
                "waiting": found.waiting,
                "loading": found.loading,
            },
            memory=MemoryUse(
                own={
                    **share,
                    "weights": share.get("weights", 0.0) + (whole if n > 1 else 0),
                    "gradients": share.get("gradients", 0.0) + (whole if n > 1 else 0),
                    "activations": activations(profile, rows[0] / parts),
                }
            ).a_worker(1),
            examples=profile.batch_size,
            timeline=timeline,
        )

    def _refuse(self, profile: Profile, layout: Placement) -> None:
        must_feed(profile, layout.ranks)
        for rank in layout.kinds:
            if layout.device(rank).kind == "cuda" and layout.together(rank) > 1:
                raise _shared(layout.ranks, len(set(layout.devices)))
        if profile.own_update:
            raise ValueError("update= asks for gradients of whole parameters, which no rank has: use data_parallel")
        if not profile.element_wise:
            raise ValueError(f"its optimizer is {NOT_ELEMENTWISE}, or data_parallel")
        if profile.whole_updates and layout.ranks > 1:
            raise ValueError(f"its optimizer has {WHOLE_KERNEL}")
        must_be_whole(profile, self.microbatches)

    def build(self, workload: Workload, world: World) -> Step:
        workload.must_feed(world.size)
        gpus = torch.cuda.device_count() if world.device.type == "cuda" else world.local_size
        if world.local_size > gpus:
            raise _shared(world.local_size, gpus)
        for given, why in (
            (workload.update is not None, "update= asks for gradients of whole parameters, which no rank has: use"),
            (workload.compile, "compile=True would compile weights that come and go: use compile=False, or"),
            (
                workload.precision == "float16",
                'precision="float16" scales the loss by what whole gradients overflow at: use "bfloat16", or',
            ),
        ):
            if given:
                raise ValueError(f"{why} data_parallel")
        if self.microbatches > 1 and workload.count is None:
            raise ValueError(
                f"microbatches={self.microbatches} would cut the batch under a loss that couples examples: "
                "use microbatches=1"
            )
        return FullyShardedStep(workload, world, self)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def _shared(workers: int, gpus: int) -> ValueError:
    return ValueError(
        f"{workers} workers would share {gpus} GPUs, and shards on one GPU save nothing: use workers<={max(gpus, 1)}"
    )


@final
class FullyShardedStep(ReplicaStep):
    """Computes this rank's share of each batch, with its share of the weights. A world of one has nothing to spread."""

    def __init__(self, workload: Workload, world: World, settings: FullySharded) -> None:
        self._world, self._settings = world, settings
        self._attendance = NonEmptyRanks(world.group())
        self._sharded: Sharded | None = None
        # A rank has no whole gradient to measure: clipping is between the sum and the update.
        self._clip = None if world.size == 1 else workload.clip_grad_norm
        super().__init__(workload if world.size == 1 else replace(workload, clip_grad_norm=None), world)
        if settings.microbatches * workload.accumulate > 1:
            self._replica.begin_batch(first=True)
        for optimizer in self.optimizers.values():
            refuse_optimizer(optimizer, alone=world.size == 1)

    def prepare(self, model: nn.Module) -> None:
        if isinstance(self.source.dataset, ActedDataset) and self._world.size > 1:
            raise ValueError(
                "fully_sharded cannot train on what its network does: each rank keeps a part of the network, and "
                "acting takes all of it; use data_parallel, parameter_server or hogwild"
            )
        refuse_layers(model, self._settings.microbatches * self._workload.accumulate)
        functions = self._functions(model)
        if self._world.size > 1:
            from apportion.parallel.replica.fsdp import Sharded  # see ``imports``

            refuse_making(model, "no rank has whole weights")
            use_whole_batch(model, self._attendance)
            use_whole_functions(model, functions, self._attendance)
            # A forward that moves a teacher writes to gathered weights, which are let go: every rank keeps those whole.
            batch = self.source.at(0, DataShard())
            trained = [p for p in model.parameters() if p.requires_grad]
            found = moved_tensors(model, trained, lambda: called(self._workload, model, batch, self.device))
            refuse_written(model, lambda: called(self._workload, model, batch, self.device))
            whole = [place.tensor for place in found if place.parameter]
            self._sharded = Sharded(model, self._world, self._settings.min_num_params, whole)

    def _functions(self, model: nn.Module) -> list[str]:
        """Returns the modules that take batch statistics by a function."""
        many, workload = self._settings.microbatches, self._workload
        if many > 1 or workload.accumulate > 1:
            strategy = f"fully_sharded(microbatches={many})" if many > 1 else f"accumulate={workload.accumulate}"
            refuse_coupling(model, workload, self.source.sample, strategy=strategy)
        elif self._world.size > 1:
            return whole_batch_functions(model, workload, self.source.sample, strategy="fully_sharded")
        return []

    def predict(self, batch: Batch) -> Any | None:
        self._attendance.present = len(batch) > 0
        with _layers_called():
            outputs = self._replica.predict(batch if len(batch) else batch.borrowed())
        if self._sharded is not None:
            self._sharded.let_go()
        return outputs if len(batch) else None

    def backward(self, batch: Batch) -> Tensor | None:
        self._replica.reseed(batch.step)
        self._own_rows = len(batch)
        total = self._share.total(batch if len(batch) else batch.borrowed())
        sums, weight = [], 0.0
        for number, (part, own) in enumerate(self._parts(batch)):
            if number:
                self._replica.again(batch.step)
            self._attendance.present = own
            with _layers_called():
                loss, share = self._share.weighted_loss(part, own=own, total=total)
                self._replica.backward(loss, share)
            sums.append(loss.detach() * share)
            weight += share
        self._loss = sum(sums[1:], sums[0])
        return self._loss / weight if len(batch) and weight else None

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, bool]]:
        """Yields as many parts on every rank, since each gathers every layer: this rank's own, and then borrowed
        ones."""
        parts = self._settings.microbatches * batches_in(batch, self._workload)
        many = min(parts, -(-batch.size // self._group.size))
        own = batch.parts(many) if len(batch) else []
        yield from ((part, True) for part in own)
        yield from ((batch.borrowed(), False) for _ in range(many - len(own)))

    def reduce_gradients(self, loss: Tensor) -> Tensor:
        loss = loss * self._share.reported_factor()
        if self._sharded is not None:
            loss = self._sharded.sum(loss)
            if self._clip is not None:
                self._sharded.clip_grad_norm(self._replica.trainable(), self._clip)
        return loss

    def state_dict(self) -> State:
        state = super().state_dict()
        return state if self._sharded is None else self._sharded.whole(state)

    def replicated(self) -> Iterable[Replicated]:
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        held = self._replica.tensors()
        yield Replicated(self._group, {k: t for k, t in held.items() if k.removeprefix("model/") in buffers})

    def load_state_dict(self, state: State) -> None:
        if self._sharded is not None:
            state = self._sharded.spread(state, self.optimizers)
        super().load_state_dict(state)

    def committed(self) -> None:
        """The state without any other rank, which no rank has: None."""

    def held(self) -> Held:
        if self._sharded is None:
            return super().held()
        return Held(0, self._sharded.nbytes(slot for _, slot in self._replica.optimizers.slots()))


@contextmanager
def _layers_called() -> Iterator[None]:
    """Raises a ValueError that says what to do where a layer's weights are used and the layer is not called, so that
    they were not gathered."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ValueError(
            "the weights of a layer are used without calling the layer, and are in shards then: call it, make "
            "min_num_params= larger than the layer, or use data_parallel"
        ) from error
