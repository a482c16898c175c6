"""The cost of a step on a mesh of three axes: layers sliced over ranks, stages of a pipeline, replicas of it all.

Papers: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.

::

    stage 0                  stage 1                      rank = slice + slices * (replica + replicas * stage)
    slice 0   slice 1        slice 0   slice 1
      0 --sum-- 1   ------>    4 --sum-- 5    replica 0
      2 --sum-- 3   ------>    6 --sum-- 7    replica 1

Price, of m micro-batches through stages that take T each: ``t = sum T + (m - 1) max T + all_reduce(gradients of a
stage) + update``. In T a layer that is cut by its inputs sums its outputs over the slices, and one that is cut by its
units sums its input's gradient, where that is not in slices; a message goes to the next stage and one back.

No strategy here cuts all three ways at once, so no plan asks for this: it holds the terms that prices are made of
against iterations on such meshes that others have published (vTrain's, ``benchmarks/lib/vtrain.py``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from apportion.cost_model.cluster import Placement
from apportion.cost_model.collectives import all_reduce, message
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import LayerProfile, Profile


class _Work(NamedTuple):
    """Layers that are priced once because they have the same sizes and times."""

    layer: LayerProfile
    times: int
    share: float
    """The share of a layer that each slice computes."""


class _Content(NamedTuple):
    """The layers and sums of a stage; bytes are of the whole batch."""

    works: tuple[_Work, ...]
    sums: Counter[int]
    """The number of sums over slices by their bytes, forward and backward."""
    parameter_bytes: float
    """The bytes of weights on each rank."""
    kept_bytes: float


class _Seconds(NamedTuple):
    """The seconds of one micro-batch in a stage."""

    computing: float
    communicating: float

    @property
    def both(self) -> float:
        return self.computing + self.communicating


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The layout of a workload on ``slices * replicas * stages`` ranks."""

    profile: Profile
    slices: int = 1
    replicas: int = 1
    begins: tuple[int, ...] = (0,)
    """The layers that the stages begin with."""
    microbatch: int
    """The number of examples in each micro-batch."""

    def __post_init__(self) -> None:
        each, over = divmod(self.profile.batch_size, self.replicas * self.microbatch)
        if each < 1 or over:
            raise ValueError(
                f"batch_size={self.profile.batch_size} must be a multiple of {self.replicas} replicas times "
                f"micro-batches of {self.microbatch}"
            )
        if self.begins[0] != 0 or list(self.begins) != sorted({*self.begins} & {*range(len(self.profile.layers))}):
            raise ValueError(f"begins={self.begins} must rise from 0, below {len(self.profile.layers)} layers")

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return len(self.begins)

    @property
    def ranks(self) -> int:
        """The number of ranks that the mesh needs."""
        return self.slices * self.replicas * self.stages

    @property
    def microbatches(self) -> int:
        """The number of micro-batches that follow each other in a step."""
        return self.profile.batch_size // (self.replicas * self.microbatch)

    def rank(self, slice_: int = 0, replica: int = 0, stage: int = 0) -> int:
        """The rank at a place on the three axes: slices, which talk most, are neighbours."""
        return slice_ + self.slices * (replica + self.replicas * stage)

    def cost(self, layout: Placement) -> Cost:
        """The cost of one step. ValueError where the layout has another number of ranks."""
        if layout.ranks != self.ranks:
            raise ValueError(
                f"{layout.ranks} ranks for {self.slices} slices x {self.replicas} replicas x {self.stages} stages: "
                f"it needs {self.ranks}"
            )
        stages = [self._seconds(layout, s) for s in range(self.stages)]
        slowest = max(stages, key=lambda stage: stage.both)
        terms = {
            "computing": self.microbatches * slowest.computing,
            "communicating": self.microbatches * slowest.communicating
            + max(self._gradients(layout, s) for s in range(self.stages)),
            "bubble": sum(stage.both for stage in stages) - slowest.both,
            "updating": max(self._update(layout, s) for s in range(self.stages)),
        }
        return Cost(terms=terms, memory=self._memory, examples=self.profile.batch_size)

    def _seconds(self, layout: Placement, stage: int) -> _Seconds:
        ranks = tuple(self.rank(i, 0, stage) for i in range(self.slices))
        device, together = layout.device(ranks[0]), layout.together(ranks[0])
        content = self._contents[stage]
        computing = sum(
            work.times
            * self.profile.layer_seconds(
                work.layer,
                device,
                rows=self.microbatch,
                threads=layout.threads,
                together=together,
                way=work.layer.ways[0] if work.share < 1 else "",
                share=work.share,
            ).both
            for work in content.works
        )
        part = self.microbatch / self.profile.batch_size
        sums = sum(times * all_reduce(layout, ranks, part * nbytes) for nbytes, times in content.sums.items())
        messages = 0.0
        for there in (stage - 1, stage + 1):
            if 0 <= there < self.stages:  # outputs go on, gradients of what came in go back
                crossing = self.profile.crossing_bytes[self.begins[max(stage, there)]]
                messages += message(layout, ranks[0], self.rank(0, 0, there), part * crossing)
        return _Seconds(computing, sums + messages)

    def _gradients(self, layout: Placement, stage: int) -> float:
        ranks = tuple(self.rank(0, r, stage) for r in range(self.replicas))
        return all_reduce(layout, ranks, self._contents[stage].parameter_bytes)

    def _update(self, layout: Placement, stage: int) -> float:
        rank = self.rank(0, 0, stage)
        return self.profile.update_seconds(
            layout.device(rank),
            threads=layout.threads,
            together=layout.together(rank),
            nbytes=self._contents[stage].parameter_bytes,
        )

    @cached_property
    def _memory(self) -> dict[str, int]:
        """The memory of a rank of the heaviest stage. 1F1B keeps as many micro-batches as there are stages to go."""
        part = self.microbatch / self.profile.batch_size
        every = []
        for stage, content in enumerate(self._contents):
            weights = round(content.parameter_bytes)
            at_once = min(self.stages - stage, self.microbatches)
            every.append(
                {
                    "weights": weights,
                    "gradients": weights,
                    "slots": weights * self.profile.slots,
                    "activations": round(content.kept_bytes * part * at_once),
                }
            )
        return max(every, key=lambda memory: sum(memory.values()))

    @cached_property
    def _contents(self) -> tuple[_Content, ...]:
        ends = (*self.begins[1:], len(self.profile.layers))
        return tuple(self._content(begin, end) for begin, end in zip(self.begins, ends, strict=True))

    def _content(self, begin: int, end: int) -> _Content:
        """The content of a stage of these layers, in which layers with the same sizes and times are priced once."""
        alike: dict[tuple[object, ...], list[LayerProfile]] = {}
        sums: Counter[int] = Counter()
        for layer in self.profile.layers[begin:end]:
            key = layer.kind, layer.ways, layer.flops, layer.activation_bytes, layer.parameter_bytes, layer.timings
            alike.setdefault(key, []).append(layer)
            if self.slices > 1:
                sums.update(self._sums(layer))
        works = tuple(_Work(same[0], len(same), 1 / self.slices if same[0].ways else 1.0) for same in alike.values())
        return _Content(
            works=works,
            sums=sums,
            parameter_bytes=sum(work.times * work.share * work.layer.parameter_bytes for work in works),
            kept_bytes=sum(work.times * work.share * work.layer.kept_bytes for work in works),
        )

    def _sums(self, layer: LayerProfile) -> list[int]:
        """The bytes that slices of this layer sum: its outputs, or the gradients of inputs that are not in slices."""
        if not layer.ways:
            return []
        if _gives_terms(layer):
            return [layer.activation_bytes]
        inputs = [self._layers[name] for name in layer.inputs if name in self._layers]
        return [one.activation_bytes for one in inputs if not one.ways or _gives_terms(one)]

    @cached_property
    def _layers(self) -> dict[str, LayerProfile]:
        return {layer.name: layer for layer in self.profile.layers}


def _gives_terms(layer: LayerProfile) -> bool:
    """Does each slice make a term of all outputs? An embedding that is cut by vocabulary has zeros for the words of the
    other slices."""
    return "inputs" in layer.ways or layer.kind == "Embedding"
