"""Objects that can change while they stay the same object: containers, tensors, arrays, generators.

A leaf says whether its object is as it was kept, keeps what it holds, and puts what was kept back into the same object,
so that whatever else refers to it sees that too.
"""

from __future__ import annotations

import copy
import io
import zlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from apportion.core.python_state.generators import GENERATORS, generator_state, set_generator_state
from apportion.core.python_state.scopes import slots_of
from apportion.core.torch_private import version_of

SMALL = 1024
"""The elements up to which a container is compared element by element after every step; beyond it by its length and its
last element, and as a whole where it is looked at thoroughly."""
SEARCHED = 20_000
"""The elements up to which a container is searched for objects that change in place."""
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
COPIED = 4096
"""The elements up to which a tensor or an array is copied before it has been seen to change."""


DIGESTED = 1 << 26
"""The bytes up to which all of a tensor or an array are digested to find a change that nothing counts."""


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

    def plain(self, kept: Any) -> Any:
        """Return what is recorded of what was kept, for an object that every process has: of a container, its
        elements."""
        return self.value(kept)

    @property
    def explained(self) -> bool:
        """True where every change of the object is seen after the step that made it, so that what was kept is what was
        there after the last one."""
        return self.moved

    def inside(self) -> list[tuple[str, Any]]:
        """Return what the object holds, by name, where those may be objects that change in place."""
        return []

    def held(self) -> list[Any]:
        """Return what the object holds and may change in place."""
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
            if SMALL < count == len(items) <= len(target) and all(map(is_, items, target)):
                items.extend(target[count:])
                return items, len(target)
        return list(target), len(target)

    def value(self, kept: Any) -> Any:
        items, count = kept
        if type(self.target) is deque:
            return deque(items[:count], maxlen=self.target.maxlen)
        return items[:count]

    def held(self) -> list[Any]:
        return [item for item in self.target if type(item) not in _PLAIN]

    def put(self, kept: Any) -> None:
        items, count = kept
        self.target.clear()
        self.target.extend(items[:count])

    def inside(self) -> list[tuple[str, Any]]:
        return [(f"[{i}]", v) for i, v in enumerate(self.target)] if len(self.target) <= SEARCHED else []

    def plain(self, kept: Any) -> Any:
        items, count = kept
        return items[:count]


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

    def plain(self, kept: Any) -> Any:
        return kept

    def held(self) -> list[Any]:
        return [item for pair in self.target.items() for item in pair if type(item) not in _PLAIN]

    def put(self, kept: Any) -> None:
        self.target.clear()
        self.target.update(kept)

    def inside(self) -> list[tuple[str, Any]]:
        if len(self.target) > SEARCHED:
            return []
        found = [(f"[{k!r}]", v) for k, v in self.target.items()]
        return found + [(f"[key {i}]", k) for i, k in enumerate(self.target) if type(k) not in (str, int)]


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
    """A tensor that is neither a parameter nor a buffer. torch counts most changes of it; those by ``.data`` and
    through numpy it does not count."""

    __slots__ = ("uncounted",)

    def __init__(self, name: str, target: Any) -> None:
        super().__init__(name, target)
        self.uncounted = False
        """True once a change has been seen that torch has not counted."""

    def same(self, kept: Any, *, thorough: bool) -> bool:
        copied, version, digest = kept
        if _version(self.target) != version:
            return False
        if not thorough and not self.uncounted:
            return True
        same = tensor_checksum(self.target) == digest if copied is None else self._equal(copied)
        self.uncounted |= not same
        return same

    def _equal(self, copied: Tensor) -> bool:
        target = self.target.detach()
        if copied.shape != target.shape or copied.dtype != target.dtype:
            return False
        return torch.equal(copied, target) or torch.equal(_bits(copied), _bits(target))

    def value(self, kept: Any) -> Any:
        return self.target.detach() if kept[0] is None else kept[0]

    @property
    def explained(self) -> bool:
        return self.uncounted

    def keep(self, before: Any = None) -> Any:
        tensor = self.target.detach()
        small = tensor.numel() <= COPIED or before is not None
        return [tensor.clone() if small else None, _version(tensor), None if small else tensor_checksum(tensor)]

    @torch.no_grad()
    def put(self, kept: Any) -> None:
        copied = kept[0]
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


BUFFERS = (bytearray, array, io.BytesIO, io.StringIO)


@final
class BufferLeaf(Leaf):
    """Bytes or text that change in place: a bytearray, an array of the standard library, a file in memory. The position
    of such a file is not state: reading moves it, and a data set reads on each rank what it needs."""

    __slots__ = ()

    def same(self, kept: Any, *, thorough: bool) -> bool:
        target = self.target
        if isinstance(target, bytearray | array) and len(target) > COPIED and not thorough:
            return len(target) * getattr(target, "itemsize", 1) == len(kept[0])
        return bool(self.keep() == kept)

    def keep(self, before: Any = None) -> Any:
        target = self.target
        if isinstance(target, bytearray | array):
            return (bytes(target),)
        return () if target.closed else (target.getvalue(),)

    def value(self, kept: Any) -> Any:
        return self.target  # which no record holds: only an object that every process has is carried

    def plain(self, kept: Any) -> Any:
        return kept

    def can_put(self, kept: Any) -> bool:
        return bool(kept) and not getattr(self.target, "closed", False)

    def put(self, kept: Any) -> None:
        target, (contents,) = self.target, kept
        if isinstance(target, bytearray):
            target[:] = contents
        elif isinstance(target, array):
            del target[:]
            target.frombytes(contents)
        else:
            place, appends = target.tell(), target.tell() == len(target.getvalue())
            target.seek(0)
            target.truncate()
            target.write(contents)
            if not appends:
                target.seek(min(place, len(contents)))


@final
class FieldsLeaf(Leaf):
    """What an object keeps in slots and attributes, where training has made the object."""

    __slots__ = ()

    def _now(self) -> dict[str, Any]:
        fields = {key: getattr(self.target, key) for key in slots_of(type(self.target)) if hasattr(self.target, key)}
        return fields | getattr(self.target, "__dict__", {})

    def same(self, kept: Any, *, thorough: bool) -> bool:
        now = self._now()
        return now.keys() == kept.keys() and all(now[key] is value for key, value in kept.items())

    def keep(self, before: Any = None) -> Any:
        return self._now()

    def value(self, kept: Any) -> Any:
        return Fields(self.target, kept)

    def put(self, kept: Any) -> None:
        for key in self._now().keys() - kept.keys():
            object.__delattr__(self.target, key)
        for key, value in kept.items():
            object.__setattr__(self.target, key, value)

    def inside(self) -> list[tuple[str, Any]]:
        return [(f".{key}", value) for key, value in self._now().items()]


class Fields(NamedTuple):
    """The fields of an object, as they were kept."""

    owner: Any
    fields: dict[str, Any]


def fields_leaf(value: Any) -> Leaf | None:
    """The leaf of an object with attributes or slots; None where it has none."""
    has = isinstance(getattr(value, "__dict__", None), dict) or slots_of(type(value))
    return FieldsLeaf("", value) if has else None


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
    """What a module gives by ``get_extra_state``, by which torch keeps what is not a tensor."""

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
    """Load the tensors of a model's ``state_dict()``; what is not a tensor in it stays as it is."""
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


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _checksum(array: Any) -> int:
    """A number for the bytes of an array: of all up to ``DIGESTED``, beyond it of elements at equal distances."""
    if array.nbytes > DIGESTED:
        array = array.reshape(-1)[:: array.nbytes // DIGESTED + 1]
    return zlib.adler32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def tensor_checksum(tensor: Tensor) -> int:
    """A number for the bytes of a tensor: of all up to ``DIGESTED``, beyond it of elements at equal distances."""
    tensor = tensor.detach()
    if tensor.nbytes > DIGESTED:
        tensor = tensor.reshape(-1)[:: tensor.nbytes // DIGESTED + 1]
    return zlib.adler32(_bits(tensor).cpu().numpy().data)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def leaf_of(name: str, value: Any) -> Leaf | None:
    """The leaf of an object that changes in place; None where it does not, or is none of the known kinds."""
    if isinstance(value, dict):
        return DictLeaf(name, value)
    if isinstance(value, list | deque):
        return _Sequence(name, value)
    if isinstance(value, set):
        return SetLeaf(name, value)
    if isinstance(value, BUFFERS):
        return None if isinstance(value, io.IOBase) and value.closed else BufferLeaf(name, value)
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided and not value.is_meta
        return TensorLeaf(name, value) if plain else None
    if isinstance(value, np.ndarray):
        stays = isinstance(value, np.memmap) or not (value.flags.writeable or value.flags.owndata)
        return None if stays or value.dtype.kind not in "biufc" else ArrayLeaf(name, value)
    return GeneratorLeaf(name, value) if isinstance(value, GENERATORS) else None
