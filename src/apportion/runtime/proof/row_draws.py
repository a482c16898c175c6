"""Random numbers of a proof that are a function of the row that they are drawn for, so that every number of ranks
draws the same for the same row.

The rows of a layer's inputs are distinguished by what they hold, up to rounding. A draw that has the rows of the inputs
in its first dimension is then made row by row, each from a seed of its own. A layer whose draws the user has accepted
(``Workload.per_rank_draws``) draws one number for all rows instead, since its draws may have any shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apportion.core import tree
from apportion.core.rng import mix

GRID = 1e4
"""The number of steps to 1 at which a projection of a row is distinguished from another: far above rounding."""
MOST_PAIRS = 4096
"""The most pairs of rows for which numbers are drawn pair by pair."""
TOGETHER = ("multinomial",)
"""The operations of which a whole row of the first dimension is one draw."""
Seed = int


class RowSeeds:
    """The seeds of the rows of one call's inputs, found out when something is drawn."""

    def __init__(self, inputs: Any) -> None:
        self._inputs = inputs
        self._tensors: list[Tensor] | None = None
        self._known: dict[int, list[Seed]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the first two dimensions, of which either may be that of the rows; of the first alone where the
        inputs have no more than two; empty where the inputs have no rows."""
        tensors = self._found()
        return tuple(tensors[0].shape[: 2 if tensors[0].ndim > 2 else 1]) if tensors else ()

    def for_dims(self, dims: int) -> list[Seed]:
        """Returns the seeds of the places of the first ``dims`` dimensions, in row-major order."""
        if dims not in self._known:
            self._known[dims] = _seeds(self._found(), dims)
        return self._known[dims]

    def _found(self) -> list[Tensor]:
        if self._tensors is None:
            plain = [t for t in tree.tensors(self._inputs) if t.layout is torch.strided and t.ndim]
            self._tensors = [t.detach() for t in plain if t.shape[0] == plain[0].shape[0]]
            self._inputs = None
        return self._tensors


def _seeds(tensors: Sequence[Tensor], dims: int) -> list[Seed]:
    seeds: list[list[int]] = []
    for number, tensor in enumerate(tensors):
        if tuple(tensor.shape[:dims]) != tuple(tensors[0].shape[:dims]):
            continue
        wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = wide.to("cpu", torch.float64).reshape(tensors[0].shape[:dims].numel(), -1)
        ways = _ways(flat.shape[1], number)
        size = flat.abs().sum(1, keepdim=True).clamp_min(1e-300)
        # Ranks compute a row with different roundings; a coarse grid of two projections gives them the same seed.
        places = (flat @ ways / size * GRID).round().nan_to_num(0.0, 0.0, 0.0).long()
        sizes = (size.log() * 100).round().nan_to_num(0.0, 0.0, 0.0).long()
        seeds.append([mix(*(int(n) & 0xFFFFFFFF for n in row)) for row in torch.cat([places, sizes], 1).tolist()])
    return [mix(*(n & 0xFFFFFFFFFFFF for n in row)) for row in zip(*seeds, strict=True)]


@functools.lru_cache(maxsize=32)
def _ways(features: int, number: int) -> Tensor:
    return torch.rand((features, 2), generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def drawn_by_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: RowSeeds, number: int) -> Any:
    """Returns what the operation draws, row by row; NotImplemented where its shape has no rows. ``number``: that of the
    draw among those of the call."""
    shape = _shape(func, args, kwargs)
    if shape is None or not rows.shape or not shape:
        return NotImplemented
    found = _division(func.overloadpacket.__name__, shape, rows.shape)
    if found is None:
        return NotImplemented
    given = _Arguments(func, args, kwargs, shape)
    parts: list[Any] = []
    with _seedable(given.device) as generator:
        for place, seed in enumerate(rows.for_dims(found.dims)):
            generator.manual_seed(mix(seed, number))
            parts.append(given.call(found.slices(place)))
    return given.joined(parts, found)


class _Division(NamedTuple):
    """How the rows of the inputs divide a draw."""

    dims: int
    """The number of first dimensions of the inputs that tell the places apart."""
    at: int
    """The first dimension of the draw that is cut, of as many; one where ``dims`` are flattened into it."""
    sizes: tuple[int, ...]

    def slices(self, place: int) -> tuple[slice, ...]:
        """Returns the part of the draw that is of this place."""
        before = (slice(None),) * self.at
        if len(self.sizes) == 1:
            return (*before, slice(place, place + 1))
        i, j = divmod(place, self.sizes[1])
        return (*before, slice(i, i + 1), slice(j, j + 1))


def _division(name: str, shape: Sequence[int], rows: Sequence[int]) -> _Division | None:
    pairs = len(rows) == 2 and rows[0] * rows[1] <= MOST_PAIRS and name not in TOGETHER
    if pairs and tuple(shape[:2]) == tuple(rows):
        return _Division(2, 0, (rows[0], rows[1]))
    if shape[0] == rows[0]:
        return _Division(1, 0, (rows[0],))
    if pairs and shape[0] == rows[0] * rows[1]:
        return _Division(2, 0, (shape[0],))
    if rows[0] in shape and name not in TOGETHER:
        return _Division(1, list(shape).index(rows[0]), (rows[0],))
    return None


def has_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: RowSeeds) -> bool:
    """Tells whether the draw has the rows of the inputs."""
    shape = _shape(func, args, kwargs)
    return bool(shape and rows.shape and _division(func.overloadpacket.__name__, shape, rows.shape))


def is_ambiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: RowSeeds) -> bool:
    """Tells whether the draw has another dimension that is as long as that of the rows."""
    shape = _shape(func, args, kwargs)
    return shape is not None and bool(rows.shape) and shape.count(rows.shape[0]) > 1


class _Arguments:
    """The arguments of an operation, of which parts can be taken."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int]) -> None:
        self._func, self._shape = func, tuple(shape)
        names = [argument.name for argument in func._schema.arguments]
        self._args, self._kwargs = list(args), dict(kwargs)
        self._size = names.index("size") if "size" in names[: len(args)] else None
        if "generator" in self._kwargs:
            self._kwargs["generator"] = None
        if "generator" in names[: len(args)]:
            self._args[names.index("generator")] = None
        returned = [r.alias_info is not None for r in func._schema.returns]
        written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        self._at = written.index(True) if any(returned) and any(written[: len(args)]) else None
        self.into: Tensor | None = None if self._at is None else self._args[self._at]
        """The argument that is drawn into, and returned."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        device = tensors[0].device if tensors else kwargs.get("device")
        self.device = torch.device("cpu") if device is None else torch.device(device)

    def call(self, index: tuple[slice, ...]) -> Any:
        args = [self._part(at, argument, index) for at, argument in enumerate(self._args)]
        return self._func(*args, **self._kwargs)

    def call_into(self, into: Tensor) -> None:
        """Draws into another tensor."""
        assert self._at is not None
        self._func(*self._args[: self._at], into, *self._args[self._at + 1 :], **self._kwargs)

    def _part(self, at: int, argument: Any, index: tuple[slice, ...]) -> Any:
        if at == self._size:
            return [
                *(len(range(*piece.indices(n))) for piece, n in zip(index, argument, strict=False)),
                *argument[len(index) :],
            ]
        if not isinstance(argument, Tensor) or argument.ndim < len(self._shape):
            return argument
        whole = all(argument.shape[dim] == self._shape[dim] for dim in range(len(index)))
        return argument[index] if whole else argument

    def joined(self, parts: list[Any], found: _Division) -> Any:
        """Returns the whole result of all parts; an argument that was drawn into is the result itself."""
        if self.into is not None:
            return self.into
        if isinstance(parts[0], tuple | list):
            return tuple(_joined([part[n] for part in parts], found) for n in range(len(parts[0])))
        return _joined(parts, found)


def _joined(parts: list[Tensor], found: _Division) -> Tensor:
    if len(found.sizes) == 1:
        return torch.cat(parts, found.at)
    count, each = found.sizes
    return torch.cat([torch.cat(parts[i * each : (i + 1) * each], 1) for i in range(count)])


def _shape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the shape of what is drawn; None where that cannot be known before."""
    names = [argument.name for argument in func._schema.arguments]
    if "size" in names[: len(args)]:
        return tuple(args[names.index("size")])
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not tensors:
        return None
    try:
        return tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))
    except RuntimeError:
        return tuple(tensors[0].shape)


@contextmanager
def _seedable(device: torch.device) -> Iterator[torch.Generator]:
    """Gives the generator that draws on a device by itself; it is afterwards as it was."""
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator
    before = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(before)


# One number for all rows


def drawn_alike(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: Seed) -> Any:
    """Returns what the operation draws where all places of the result have one random number between them, whatever
    their number; NotImplemented for an operation of which that cannot be said."""
    name = func.overloadpacket.__name__
    if name in _ALIKE:
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
        with _seedable(device) as generator:
            generator.manual_seed(seed)
            drawn = _ALIKE[name](args, kwargs)
        if drawn is not NotImplemented:
            return drawn
    shape = _shape(func, args, kwargs)
    if shape is None or len(func._schema.returns) != 1:
        return NotImplemented
    given = _Arguments(func, args, kwargs, shape)
    one = tuple(slice(0, min(1, size)) for size in shape)
    with _seedable(given.device) as generator:
        generator.manual_seed(seed)
        if given.into is None:
            return given.call(one).expand(shape).clone()
        drawn = given.into[one].clone()
        given.call_into(drawn)
        into: Tensor = given.into.copy_(drawn.expand(shape))
        return into


def _bernoulli(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    share = args[1] if len(args) > 1 and not isinstance(args[1], torch.Generator | None) else args[0]
    uniform = torch.rand((), dtype=torch.float64)
    like: Tensor = args[0]
    kept: Tensor = uniform.to(like.device) < share
    return kept.to(like.dtype).expand(like.shape).clone()


def _bernoulli_(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    share = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    uniform = torch.rand((), dtype=torch.float64)
    into: Tensor = args[0]
    if isinstance(share, Tensor):
        return into.copy_(uniform.to(into.device) < share)
    into.fill_(bool(uniform < share))
    return into


def _normal(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    mean, spread = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    if not isinstance(mean, Tensor) and not isinstance(spread, Tensor):
        return NotImplemented
    normal = torch.randn((), dtype=torch.float64)
    like = mean if isinstance(mean, Tensor) else spread
    drawn: Tensor = mean + spread * normal.to(like)
    return drawn.to(like.dtype)


def _poisson(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    rate: Tensor = args[0]
    return rate.round()


_ALIKE: dict[str, Callable[[Sequence[Any], dict[str, Any]], Any]] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
    "normal": _normal,
    "poisson": _poisson,
    "multinomial": lambda args, kwargs: args[0].topk(args[1], -1).indices,
    "randperm": lambda args, kwargs: torch.arange(args[-1] if len(args) == 1 else args[0]),
}
"""The operations that need a function of their own: they take a probability, a mean or weights for each element, or no
shape."""
