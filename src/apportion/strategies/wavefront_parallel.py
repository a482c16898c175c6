"""wavefront_parallel: each worker holds layers of a recurrent net, and works one chunk of time behind the layer below.

Papers: Appleyard, Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016 (the
wavefront over layers and time); Wu et al., "Google's Neural Machine Translation System", 2016 (a layer a device);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021 (a device takes every n-th
layer, so that the ends are short).

::

    layer 1  rank 1            0  1  2  3 | loss |  3  2  1  0             gradients of layer 1's weights, update
    layer 0  rank 0         0  1  2  3                 3  2  1  0          of layer 0's
                            forward, chunk by chunk    backward, in reverse

Exact: state and gradient go from chunk to chunk as from moment to moment. What comes before the recurrent layers is on
the first layer's worker, what comes after them (and the loss) on the last one's.

Price, with L layers on n workers, T moments in chunks of k: ``t = t_step / n * (1 + (n - 1) / n * k n / (L T) * 2 / 3)
+ t_before + t_after + 2 (L - 1) B T H / bandwidth + 2 L T / (n k) * latency``. A third of the work, the gradients of
the weights, keeps no rank waiting.

Wins with two or more layers of about the same size, over long sequences: no batch is cut, so each product keeps all
its rows, and no weight travels. Loses where there are fewer layers than workers, where what comes before or after
(a large vocabulary) outweighs a layer, and to data_parallel at large batches, where rows are work enough for all.

A worker's death loses nothing on one host, but for a carried state: every worker keeps its part in memory that outlives
it, and the step under way is made again. Elsewhere, and with carry=, the run goes back to its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, Self, final

from torch import nn

from apportion.comm.world import World
from apportion.core.strategy import State, Step, Strategy
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Placement
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import LayerProfile, Profile
from apportion.cost_model.strategies.wavefront import Waves, wavefront
from apportion.parallel.partition.part import MakePart, Part, ReplicatedPart
from apportion.parallel.partition.partitioned_step import SplitStep
from apportion.parallel.recurrent.cut import cut
from apportion.parallel.recurrent.layer import chunk_length
from apportion.parallel.recurrent.wavefront import WavefrontPart
from apportion.parallel.replica.carried_state import Carry
from apportion.parallel.replica.step import reference


@final
@dataclass(frozen=True, repr=False)
class WavefrontParallel(Strategy):
    """Each worker computes layers of a recurrent net, chunk by chunk in time."""

    exact = True
    divides_batches = False
    splits = True
    survives = True

    chunk: int | None = None
    """The number of moments that go from layer to layer at once; None: by a rule (``recurrent_layer.chunk_length``)."""

    def __post_init__(self) -> None:
        self._must_be_whole("chunk")

    @classmethod
    def candidates(cls, profile: Profile, layout: Placement) -> Iterator[Self]:
        at = _recurrent(profile)
        if layout.ranks == 1 or at is None or profile.layers[at].stack < layout.ranks:
            return
        net = profile.layers[at]
        usual = _rule(net, profile.batch_size, layout)
        yield cls()
        for chunk in (usual // 2, usual * 2):
            if 2 <= chunk <= net.length // 2:
                yield cls(chunk=chunk)

    def cost(self, profile: Profile, layout: Placement) -> Cost:
        _refuse_on(layout.device(0).kind)
        _refuse_kind(profile.precision, profile.own_update)
        at = _recurrent(profile)
        if at is None:
            raise ValueError(
                f"{profile.name} has no recurrent layers (nn.LSTM, nn.GRU or nn.RNN) for wavefront_parallel to "
                "divide: use pipeline_parallel, layer_placement or data_parallel"
            )
        net = profile.layers[at]
        if net.stack < layout.ranks:
            raise ValueError(_too_few(net.name, net.stack, layout.ranks))
        length = self.chunk or _rule(net, profile.batch_size, layout)
        return wavefront(profile, layout, Waves(at, ceil(net.length / length), _late(net, layout)))

    def build(self, workload: Workload, world: World) -> Step:
        _refuse(workload, world)

        def part(world: World) -> MakePart:
            return lambda model, inputs: self._part(model, inputs, workload, world)

        return SplitStep(workload, world, part(world), again=part)

    def _part(self, model: nn.Module, inputs: Any, workload: Workload, world: World) -> Part:
        seen = Carry(workload.carry, world.device, workload.dtype) if workload.carry is not None else None
        found = cut(model, inputs, carry=None if seen is None else seen.fresh)
        layers = found.net.num_layers
        if layers < world.size:
            raise ValueError(_too_few(found.path or type(model).__name__, layers, world.size))
        if world.size == 1:
            return ReplicatedPart(model)
        return WavefrontPart(found, world.group(), self.chunk, seen)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def _refuse(workload: Workload, world: World) -> None:
    _refuse_on(world.device.type)
    _refuse_kind(workload.precision, workload.update is not None)


def _refuse_on(device: str) -> None:
    if device != "cpu":
        raise ValueError(
            f"device={device!r}: on a GPU, cuDNN runs the wavefront inside of nn.LSTM; use data_parallel, "
            'or device="cpu"'
        )


def _refuse_kind(precision: str, own_update: bool) -> None:
    if precision not in ("float32", "float64"):
        raise ValueError(
            f"precision={precision!r} has the recurrent kernel choose a type for each operation: "
            'use precision="float32", or data_parallel'
        )
    if own_update:
        raise ValueError(
            "update= asks for the gradient of a loss that only the last worker computes: use data_parallel"
        )


def _too_few(name: str, layers: int, ranks: int) -> str:
    return (
        f"{name} has num_layers={layers}, and each of {ranks} workers holds one at least: use workers<={layers}, or "
        "data_parallel"
    )


def _recurrent(profile: Profile) -> int | None:
    """Returns the first layer of the recurrent ones that follow each other; None: there is none."""
    return next((i for i, layer in enumerate(profile.layers) if layer.kind in ("LSTM", "GRU", "RNN")), None)


def _late(net: LayerProfile, layout: Placement) -> bool:
    """Tells whether a layer is made of matrix products, here (``recurrent_layer.layer``)."""
    return net.kind == "LSTM" and "AMD" not in layout.device(0).model


def _rule(net: LayerProfile, rows: int, layout: Placement) -> int:
    """Returns the moments of a chunk where the user does not say how many."""
    each = max(1, net.stack // layout.ranks)
    return chunk_length(net.length, rows, layout.ranks, each, short=_late(net, layout))
