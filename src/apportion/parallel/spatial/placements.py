"""The parts of a cut network that a rank holds, as its first run shows: which weights it uses on its strips alone,
which every rank uses on the same values, and of which it keeps a slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from apportion.comm.group import Group
from apportion.core.torch_private import BatchNormBase
from apportion.parallel.ops.sync_batch_norm import NonEmptyRanks
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.spatial.geometry import RowRange
from apportion.parallel.spatial.strip import SpatialShard, gathered, shared


@dataclass(frozen=True)
class _Slice:
    owner: nn.Module
    attribute: str
    dim: int
    positions: Sequence[int]


@dataclass
class SpatialPlan:
    """The plan of one rank: how it uses and holds the network. While ``planning``, what is used is noted, and slices
    are views of what is whole."""

    model: nn.Module
    group: Group
    split: str
    planning: bool = True
    partial: set[str] = field(default_factory=set)
    """Parameters that are used on strips: each rank's gradient is a term of a sum."""
    alike: set[str] = field(default_factory=set)
    """Parameters that every rank uses on the same values."""
    grouped: bool = False
    """True if the network has a convolution with groups."""
    norms: list[BatchNormBase] = field(default_factory=list)
    """The layers whose statistics are those of all ranks."""

    def __post_init__(self) -> None:
        self.attendance = NonEmptyRanks(self.group)
        self.names = {id(t): name for name, t in self.model.named_parameters()}
        self._places: dict[int, list[str]] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            self._places.setdefault(id(p), []).append(name)
        self._modules = {id(module): name for name, module in self.model.named_modules()}
        self._alike_layers: set[int] = set()
        self._slices: dict[str, _Slice] = {}
        self._whole: dict[str, tuple[int, ...]] = {}

    @property
    def spatial(self) -> bool:
        """True if images are cut, and not their channels."""
        return self.split in ("height", "width")

    def image_dim(self, dims: int) -> int:
        """The dimension of (batch, channels, *image) that is cut, in an image of ``dims`` dimensions; an image of one
        dimension has only that one."""
        return dims + 1 if self.split == "width" or dims == 1 else dims

    def used_on_strips(self, t: Any) -> Any:
        """Note that a tensor which all ranks have is used on strips, and return it."""
        if not isinstance(t, Tensor):
            return t
        if id(t) not in self.names:
            return shared(t, self.group)
        if self.planning:
            self.partial.add(self.names[id(t)])
        return t

    def used_alike(self, of: nn.Module | Tensor) -> None:
        """Note that a layer or a tensor was used on what every rank has."""
        if self.planning:
            self._alike_layers.add(id(of))
            used = of.parameters() if isinstance(of, nn.Module) else [of]
            self.alike.update(self.names[id(p)] for p in used if id(p) in self.names)

    def on_all(self, layer: nn.Module, x: Any) -> Any:
        """Run the plain layer on the whole tensor, on every rank."""
        self.used_alike(layer)
        return layer(gathered(x, self.group) if isinstance(x, SpatialShard) else x)

    def parameter_slice(self, owner: nn.Module, attribute: str, dim: int, positions: Sequence[int] | None) -> Tensor:
        """The slice that this rank has of a layer's parameter or buffer; after the first run the layer has that slice
        alone. None: all positions, used on the same values by all ranks."""
        tensor: Tensor = getattr(owner, attribute)
        if positions is None:
            self.used_alike(tensor)
            return tensor
        name = f"{self._modules[id(owner)]}.{attribute}".lstrip(".")
        noted = self._slices.get(name)
        if noted is not None and (noted.dim, noted.positions) != (dim, positions):
            raise ValueError(
                f"{name} is cut where the image has other rows (or the network other channels) than at first: "
                "use images of one size, or data_parallel"
            )
        if not self.planning:
            return tensor
        if len(self._places.get(id(tensor), [])) > 1:
            places = " and ".join(self._places[id(tensor)])
            raise ValueError(f"{places} are one tensor, of which this rank would keep a slice: use data_parallel")
        self._slices[name] = _Slice(owner, attribute, dim, positions)
        self._whole[name] = tuple(tensor.shape)
        return rows_of(tensor, dim, positions)

    @torch.no_grad()
    def cut(self) -> dict[str, TensorShard]:
        """End the planning, and give layers their slices; returns what is held, by plain name."""
        self.planning = False
        for layer in self.norms:
            if id(layer) in self._alike_layers:
                raise ValueError(
                    f"{self._modules[id(layer)]} normalises this rank's part of the image, and what all ranks compute "
                    "alike, which would count once for each rank; use data_parallel"
                )
        both = sorted((self.partial & self.alike) | (set(self._slices) & (self.partial | self.alike)))
        if both:
            raise ValueError(
                f"{both[0]} is used on this rank's part of the image, and on what all ranks compute alike: "
                "its gradient would be a sum of both kinds; use data_parallel"
            )
        pieces = {}
        for name, of in self._slices.items():
            whole: Tensor = getattr(of.owner, of.attribute)
            own = rows_of(whole, of.dim, of.positions).clone()
            if isinstance(whole, nn.Parameter):
                setattr(of.owner, of.attribute, nn.Parameter(own, requires_grad=whole.requires_grad))
            else:
                of.owner.register_buffer(of.attribute, own)
            shape = self._whole[name]
            index: list[Sequence[int]] = [range(n) for n in shape]
            index[of.dim] = of.positions
            pieces[name] = TensorShard(shape, tuple(index))
        self.names = {id(p): name for name, p in self.model.named_parameters()}
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        return pieces | {name: TensorShard(shapes[name], None, True) for name in sorted(self.partial)}


def rows_of(tensor: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """The elements at these positions of a dimension."""
    if isinstance(positions, range) and positions.step == 1:
        return tensor.narrow(dim, positions.start, len(positions))
    return tensor.index_select(dim, torch.tensor(positions, dtype=torch.int64, device=tensor.device))


def positions(rows: RowRange) -> range:
    return range(rows.start, rows.stop)
