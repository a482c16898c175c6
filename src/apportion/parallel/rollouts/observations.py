"""Observations as arrays and tensors, as the observation space of an environment defines them.

K observations are one array (K, ...) of the space's own dtype. Those of a Dict or a Tuple are one structured array (K,)
with a field for each Box, Discrete, MultiBinary or MultiDiscrete in it, so that everything between the environments and
the network handles one array; the network is given the dict or the tuple again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apportion.parallel.rollouts.spaces import kind_of, text_of

Array = NDArray[Any]
_LEAVES = ("Box", "Discrete", "MultiBinary", "MultiDiscrete")
_AS_TORCH_HAS = {"u2": np.int32, "u4": np.int64, "u8": np.int64}
"""Unsigned integers for which torch has few operations, and the type that holds their values instead."""
REMEDY = "wrap the environment (gymnasium.ObservationWrapper) so that its observations are those of its space"


@final
@dataclass(frozen=True)
class ObservationPart:
    """A part of an observation that is one array."""

    path: tuple[Any, ...]
    """The keys of Dict and the numbers of Tuple spaces that lead to it; () where it is the whole observation."""
    space: Any
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def numeric(self) -> bool:
        """True where its numbers are quantities, which have a mean, and not the numbers of categories."""
        return self.kind in ("Box", "MultiBinary")

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def taken_from(self, observation: Any) -> Any:
        """Return this part of an observation as the environment gave it."""
        for key in self.path:
            observation = observation[key]
        return observation

    def ends(self) -> tuple[Array, Array] | None:
        """Return the least and the largest categories; None where the numbers are quantities."""
        start = getattr(self.space, "start", 0)
        if self.kind == "Discrete":
            return np.asarray(start, self.dtype), np.asarray(int(start) + int(self.space.n) - 1, self.dtype)
        if self.kind == "MultiDiscrete":
            low = np.broadcast_to(np.asarray(start, self.dtype), self.shape)
            return low, (low + np.asarray(self.space.nvec) - 1).astype(self.dtype)
        return None


@final
class ObservationFormat:
    """The arrays and tensors of the observations of a space. ``owner``: the name of the environment, for messages.

    Raises ValueError for a space whose observations are no arrays of one shape.
    """

    def __init__(self, space: Any, owner: str) -> None:
        self.space, self.owner = space, owner
        self.leaves: list[ObservationPart] = []
        self._structure = self._described(space, ())
        self.structured = kind_of(space) in ("Dict", "Tuple")
        if self.structured and not self.leaves:
            raise ValueError(self._refusal(space, "it is empty"))
        only = self.leaves[0]
        self.shape: tuple[int, ...] = () if self.structured else only.shape
        self.dtype: np.dtype[Any] = only.dtype
        if self.structured:
            self.dtype = np.dtype([(f"f{n}", leaf.dtype, leaf.shape) for n, leaf in enumerate(self.leaves)])

    def _described(self, space: Any, path: tuple[Any, ...]) -> Any:
        """Note the leaves of a space; returns its structure, with the number of each leaf in its place."""
        kind = kind_of(space)
        if kind == "Dict":
            return {key: self._described(part, (*path, key)) for key, part in space.spaces.items()}
        if kind == "Tuple":
            return tuple(self._described(part, (*path, n)) for n, part in enumerate(space.spaces))
        if kind not in _LEAVES:
            raise ValueError(self._refusal(space, "its observations are no arrays of one shape"))
        shape = tuple(map(int, space.shape or ()))
        self.leaves.append(ObservationPart(path, space, kind, shape, self._dtype_of(space)))
        return len(self.leaves) - 1

    def _dtype_of(self, space: Any) -> np.dtype[Any]:
        dtype = np.dtype(np.dtype(np.int64 if space.dtype is None else space.dtype).type)  # in the machine's byte order
        if dtype == np.uint64 and kind_of(space) == "Box" and int(np.max(space.high, initial=0)) > np.iinfo("i8").max:
            raise ValueError(self._refusal(space, "torch has no arithmetic for integers above 2**63 - 1"))
        if dtype.kind == "f" and dtype.itemsize > 8:
            return np.dtype(np.float64)
        return np.dtype(_AS_TORCH_HAS.get(dtype.str[1:], dtype))

    def _refusal(self, space: Any, reason: str) -> str:
        within = "" if space is self.space else f" in {text_of(self.space)}"
        return (
            f"{self.owner}: the observation space {text_of(space)}{within} is not supported, because {reason}; "
            "supported are Box, Discrete, MultiBinary and MultiDiscrete, and Dict and Tuple of these: wrap the "
            "environment (gymnasium.wrappers.FlattenObservation, or a gymnasium.ObservationWrapper of your own) so "
            "that it has one of them"
        )

    # From environments

    def gathered(self, observations: Sequence[Any]) -> Array:
        """Return observations of single environments, in their order, as one array (K, ...). Raises ValueError for
        those that the space cannot have."""
        if not self.structured:
            return _converted(self._stack(observations, self.leaves[0]), self.leaves[0], self._wrong)
        return self._filled(len(observations), lambda leaf: self._stack(self._parts(observations, leaf), leaf))

    def batched(self, observations: Any, count: int) -> Array:
        """Return what a vector of ``count`` environments gave as one array (K, ...); it may be the vector's own
        memory. Raises ValueError for what the space cannot have."""
        if not self.structured:
            found = np.asarray(observations)
            self._check_count(found, count)
            return _converted(found, self.leaves[0], self._wrong)

        def read_part(leaf: ObservationPart) -> Array:
            found = np.asarray(self._parts([observations], leaf)[0])
            self._check_count(found, count)
            return found

        return self._filled(count, read_part)

    def _filled(self, count: int, part: Callable[[ObservationPart], Array]) -> Array:
        """A structured array whose fields are these parts."""
        found = np.empty(count, dtype=self.dtype)
        for n, leaf in enumerate(self.leaves):
            found[f"f{n}"] = _converted(part(leaf), leaf, self._wrong)
        return found

    def _parts(self, observations: Sequence[Any], leaf: ObservationPart) -> list[Any]:
        try:
            return [leaf.taken_from(one) for one in observations]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                self._wrong(f"one without {_place(leaf)} ({type(error).__name__}: {error})", leaf)
            ) from error

    def _stack(self, values: Sequence[Any], leaf: ObservationPart) -> Array:
        try:
            return np.array(values)
        except ValueError as error:  # they have different shapes
            for value in values:
                _converted(np.asarray(value)[None], leaf, self._wrong)
            raise ValueError(self._wrong(f"observations of different shapes ({error})", leaf)) from error

    def _check_count(self, found: Array, count: int) -> None:
        if found.shape[:1] != (count,):
            raise ValueError(
                f"{self.owner} returned observations of shape {found.shape} for {count} environments: dimension 0 must "
                "be the environment"
            )

    def _wrong(self, found: str, leaf: ObservationPart) -> str:
        within = "" if leaf.space is self.space else f", in {_place(leaf)} of {text_of(self.space)}"
        return (
            f"{self.owner} returned {found}, where its observation space is {text_of(leaf.space)}{within}: an "
            f"observation must have the shape of its space, and values that the space's dtype holds; {REMEDY}"
        )

    # To the network

    def tensors(self, array: Array) -> Any:
        """Return the tensor, or the dict or tuple of tensors, of an array whose last dimensions are an observation's.
        Other dimensions stay as they are."""
        if not self.structured:
            return as_tensor(array)
        return self._rebuilt(self._structure, array)

    def _rebuilt(self, structure: Any, array: Array) -> Any:
        if isinstance(structure, dict):
            return {key: self._rebuilt(part, array) for key, part in structure.items()}
        if isinstance(structure, tuple):
            return tuple(self._rebuilt(part, array) for part in structure)
        # A copy, and not ascontiguousarray: that keeps the strides of dimensions of size 1, which torch refuses.
        return torch.from_numpy(array[f"f{structure}"].copy())

    def trials(self, observation: Array) -> Array:
        """Return observations (3, ...) to try a network on: one that the environment gave (1, ...), and that with the
        least and with the largest categories in the place of its own."""
        found = observation.repeat(3, axis=0)
        for n, leaf in enumerate(self.leaves):
            ends = leaf.ends()
            if ends is not None:
                field = found[f"f{n}"] if self.structured else found
                field[1], field[2] = ends
        return found


def as_tensor(array: Array) -> Tensor:
    """Return an array as a tensor of the same memory, of a copy where torch cannot have it: an array that is read-only,
    or has negative strides, as that of a picture turned around."""
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    return torch.from_numpy(array)


def _place(leaf: ObservationPart) -> str:
    return "".join(f"[{key!r}]" for key in leaf.path)


def _converted(found: Array, leaf: ObservationPart, wrong: Callable[[str, ObservationPart], str]) -> Array:
    """Return values (K, ...) in the shape and type of a leaf. Raises ValueError where they have another shape, or would
    become others."""
    if found.dtype == leaf.dtype and found.shape[1:] == leaf.shape:  # nearly always
        return found
    if found.dtype.kind not in "biuf":
        value = found.flat[0] if found.size else None
        raise ValueError(wrong(f"{value!r:.80} ({type(value).__name__})", leaf))
    if found.shape[1:] != leaf.shape:
        raise ValueError(wrong(f"an observation of shape {found.shape[1:]}", leaf))
    with np.errstate(all="ignore"):
        cast = found.astype(leaf.dtype)
        lost = cast != found if leaf.dtype.kind in "biu" else np.isinf(cast) & ~np.isinf(found)
    if lost.any():
        raise ValueError(wrong(f"{found[lost][0]!r}, which {leaf.dtype} does not hold", leaf))
    return cast
