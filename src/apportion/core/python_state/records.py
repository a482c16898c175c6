"""Values as plain JSON and tensors, and back. Reading runs no code: what JSON names is looked up in short lists.

``joined`` makes one record of those of processes that each have a part of the network.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from apportion.core.python_state.generators import GENERATORS, generator_state, new_generator
from apportion.core.python_state.leaves import Drawn, Fields
from apportion.core.python_state.scopes import slots_of
from apportion.core.python_state.search import origin
from apportion.core.replica_digest import tensor_digest

Record = dict[str, Any]
"""The state as plain JSON: ``entries`` by scope and name, ``objects`` by name, and what is ``lost``, with reasons."""

_DICTS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_KINDS = {of: kind for kind, of in (*_DICTS.items(), *_SEQUENCES.items())}
_KINDS |= {deque: "deque", complex: "complex", bytes: "bytes"}
_DEPTH = 100
_FACTORIES = {of.__name__: of for of in (list, dict, set, int, float, str, bool, tuple, deque, Counter)}
_BUILT_IN = (dict, list, tuple, set, frozenset, deque, int, float, str, bytes, complex)


class NotStorable(Exception):
    """A value that JSON and tensors cannot hold. The text says what it is."""


@final
class ValueWriter:
    """Writes values. ``at``: the names of objects that every process finds by itself, by their identity; ``kept``: what
    stands for an object that may be changing now, by its identity."""

    def __init__(
        self, at: Mapping[int, str], kept: Mapping[int, Any], classes: Mapping[str, type | None] | None = None
    ) -> None:
        """``classes``: the classes of the user's that every process finds by their names."""
        self._at, self._kept, self._classes = at, kept, classes or {}
        self.tensors: dict[str, Tensor] = {}
        self._written: dict[int, tuple[int, Any]] = {}
        """The numbers of the objects that were written, which are kept so that their identity stays their own."""

    def value(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return the JSON of a value; NotStorable where there is none. ``name``: what its tensors are called."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if depth > _DEPTH:
            raise NotStorable("a nest that is too deep, or holds itself")
        if (at := self._at.get(id(value))) is not None:
            return {"at": at}
        if id(value) in self._written:
            return {"same": self._written[id(value)][0]}
        self._written[id(value)] = number, _ = len(self._written), value
        kept = self._kept.get(id(value), value)
        if type(kept) is not type(value) and isinstance(value, _BUILT_IN):
            kept = value  # of a class made from a built-in one
        stored = self.contents(kept, name, depth)
        return {**stored, "number": number}

    def contents(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return the JSON of a value, written out also where every process has the object."""
        if isinstance(value, Fields):
            return {"object": self._class(value.owner), "fields": self._pairs(value.fields, name, depth)}
        if isinstance(value, Drawn):
            return {"generator": self._state(value.state)}
        kind = _KINDS.get(type(value), "filled" if type(value) is defaultdict else "")
        if kind == "deque":
            return {kind: self._items(value, name, depth), "most": value.maxlen}
        if kind in _SEQUENCES:
            return {kind: self._items(value, name, depth)}
        if kind in _DICTS:
            return {kind: self._pairs(value, name, depth)}
        if kind == "filled":
            return {kind: self._pairs(value, name, depth), "factory": _factory(value)}
        if kind == "complex":
            return {kind: [value.real, value.imag]}
        if kind == "bytes":
            return {kind: value.hex()}
        if isinstance(value, GENERATORS):
            return {"generator": self._state(generator_state(value))}
        return self._arrays(value, name, depth)

    def _arrays(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(_plain_tensor(value).clone(), name)}
        if isinstance(value, np.memmap):
            raise NotStorable("an array in a file (memmap)")
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            try:
                return {kind: self._tensor(torch.from_numpy(np.array(value)), name)}
            except TypeError:
                raise NotStorable(f"an array of {value.dtype}") from None
        if isinstance(value, enum.Enum):
            flag = isinstance(value, enum.Flag)
            return {"member": value.value if flag else value.name, "of": self._class(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.Size):
            return {"size": [*value]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        return self._object(value, name, depth)

    def _object(self, value: Any, name: str, depth: int) -> Any:
        if origin(type(value)) != "user" or callable(value):
            raise NotStorable(f"an object of {type(value).__qualname__}")
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"named": self._class(value), "items": self._items(value, name, depth)}
        if isinstance(value, (*_BUILT_IN, np.ndarray, BaseException)):
            raise NotStorable(f"an object of {type(value).__qualname__}, a class made from a built-in one")
        pairs = {**slots_in(value), **getattr(value, "__dict__", {})}
        return {"object": self._class(value), "fields": self._pairs(pairs, name, depth)}

    def _class(self, value: Any) -> str:
        """Return the name of a value's class; NotStorable where that does not lead to the class."""
        name = type(value).__qualname__
        if self._classes.get(name) is not type(value):
            raise NotStorable(f"an object of {name}, a class that the code of the workload does not name")
        return name

    def _items(self, values: Any, name: str, depth: int) -> list[Any]:
        return [self.value(v, f"{name}[{i}]", depth + 1) for i, v in enumerate(values)]

    def _pairs(self, pairs: Mapping[Any, Any], name: str, depth: int) -> list[Any]:
        return [
            [self.value(key, f"{name}[{i}]", depth + 1), self.value(v, f"{name}[{key!r}]", depth + 1)]
            for i, (key, v) in enumerate(pairs.items())
        ]

    def _tensor(self, tensor: Tensor, name: str) -> str:
        self.tensors[name] = tensor
        return name

    def _state(self, state: Any) -> Any:
        if isinstance(state, tuple):
            return [self._state(part) for part in state]
        return {"bytes": state.hex()} if isinstance(state, bytes) else state


@final
class ValueReader:
    """Reads what a ``ValueWriter`` has written. ``at``: the objects that this process has found, by their names."""

    def __init__(
        self, at: Mapping[str, Any], tensors: Mapping[str, Tensor], classes: Mapping[str, type | None] | None = None
    ) -> None:
        self._at, self._tensors, self._classes = at, tensors, classes or {}
        self._numbered: dict[int, Any] = {}

    def value(self, stored: Any, now: Any = None) -> Any:
        """Return the value that JSON stands for. ``now``: what is in its place, which has the factory of a defaultdict.
        ValueError where it is not what is written there."""
        if not isinstance(stored, dict):
            return stored
        try:
            if "same" in stored:
                return self._numbered[stored["same"]]
            found = self._value(stored, now)
            if "number" in stored:
                self._numbered[stored["number"]] = found
            return found
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{str(stored)[:80]} cannot be read as a saved value ({error})") from None

    def _value(self, stored: Mapping[str, Any], now: Any) -> Any:
        kind, inner = next(iter(stored.items()))
        if kind == "at":
            return self._at[inner]
        if kind in _SEQUENCES or kind == "deque":
            items = [self.value(item) for item in inner]
            return deque(items, maxlen=stored["most"]) if kind == "deque" else _SEQUENCES[kind](items)
        if kind in _DICTS:
            return _DICTS[kind](dict(self.pairs(inner)))
        if kind == "filled":
            factory = now.default_factory if isinstance(now, defaultdict) else _FACTORIES.get(stored.get("factory", ""))
            return defaultdict(factory, self.pairs(inner))
        if kind in ("tensor", "array", "scalar"):
            tensor = self._tensors[inner].clone()
            return tensor if kind == "tensor" else tensor.numpy() if kind == "array" else tensor.numpy()[()]
        return self._plain(kind, stored, now)

    def _plain(self, kind: str, stored: Mapping[str, Any], now: Any) -> Any:
        inner = stored[kind]
        if kind in ("size", "device"):
            return torch.Size(inner) if kind == "size" else torch.device(inner)
        if kind == "complex":
            return complex(*inner)
        if kind == "bytes":
            return bytes.fromhex(inner)
        if kind == "generator":
            return new_generator(self.state(inner))
        return self._made(kind, stored)

    def _made(self, kind: str, stored: Mapping[str, Any]) -> Any:
        if kind == "dtype":
            found = getattr(torch, stored["dtype"])
            if isinstance(found, torch.dtype):
                return found
        named = stored["of"] if kind == "member" else stored[kind]
        of = self._classes.get(named)
        if of is None:
            raise ValueError(f"{named} is not a class that the code of the workload names, and what was kept is one")
        if issubclass(of, enum.Enum):
            return of(stored["member"]) if issubclass(of, enum.Flag) else of[stored["member"]]
        if kind == "named":
            items: Any = [self.value(item) for item in stored["items"]]
            return tuple.__new__(cast(Any, of), items)
        made = object.__new__(of)
        if "number" in stored:
            self._numbered[stored["number"]] = made  # its fields may lead back to it
        for key, value in stored["fields"]:
            object.__setattr__(made, key, self.value(value))
        return made

    def pairs(self, stored: Any) -> list[tuple[Any, Any]]:
        """Return the pairs of a dict."""
        return [(self.value(key), self.value(value)) for key, value in stored]

    def state(self, stored: Any) -> Any:
        """Return the state of a generator."""
        if isinstance(stored, list):
            return tuple(self.state(part) for part in stored)
        return bytes.fromhex(stored["bytes"]) if isinstance(stored, dict) else stored


def _plain_tensor(value: Tensor) -> Tensor:
    """Return a tensor without its history; NotStorable where it is of another kind than a plain one."""
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        raise NotStorable(f"a tensor of class {type(value).__qualname__}")
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise NotStorable(f"a {value.layout} tensor on {value.device}")
    return value.detach()


def _factory(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    name = getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(name) is not factory:
        raise NotStorable(f"a defaultdict of {name or factory}, made as training ran")
    return name or None


def slots_in(value: Any) -> dict[str, Any]:
    """What an object keeps in slots, by their names."""
    return {key: getattr(value, key) for key in slots_of(type(value)) if hasattr(value, key)}


_DIFFERS = "not the same on every rank"


def joined(parts: Sequence[tuple[Record, Mapping[str, Tensor]]]) -> tuple[Record, dict[str, Tensor]]:
    """Put together what processes have recorded that each have a part of the network. What several of them have in
    different states is lost; what has changed in one since all of them loaded it is that one's."""
    found: Record = {"entries": {}, "objects": {}}
    tensors: dict[str, Tensor] = {}
    lost: dict[str, str] = {}

    def add(place: dict[str, Any], key: str, stored: Any, name: str) -> None:
        if place.setdefault(key, stored) != stored:
            lost[name] = _DIFFERS

    active = {name for record, _ in parts for name in _recorded(record) - {*record.get("resting", ())}}
    for record, values in (_without_resting(*part, active) for part in parts):
        lost |= record.get("lost", {})
        found |= {"by rows": record["by rows"]} if "by rows" in record else {}
        for name, stored in record.get("objects", {}).items():
            add(found["objects"], name, stored, name)
        for scope, entries in record.get("entries", {}).items():
            for key, stored in entries.items():
                add(found["entries"].setdefault(scope, {}), key, stored, f"{scope}.{key}")
        for name, tensor in values.items():
            if tensor_digest(tensors.setdefault(name, tensor)) != tensor_digest(tensor):
                lost[name] = _DIFFERS
    if lost:
        found["lost"] = lost
    return found, tensors


def _recorded(record: Record) -> set[str]:
    """The names of all that a record has."""
    entries = {f"{scope}.{key}" for scope, keys in record.get("entries", {}).items() for key in keys}
    return entries | {*record.get("objects", {})}


def _without_resting(
    record: Record, tensors: Mapping[str, Tensor], active: Collection[str]
) -> tuple[Record, Mapping[str, Tensor]]:
    """A record without what its process has only loaded, where another process has changed that since."""
    resting = {*record.get("resting", ())} & {*active}
    if not resting:
        return record, tensors
    entries = {
        scope: {key: stored for key, stored in keys.items() if f"{scope}.{key}" not in resting}
        for scope, keys in record["entries"].items()
    }
    objects = {name: stored for name, stored in record["objects"].items() if name not in resting}
    stays = {name: t for name, t in tensors.items() if name not in resting and name.partition("[")[0] not in resting}
    return {**record, "entries": entries, "objects": objects}, stays
