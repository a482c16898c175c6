"""Objects that can change while they stay the same object: containers, tensors, arrays, generators.

A leaf says whether its object is as it was kept, keeps what it holds, and puts what was kept back into the same object,
so that whatever else refers to it sees that too.
"""

from __future__ import annotations

import copy
import random
import zlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from apportion.core.torch_private import version_of

SMALL = 1024
"""The elements up to which a container is compared element by element after every step; beyond it by its length and its
last element, and as a whole where it is looked at thoroughly."""
COPIED = 4096
"""The elements up to which a tensor or an array is copied before it has been seen to change."""


class Leaf(ABC):
    """One object that is changed in place. ``name``: the first path by which it was found."""

    __slots__ = ("dropped", "moved", "name", "root", "target")

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target, self.root = name, target, ""
        self.dropped = False
        """True once it is no longer compared and kept."""
        self.moved = False
        """True once the object has been seen to differ from what it was when it was found."""

    @abstractmethod
    def same(self, kept: Any, *, thorough: bool) -> bool:
        """Tell whether the object holds what was kept."""

    @abstractmethod
    def keep(self, before: Any = None) -> Any:
        """Return what the object holds now, for ``put``. ``before``: what was kept last."""

    @abstractmethod
    def put(self, kept: Any) -> None:
        """Make the object hold what was kept."""

    def can_put(self, kept: Any) -> bool:
        """Tell whether what was kept is there to be put back."""
        return True

    def value(self, kept: Any) -> Any:
        """Return an object of the same kind that holds what was kept."""
        return kept

    def inside(self) -> list[tuple[str, Any]]:
        """Return what the object holds, by name, where those may be objects that change in place."""
        return []


class _Sequence(Leaf):
    """A list or a deque. What was kept is a list that grows with it, and how much of that counts."""

    __slots__ = ()

    def same(self, kept: Any, *, thorough: bool) -> bool:
        items, count = kept
        if len(self.target) != count:
            return False
        if count > SMALL and not thorough:
            return self.target[-1] is items[count - 1]
        return all(map(is_, self.target, items))

    def keep(self, before: Any = None) -> Any:
        target = self.target
        if before is not None and type(target) is list:
            items, count = before
            if SMALL < count == len(items) <= len(target) and target[count - 1] is items[-1]:
                items.extend(target[count:])
                return items, len(target)
        return list(target), len(target)

    def value(self, kept: Any) -> Any:
        items, count = kept
        if type(self.target) is deque:
            return deque(items[:count], maxlen=self.target.maxlen)
        return items[:count]

    def put(self, kept: Any) -> None:
        items, count = kept
        self.target.clear()
        self.target.extend(items[:count])

    def inside(self) -> list[tuple[str, Any]]:
        return [(f"[{i}]", v) for i, v in enumerate(self.target)] if len(self.target) <= SMALL else []


@final
class DictLeaf(Leaf):
    __slots__ = ()

    def same(self, kept: Any, *, thorough: bool) -> bool:
        target = self.target
        if len(target) != len(kept):
            return False
        if len(kept) > SMALL and not thorough:
            last = next(reversed(target))
            return last in kept and kept[last] is target[last]
        return all(map(is_, target.values(), kept.values())) and all(map(is_, target, kept))

    def keep(self, before: Any = None) -> Any:
        return dict(self.target)

    def value(self, kept: Any) -> Any:
        if isinstance(self.target, defaultdict):
            return defaultdict(self.target.default_factory, kept)
        return type(self.target)(kept) if type(self.target) in (OrderedDict, Counter) else kept

    def put(self, kept: Any) -> None:
        self.target.clear()
        self.target.update(kept)

    def inside(self) -> list[tuple[str, Any]]:
        return [(f"[{k!r}]", v) for k, v in self.target.items()] if len(self.target) <= SMALL else []


@final
class SetLeaf(Leaf):
    __slots__ = ()

    def same(self, kept: Any, *, thorough: bool) -> bool:
        return len(self.target) == len(kept) and (self.target == kept if len(kept) <= SMALL or thorough else True)

    def keep(self, before: Any = None) -> Any:
        return set(self.target)

    def put(self, kept: Any) -> None:
        self.target.clear()
        self.target.update(kept)


@final
class TensorLeaf(Leaf):
    """A tensor that is no parameter and no buffer. torch counts most changes of it."""

    __slots__ = ()

    def same(self, kept: Any, *, thorough: bool) -> bool:
        copied, version = kept
        if _version(self.target) != version:
            return False
        return not thorough or copied is None or self._equal(copied)

    def _equal(self, copied: Tensor) -> bool:
        target = self.target
        if copied.shape != target.shape or copied.dtype != target.dtype:
            return False
        return torch.equal(copied.nan_to_num() if copied.is_floating_point() else copied,
                           target.nan_to_num() if target.is_floating_point() else target)  # fmt: skip

    def value(self, kept: Any) -> Any:
        return self.target.detach() if kept[0] is None else kept[0]

    def keep(self, before: Any = None) -> Any:
        tensor = self.target.detach()
        small = tensor.numel() <= COPIED
        return [tensor.clone() if small or before is not None else None, _version(self.target)]

    @torch.no_grad()
    def put(self, kept: Any) -> None:
        copied, _ = kept
        if copied.shape == self.target.shape and copied.dtype == self.target.dtype:
            self.target.detach().copy_(copied)
        else:
            self.target.data = copied.clone()
        kept[1] = _version(self.target)  # putting counts as a change

    def can_put(self, kept: Any) -> bool:
        return kept[0] is not None


@final
class ArrayLeaf(Leaf):
    __slots__ = ()

    def same(self, kept: Any, *, thorough: bool) -> bool:
        copied, digest = kept
        if copied is not None:
            return bool(copied.shape == self.target.shape and copied.tobytes() == self.target.tobytes())
        return not thorough or _checksum(self.target) == digest

    def keep(self, before: Any = None) -> Any:
        small = self.target.size <= COPIED or before is not None
        return self.target.copy() if small else None, None if small else _checksum(self.target)

    def value(self, kept: Any) -> Any:
        return self.target if kept[0] is None else kept[0]

    def put(self, kept: Any) -> None:
        self.target[...] = kept[0]

    def can_put(self, kept: Any) -> bool:
        return kept[0] is not None and kept[0].shape == self.target.shape


class Drawn(NamedTuple):
    """The state of a generator."""

    state: Any


class GeneratorLeaf(Leaf):
    """A private generator of random numbers; its state is what its kind gives."""

    __slots__ = ()

    def value(self, kept: Any) -> Any:
        return Drawn(kept)

    def same(self, kept: Any, *, thorough: bool) -> bool:
        return bool(self.keep() == kept)

    def keep(self, before: Any = None) -> Any:
        return generator_state(self.target)

    def put(self, kept: Any) -> None:
        set_generator_state(self.target, kept)


@final
class ExtraLeaf(Leaf):
    """What a module gives by ``get_extra_state``, by which torch keeps what is no tensor."""

    __slots__ = ()

    def same(self, kept: Any, *, thorough: bool) -> bool:
        return False

    def keep(self, before: Any = None) -> Any:
        return copy.deepcopy(self.target.get_extra_state())

    def put(self, kept: Any) -> None:
        self.target.set_extra_state(copy.deepcopy(kept))


def has_extra_state(module: nn.Module) -> bool:
    """Tell whether a module gives what torch keeps beside its tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's ``state_dict()``: what ``get_extra_state`` gives may be something else."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of a model's ``state_dict()``; what is no tensor in it stays as it is."""
    own = model.state_dict()
    coming = OrderedDict({name: value for name, value in own.items() if not isinstance(value, Tensor)} | dict(tensors))
    # The versions of the layers: without them a normalisation whose buffers another rank has looks for its own.
    coming._metadata = own._metadata  # type: ignore[attr-defined]
    model.load_state_dict(coming)


def refuse_other_extra_state(model: nn.Module, strategy: str) -> None:
    """Raise ValueError where a module gives something else than a tensor by ``get_extra_state``."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            place = name.rpartition("_extra_state")[0].rstrip(".") or "the model"
            raise ValueError(
                f"{place} gives a {type(value).__name__} by get_extra_state(), and {strategy} keeps tensors alone: "
                "give a tensor, or use data_parallel"
            )


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: Any) -> Any:
    """The state of a generator as text, whole numbers and tuples of them, which can be compared."""
    if isinstance(generator, torch.Generator):
        return "torch", str(generator.device), generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return "python", generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return "numpy legacy", _frozen(generator.get_state(legacy=False))
    return "numpy", _frozen(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator of the same kind into a state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state[2]), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state[1])
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_thawed(state[1]))
    else:
        generator.bit_generator.state = _thawed(state[1])


def new_generator(state: Any) -> Any:
    """A generator in this state. ValueError where the state names a kind that is not known."""
    kind = state[0]
    if kind == "torch":
        made: Any = torch.Generator(state[1])
    elif kind == "python":
        made = random.Random()
    elif kind == "numpy legacy":
        made = np.random.RandomState()
    else:
        name = dict(state[1]).get("bit_generator")
        if name not in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
            raise ValueError(f"a numpy generator of kind {name!r} is not known")
        made = np.random.Generator(getattr(np.random, name)())
    set_generator_state(made, state)
    return made


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((name, _frozen(value)) for name, value in state.items())
    if isinstance(state, np.ndarray):
        return "array", str(state.dtype), tuple(state.shape), state.tobytes()
    return state.item() if isinstance(state, np.generic) else state


def _thawed(state: Any) -> Any:
    if isinstance(state, tuple) and state[:1] == ("array",):
        return np.frombuffer(state[3], dtype=state[1]).reshape(state[2]).copy()
    return {name: _thawed(value) for name, value in state} if isinstance(state, tuple) else state


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _checksum(array: Any) -> int:
    return zlib.adler32(np.ascontiguousarray(array).tobytes())


def leaf_of(name: str, value: Any) -> Leaf | None:
    """The leaf of an object that changes in place; None where it does not, or is none of the known kinds."""
    if isinstance(value, dict):
        return DictLeaf(name, value)
    if isinstance(value, list | deque):
        return _Sequence(name, value)
    if isinstance(value, set):
        return SetLeaf(name, value)
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided and not value.is_meta
        return TensorLeaf(name, value) if plain else None
    if isinstance(value, np.ndarray):
        return ArrayLeaf(name, value) if value.dtype.kind in "biufc" else None
    return GeneratorLeaf(name, value) if isinstance(value, GENERATORS) else None
