"""Digests any Python value by what it is and does: the same in every process, and another after every edit.

Functions are digested by bytecode, constants, defaults, closure and the globals that the bytecode names; classes by
their attributes and bases; instances by class and attributes; tensors and arrays by their bytes. What an installed
package defines under a name is digested by that name and the package's release. Addresses, line numbers, file names
and the order of sets do not enter. The order of a dict does: a model may be built by walking through it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import struct
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apportion.core.torch_private import OPERATORS, buffers_of, modules_of, parameters_of
from apportion.runtime.proof.code_names import NamedGlobal, named_globals
from apportion.runtime.proof.installed_packages import importable, release

_SIZE = 16
_CHANGEABLE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class without it was made in C, and cannot be changed
# fmt: off
_SKIPPED = frozenset((
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__",
    "__classdictcell__", "__conditional_annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__",
    "__doc__", "__firstlineno__", "__match_args__", "__module__", "__orig_bases__", "__parameters__",
    "__static_attributes__", "__weakref__", "_abc_impl", "_autograd_function_id",
))
# fmt: on
"""The attributes of a class that decide nothing, or that other attributes repeat."""
_MODULE_STATE = frozenset(("_parameters", "_buffers", "_modules", "_compiled_call_impl"))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))


class UnhashableError(Exception):
    """A value has no digest; ``str()`` says where it is and what it is."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.place: list[str] = []

    def __str__(self) -> str:
        return ": ".join((*self.place, str(self.args[0])))


class Digester:
    """Computes digests of values; what several of them hold is digested once.

    ``portable``: the digests are the same on two hosts that have the same files and packages in other folders, so of an
    absolute path only the last name counts, and of a package its version.
    """

    def __init__(self, *, portable: bool = False) -> None:
        self._portable = portable
        self._known: dict[int, bytes] = {}
        self._held: list[Any] = []  # an address is a key for as long as the value lives
        self._open: dict[int, int] = {}

    def __call__(self, label: str, value: Any) -> bytes:
        """Returns the digest of a value. Raises UnhashableError, with the label among its places, where it has none."""
        try:
            return self._digest(value)
        except UnhashableError as error:
            error.place.insert(0, label)
            raise
        except RecursionError:
            raise UnhashableError(f"a {type(value).__name__} that is nested too deeply") from None

    def stands_for(self, value: Any, digest: bytes) -> None:
        """Sets the digest of a value for all later calls, whatever the value holds."""
        self._known[id(value)] = digest
        self._held.append(value)

    def _release(self, module: str) -> str | None:
        return release(module, portable=self._portable)

    def _digest(self, value: Any) -> bytes:
        if self._portable and isinstance(value, str | PurePath) and PurePath(value).is_absolute():
            return seal("path", PurePath(value).name)
        # Small ints and texts are shared between unrelated values, so that they are not kept by address.
        if type(value) in _PLAIN:
            return _plain(value)
        key = id(value)
        if (known := self._known.get(key)) is not None:
            return known
        if (depth := self._open.get(key)) is not None:  # inside itself: how far up is the same in every process
            return seal("above", len(self._open) - depth)
        self._open[key] = len(self._open)
        try:
            found = self._of(value)
        finally:
            del self._open[key]
        self._known[key] = found
        self._held.append(value)
        return found

    def _of(self, value: Any) -> bytes:
        rule = _RULES.get(type(value))
        if rule is not None:
            return rule(self, value)
        for kind, rule in _KINDS:
            if isinstance(value, kind):
                return rule(self, value)
        return self._instance(value)

    # Containers

    def _sequence(self, value: Iterable[Any]) -> bytes:
        return seal(type(value).__name__, *(self(f"[{i}]", item) for i, item in enumerate(value)))

    def _mapping(self, value: Mapping[Any, Any]) -> bytes:
        items = (part for k, v in value.items() for part in (self("a key", k), self(f"[{_short(k)}]", v)))
        return seal(type(value).__name__, *items)

    def _set(self, value: Iterable[Any]) -> bytes:
        """Digests the items in the order of their digests. Each is digested as if it were the first that is met."""
        found = []
        for item in value:
            # Sets have no order: with a shared memo the digest of an item would depend on which item was met before it.
            alone = Digester(portable=self._portable)
            alone._open = dict(self._open)
            found.append(alone("an item", item))
        return seal(type(value).__name__, *sorted(found))

    def _digest_of_partial(self, value: functools.partial[Any]) -> bytes:
        parts = (self("function", value.func), self("arguments", value.args), self("arguments", value.keywords))
        return seal("partial", *parts, self("attributes", vars(value)))

    def _attributes(self, found: Mapping[str, Any]) -> Iterator[Any]:
        """Yields the attributes of an object, by name: their order decides nothing."""
        for name in sorted(found):
            yield from (name, self(name, found[name]))

    # Code

    def _code(self, code: types.CodeType) -> bytes:
        """Digests what the code does, not where it stands."""
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_name)
        names = (*code.co_names, "", *code.co_varnames, "", *code.co_freevars, "", *code.co_cellvars)
        constants = (self("a constant", constant) for constant in code.co_consts)
        return seal("code", *shape, code.co_code, code.co_exceptiontable, *names, *constants)

    def _digest_of_function(self, function: types.FunctionType) -> bytes:
        home = str(function.__globals__.get("__name__"))
        if (of := self._release(home)) is not None and importable(function, home, function.__qualname__):
            return seal("installed", home, function.__qualname__, of)
        parts: list[Any] = [self("code", function.__code__), self("defaults", function.__defaults__)]
        parts.append(self("keyword defaults", function.__kwdefaults__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # it has not been assigned yet
                parts += [name, "empty"]
            else:
                parts += [name, self(name, held)]
        parts.extend(self._attributes({k: v for k, v in vars(function).items() if k not in _SKIPPED}))
        if of is not None:  # made in an installed package for its caller: only what it was made of is the caller's
            return seal("made", home, function.__qualname__, of, *parts)
        named = named_globals(function.__code__, function.__globals__)
        return seal("function", *parts, *self._digest_of_named(named, set()))

    def _digest_of_named(self, named: Iterable[NamedGlobal], seen: set[str]) -> Iterator[Any]:
        for found in named:
            if not isinstance(found.value, types.ModuleType):
                yield from (found.name, self(found.name, found.value))
                continue
            own = self._release(found.value.__name__) is None
            if not own:
                yield from (found.name, self(found.name, found.value))
            if found.value.__name__ not in seen:  # modules import each other
                seen.add(found.value.__name__)
                yield found.name
                yield from self._digest_of_named(found.attributes() if own else found.settings(_may_be_set), seen)

    def _builtin(self, value: types.BuiltinFunctionType) -> bytes:
        of = value.__self__
        owner = b"" if of is None or isinstance(of, types.ModuleType) else self("its object", of)
        return seal("builtin", str(value.__module__), value.__qualname__, owner)

    def _digest_of_method(self, value: types.MethodType) -> bytes:
        return seal("method", self("function", value.__func__), self("its object", value.__self__))

    def _digest_of_descriptor(self, value: Any) -> bytes:
        """Digests a slot or a method made in C: its name in its class, which is digested as itself where it is the
        user's."""
        return seal("descriptor", type(value).__name__, value.__objclass__.__qualname__, value.__name__)

    def _wrapping(self, value: staticmethod[Any, Any] | classmethod[Any, Any, Any]) -> bytes:
        return seal(type(value).__name__, self("function", value.__func__))

    def _property(self, value: property) -> bytes:
        return seal("property", *(self("accessor", f) for f in (value.fget, value.fset, value.fdel)))

    def _cached_property(self, value: functools.cached_property[Any]) -> bytes:
        return seal("cached_property", self("function", value.func))

    def _cached(self, value: Any) -> bytes:
        return seal("lru_cache", self("function", value.__wrapped__), self("parameters", value.cache_parameters()))

    def _digest_of_module(self, module: types.ModuleType) -> bytes:
        if (of := self._release(module.__name__)) is not None:
            return seal("installed", module.__name__, of)
        hidden = {k: v for k, v in vars(module).items() if not (k.startswith("__") and k.endswith("__"))}
        return seal("module", *self._attributes(hidden))

    def _digest_of_class(self, cls: type) -> bytes:
        home = cls.__module__ if isinstance(cls.__module__, str) else "builtins"  # a metaclass made in C may hide it
        of = self._release(home)
        if not cls.__flags__ & _CHANGEABLE or (of is not None and importable(cls, home, cls.__qualname__)):
            patched = [self._set_by_others(base) for base in cls.__mro__ if base.__flags__ & _CHANGEABLE]
            return seal("installed", home, cls.__qualname__, of or "", *patched)
        bases = (self(base.__name__, base) for base in cls.__bases__)
        kept = {k: v for k, v in vars(cls).items() if k not in _SKIPPED}
        return seal("class", cls.__qualname__, self("its class", type(cls)), *bases, *self._attributes(kept))

    def _set_by_others(self, cls: type) -> bytes:
        """Digests what others may have set of an installed class: plain values, and what is the user's."""
        found = {k: v for k, v in vars(cls).items() if _foreign(v) or _is_setting(k, v)}
        return seal("set", cls.__qualname__, *self._attributes(found))

    # Values

    def _enum(self, value: enum.Enum) -> bytes:
        return seal("enum", self("its class", type(value)), value.name)

    def _tensor(self, value: Tensor) -> bytes:
        head: tuple[str, ...] = (type(value).__qualname__, str(value.dtype), str(tuple(value.shape)), value.device.type)
        head += (str(value.layout), str(value.requires_grad))
        if value.is_meta or value.grad_fn is not None:  # computed from others, as old weight_norm's weight is
            return seal("tensor", *head)
        if value.layout == torch.sparse_coo:
            whole = value.detach().coalesce()
            return seal("tensor", *head, self("indices", whole.indices()), self("values", whole.values()))
        if value.layout != torch.strided or value.is_quantized or type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            raise UnhashableError(f"a tensor of type {type(value).__name__} and layout {value.layout}")
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return seal("tensor", *head, plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b"")

    def _array(self, value: np.ndarray | np.generic) -> bytes:
        array = np.ascontiguousarray(value)
        head = (type(value).__name__, array.dtype.str, str(array.dtype.descr), str(value.shape))
        if array.dtype.hasobject:
            return seal("array", *head, self("elements", array.tolist()))
        return seal("array", *head, array.reshape(-1).view(np.uint8) if array.size else b"")

    def _generator(self, value: torch.Generator) -> bytes:
        return seal("generator", str(value.device), self("state", value.get_state()))

    def _by_name(self, value: Any) -> bytes:
        return seal(type(value).__name__, str(value))

    def _logger(self, value: logging.Logger) -> bytes:
        return seal("logger", value.name)

    def _reference(self, value: weakref.ref[Any]) -> bytes:
        return seal("reference", self("its object", value()))

    def _layer(self, value: nn.Module) -> bytes:
        return seal(
            "layer", self.layer(value), *self._attributes(layer_tensors(value)), *self._attributes(_inner(value))
        )

    def layer(self, module: nn.Module) -> bytes:
        """Digests one layer: its class and its plain attributes, without its parameters, buffers and inner layers."""
        kept: dict[str, Any] = {}
        compiled = type(module).__name__ == "OptimizedModule"  # by torch.compile: it holds the layer, and how
        for name, value in () if compiled else vars(module).items():
            if name in _MODULE_STATE or (name.startswith("_") and not value):
                continue
            # The numbers of hooks count all hooks of a process.
            kept[name] = [*value.values()] if "_hooks" in name and isinstance(value, Mapping) else value
        return seal("layer", self("its class", type(module)), *self._attributes(kept))

    def _instance(self, value: Any) -> bytes:
        cls = type(value)
        kind = self("its class", cls)
        if cls.__module__ == "itertools":
            raise UnhashableError(f"an iterator of itertools ({cls.__name__})")
        own = any(getattr(cls, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
        solid = next(base for base in cls.__mro__ if not base.__flags__ & _CHANGEABLE)
        attributes = {**dict(_slots(value)), **getattr(value, "__dict__", {})}
        attributes = {name: kept for name, kept in attributes.items() if not _is_kept_hash(name, kept)}
        if own or not (solid in _CONTENTS or (solid is object and (attributes or hasattr(value, "__dict__")))):
            return seal("value", kind, self._reduced(value))
        contents = (_CONTENTS[solid](self, value),) if solid in _CONTENTS else ()
        return seal("instance", kind, *contents, *self._attributes(attributes))

    def _reduced(self, value: Any) -> bytes:
        """Digests a value that was made in C by what a pickle of it would hold."""
        try:
            made = value.__reduce_ex__(4)
        except Exception as error:
            raise UnhashableError(f"a {type(value).__module__}.{type(value).__qualname__}") from error
        if isinstance(made, str):
            return seal("name", made)
        function, arguments, state, items, pairs = (*made, None, None, None)[:5]
        parts = (function, arguments, state, None if items is None else [*items], None if pairs is None else [*pairs])
        return seal("made", *(self("its state", part) for part in parts))


def _is_kept_hash(name: str, value: Any) -> bool:
    """Tells whether an object keeps its own ``hash()`` there, as transformers' configurations do: the hash of a text is
    another one in every process, and what it is of is digested anyway."""
    return name.startswith("_") and name.endswith("hash") and type(value) is int


def seal(tag: str, *parts: Any) -> bytes:
    """The digest of these parts: texts, numbers, digests and arrays of bytes, each preceded by its length, so that no
    two lists of parts give the same bytes."""
    made = hashlib.blake2b(tag.encode(), digest_size=_SIZE)
    for part in parts:
        data = part if isinstance(part, bytes | np.ndarray) else str(part).encode("utf-8", "surrogatepass")
        made.update(b"%d:" % (data.nbytes if isinstance(data, np.ndarray) else len(data)))
        made.update(data.data if isinstance(data, np.ndarray) else data)
    return made.digest()


def layer_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A layer's own parameters and buffers."""
    found = {**parameters_of(module), **buffers_of(module)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _inner(module: nn.Module) -> dict[str, Any]:
    return {f"{i} {name}": inner for i, (name, inner) in enumerate(modules_of(module).items())}


def _plain(value: Any) -> bytes:
    if isinstance(value, float):
        return seal("float", struct.pack("<d", value))
    if isinstance(value, complex):
        return seal("complex", struct.pack("<dd", value.real, value.imag))
    return seal(type(value).__name__, value if isinstance(value, str | bytes) else repr(value))


def _short(key: Any) -> str:
    return repr(key)[:40] if isinstance(key, str | int) else type(key).__name__


def _foreign(value: Any) -> bool:
    """Tells whether it is the user's function, or of a class of the user's, put into a class or module of an installed
    package."""
    if isinstance(value, functools.partial):
        return _foreign(value.func)
    if isinstance(value, types.FunctionType):
        return release(str(value.__globals__.get("__name__"))) is None
    return not isinstance(value, type | types.ModuleType) and release(type(value).__module__) is None


def _is_setting(name: str, value: Any) -> bool:
    """Tells whether an attribute of an installed package is a plain value that others may set."""
    return not name.startswith("_") and type(value) in _PLAIN


def _may_be_set(name: str, value: Any) -> bool:
    """Tells whether an attribute of an installed module may decide what code computes beside the module's release: a
    plain value, a module or class with such attributes, or what the user has put there."""
    return _is_setting(name, value) or isinstance(value, types.ModuleType | type) or _foreign(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and cls.__flags__ & _CHANGEABLE:
                try:
                    yield name, member.__get__(value, type(value))
                except AttributeError:  # nothing was assigned to it
                    pass


_Rule = Callable[[Digester, Any], bytes]
_RULES: dict[type, _Rule] = {
    tuple: Digester._sequence,
    list: Digester._sequence,
    torch.Size: Digester._sequence,
    dict: Digester._mapping,
    types.MappingProxyType: Digester._mapping,
    set: Digester._set,
    frozenset: Digester._set,
    functools.partial: Digester._digest_of_partial,
    types.CodeType: Digester._code,
    types.FunctionType: Digester._digest_of_function,
    types.BuiltinFunctionType: Digester._builtin,
    types.MethodType: Digester._digest_of_method,
    types.MethodDescriptorType: Digester._digest_of_descriptor,
    types.WrapperDescriptorType: Digester._digest_of_descriptor,
    types.ClassMethodDescriptorType: Digester._digest_of_descriptor,
    types.GetSetDescriptorType: Digester._digest_of_descriptor,
    types.MemberDescriptorType: Digester._digest_of_descriptor,
    functools.cached_property: Digester._cached_property,
    staticmethod: Digester._wrapping,
    classmethod: Digester._wrapping,
    property: Digester._property,
    type(functools.lru_cache(abs)): Digester._cached,
    torch.dtype: Digester._by_name,
    torch.device: Digester._by_name,
    torch.layout: Digester._by_name,
    torch.memory_format: Digester._by_name,
    torch.Generator: Digester._generator,
    weakref.ReferenceType: Digester._reference,
}
"""The rule for values of exactly this type."""
_KINDS: tuple[tuple[Any, _Rule], ...] = (
    (type, Digester._digest_of_class),
    (nn.Module, Digester._layer),
    (Tensor, Digester._tensor),
    ((np.ndarray, np.generic), Digester._array),
    ((*OPERATORS, np.dtype, np.ufunc), Digester._by_name),
    (enum.Enum, Digester._enum),
    (types.ModuleType, Digester._digest_of_module),
    (logging.Logger, Digester._logger),
)
"""The rule for values of these types and of their subclasses."""
_CONTENTS: Mapping[type, _Rule] = {
    tuple: Digester._sequence,
    list: Digester._sequence,
    dict: Digester._mapping,
    set: Digester._set,
    frozenset: Digester._set,
    str: lambda _, value: seal("str", str.__str__(value)),
    bytes: lambda _, value: seal("bytes", bytes(value)),
    int: lambda _, value: seal("int", int.__repr__(value)),
    float: lambda _, value: seal("float", float.__repr__(value)),
}
"""The rule for what an instance of a subclass holds besides its attributes."""
