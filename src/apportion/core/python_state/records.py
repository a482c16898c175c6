"""Values as plain JSON and tensors, and back. Reading runs no code: what JSON names is looked up in short lists."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from apportion.core.python_state.leaves import GENERATORS, Drawn, generator_state, new_generator
from apportion.core.python_state.search import origin

_DICTS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_KINDS = {of: kind for kind, of in (*_DICTS.items(), *_SEQUENCES.items())}
_KINDS |= {deque: "deque", complex: "complex", bytes: "bytes"}
_DEPTH = 100


class NotStorable(Exception):
    """A value that JSON and tensors cannot hold. The text says what it is."""


@final
class ValueWriter:
    """Writes values. ``at``: the names of objects that every process finds by itself, by their identity; ``kept``: what
    stands for an object that may be changing now, by its identity."""

    def __init__(self, at: Mapping[int, str], kept: Mapping[int, Any]) -> None:
        self._at, self._kept = at, kept
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
        stored = self.contents(self._kept.get(id(value), value), name, depth)
        return {**stored, "number": number}

    def contents(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return the JSON of a value, written out also where every process has the object."""
        if isinstance(value, Drawn):
            return {"generator": self._state(value.state)}
        kind = _KINDS.get(type(value), "filled" if isinstance(value, defaultdict) else "")
        if kind == "deque":
            return {kind: self._items(value, name, depth), "most": value.maxlen}
        if kind in _SEQUENCES:
            return {kind: self._items(value, name, depth)}
        if kind in _DICTS or kind == "filled":
            return {kind: self._pairs(value, name, depth)}
        if kind == "complex":
            return {kind: [value.real, value.imag]}
        if kind == "bytes":
            return {kind: value.hex()}
        if isinstance(value, GENERATORS):
            return {"generator": self._state(generator_state(value))}
        return self._arrays(value, name, depth)

    def _arrays(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
                raise NotStorable(f"a tensor of class {type(value).__qualname__}")
            if value.layout is not torch.strided or value.is_meta or value.is_quantized:
                raise NotStorable(f"a {value.layout} tensor on {value.device}")
            return {"tensor": self._tensor(value.detach().clone(), name)}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            kind = "array" if isinstance(value, np.ndarray) else "number"
            try:
                return {kind: self._tensor(torch.from_numpy(np.array(value)), name)}
            except TypeError:
                raise NotStorable(f"an array of {value.dtype}") from None
        if isinstance(value, enum.Enum):
            return {"member": value.name, "of": type(value).__qualname__}
        if isinstance(value, torch.Size):
            return {"size": [*value]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict) and origin(type(value)) == "user" and not callable(value):
            return {"object": type(value).__qualname__, "fields": self._pairs(fields, name, depth)}
        raise NotStorable(f"an object of {type(value).__qualname__}")

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

    def __init__(self, at: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._at, self._tensors = at, tensors
        self._numbered: dict[int, Any] = {}

    def value(self, stored: Any, now: Any = None) -> Any:
        """Return the value that JSON stands for. ``now``: what is in its place, which says of which class an object is,
        or a member of an enumeration. ValueError where it is not what is written there."""
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
            raise ValueError(f"{str(stored)[:80]} is no value that was kept here ({error})") from None

    def _value(self, stored: Mapping[str, Any], now: Any) -> Any:
        kind, inner = next(iter(stored.items()))
        if kind == "at":
            return self._at[inner]
        if kind in _SEQUENCES or kind == "deque":
            items = [self.value(item) for item in inner]
            return deque(items, maxlen=stored["most"]) if kind == "deque" else _SEQUENCES[kind](items)
        if kind in _DICTS:
            return _DICTS[kind](self.pairs(inner))
        if kind == "filled":
            return defaultdict(now.default_factory if isinstance(now, defaultdict) else None, self.pairs(inner))
        if kind in ("tensor", "array", "number"):
            tensor = self._tensors[inner].clone()
            return tensor if kind == "tensor" else tensor.numpy() if kind == "array" else tensor.numpy()[()]
        return self._plain(kind, stored, now)

    def _plain(self, kind: str, stored: Mapping[str, Any], now: Any) -> Any:
        inner = stored[kind]
        if kind == "size":
            return torch.Size(inner)
        if kind == "complex":
            return complex(*inner)
        if kind == "bytes":
            return bytes.fromhex(inner)
        if kind == "generator":
            return new_generator(self.state(inner))
        return self._made(kind, stored, now)

    def _made(self, kind: str, stored: Mapping[str, Any], now: Any) -> Any:
        if kind == "dtype":
            found = getattr(torch, stored["dtype"])
            if isinstance(found, torch.dtype):
                return found
        named = stored.get("of") if kind == "member" else stored.get("object")
        if type(now).__qualname__ != named:
            raise ValueError(f"{named} is not the class of what is in its place, {type(now).__qualname__}")
        if kind == "member" and isinstance(now, enum.Enum):
            return type(now)[stored["member"]]
        made = object.__new__(type(now))
        before = vars(now)
        for key, value in stored["fields"]:
            made.__dict__[key] = self.value(value, before.get(key))
        return made

    def pairs(self, stored: Any) -> list[tuple[Any, Any]]:
        """Return the pairs of a dict."""
        return [(self.value(key), self.value(value)) for key, value in stored]

    def state(self, stored: Any) -> Any:
        """Return the state of a generator."""
        if isinstance(stored, list):
            return tuple(self.state(part) for part in stored)
        return bytes.fromhex(stored["bytes"]) if isinstance(stored, dict) else stored
