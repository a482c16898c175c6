"""The layout of the weights of a host in memory: two versions of weights, optimizer slots and buffers, and one word
that says which of them is live.

::

    version 0   weights | slots | buffers | counts       commit word c: version c % 2 is live,
    version 1   weights | slots | buffers | counts       and is what c updates have made
    gradient of rank 0, of rank 1, ...                   written by that rank alone
    inputs and output gradients of each factored layer   rows of the whole batch, each written by its rank

The memory belongs to the host's supervisor and outlives any worker. No process writes the live version, so a worker
that dies in the middle of an update leaves the last whole one behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from apportion.comm.shared_layout import TensorRegion, TensorRegions
from apportion.comm.sync import round_up
from apportion.parallel.optim.elementwise import ElementwiseRule

VERSIONS = 2


@dataclass(frozen=True, eq=False)
class SharedRegion:
    """The parameters of one optimizer group and type, one after the other."""

    group: int
    """The number of the optimizer's group: a number, since loading a state makes new groups."""
    rule: ElementwiseRule
    dtype: torch.dtype
    parameters: tuple[int, ...]
    """The numbers of the parameters: their places in the model's order of those that the optimizer has."""
    starts: tuple[int, ...]
    """The element at which each parameter begins."""
    length: int

    def number_at(self, element: int) -> int:
        """Return which of ``parameters`` an element belongs to, or the gap after it."""
        found = 0
        for k, start in enumerate(self.starts):
            found = k if start <= element else found
        return found


@dataclass(frozen=True)
class FactoredLayer:
    """A Linear layer whose gradient is made from what the ranks exchange instead: its inputs and output gradients."""

    parameter: int
    """The number of the layer's weight among the parameters."""
    inputs: int
    outputs: int
    dtype: torch.dtype


@dataclass
class SharedLayout:
    """The layout of everything in the shared memory."""

    regions: list[SharedRegion]
    buffers: list[tuple[torch.Size, torch.dtype]]
    layers: list[FactoredLayer]
    rows: int
    """The rows of a global batch, for which a factored layer has room."""
    parameters: int
    workers: int
    carried: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    """The shape and type of each leaf of the recurrent state of all lanes."""
    frozen: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    """The shape and type of each parameter that no optimizer has. Where no forward pass moves them, their memory is
    never touched, and costs nothing."""
    _all: TensorRegions = field(default_factory=TensorRegions)
    _by_name: dict[str, TensorRegion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = VERSIONS
        self._add_versions()
        self.versions_bytes = self.nbytes
        """The bytes of both versions; the rest is where a step's gradients pass through."""
        for version in range(self.versions):
            for k, (shape, dtype) in enumerate(self.frozen):
                self._add(f"frozen/{version}/{k}", dtype, shape.numel())
        for worker in range(self.workers):
            for r, region in enumerate(self.regions):
                self._add(f"gradient/{worker}/{r}", region.dtype, region.length)
        for k, layer in enumerate(self.layers):
            self._add(f"inputs/{k}", layer.dtype, self.rows * layer.inputs)
            self._add(f"outputs/{k}", layer.dtype, self.rows * layer.outputs)

    def _add_versions(self) -> None:
        self._add("head", torch.int64, 8)
        self._add("line", torch.float64, 8 * self.workers)
        self._add("used", torch.uint8, self.parameters * self.workers)
        self._add("rows", torch.int64, 3 * len(self.layers) * self.workers)
        for version in range(self.versions):
            self._add(f"counts/{version}", torch.int64, self.parameters)
            for r, region in enumerate(self.regions):
                for part in ("weights", *region.rule.slots):
                    self._add(f"{part}/{version}/{r}", region.dtype, region.length)
            for b, (shape, dtype) in enumerate(self.buffers):
                self._add(f"buffer/{version}/{b}", dtype, shape.numel())
            self._add(f"reported/{version}", torch.uint8, len(self.buffers) + len(self.frozen))
            for k, (shape, dtype) in enumerate(self.carried):
                self._add(f"carried/{version}/{k}", dtype, shape.numel())

    def _add(self, name: str, dtype: torch.dtype, numel: int) -> None:
        self._by_name[name] = self._all.add(dtype, numel)

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return self._all.nbytes

    def tensor(self, memory: memoryview, name: str) -> Tensor:
        """Return one of the layout's parts as a flat tensor."""
        return self._by_name[name].of(memory)


def regions_of(
    groups: Sequence[tuple[Mapping[str, Any], ElementwiseRule]], parameters: Sequence[nn.Parameter]
) -> list[SharedRegion]:
    """Return the regions of the parameters by optimizer group and type, in the order in which the optimizer has
    them."""
    numbers = {p: i for i, p in enumerate(parameters)}
    regions = []
    for number, (group, rule) in enumerate(groups):
        own = [p for p in group["params"] if p in numbers]
        for dtype in dict.fromkeys(p.dtype for p in own):
            starts, end = [], 0
            same = [p for p in own if p.dtype == dtype]
            for p in same:
                starts.append(end)
                end += round_up(p.numel() * dtype.itemsize) // dtype.itemsize
            regions.append(SharedRegion(number, rule, dtype, tuple(numbers[p] for p in same), tuple(starts), end))
    return regions


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return tensor.layout is torch.strided and tensor.numel() > 0


def shaped(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the elements from ``start`` on, in the shape and order of another tensor."""
    return flat[start : start + like.numel()].as_strided(like.shape, like.stride())
