"""The search for what can hold state: from a model, a loss, a data set to all that their code can reach.

Followed are attributes, the elements of containers, and of functions what they name: variables of closures, default
arguments, attributes, globals, and functions and classes of the user's. Library code is taken to keep no state of its
own; objects of its classes are looked into.
"""

from __future__ import annotations

import enum
import functools
import io
import queue
import sys
import types
import weakref
from collections import UserDict, UserList
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from apportion.core.installed import in_packages
from apportion.core.python_state.leaves import ExtraLeaf, Leaf, has_extra_state, leaf_of
from apportion.core.python_state.scopes import Cell, ClassScope, Scope, Slots, slots_of
from apportion.core.torch_private import modules_of

ATOMS: tuple[type, ...] = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device, torch.Size)
"""Types whose values never change, and hold nothing that does."""
_OF_APPORTION = frozenset(("_sink", "_whole", "forward", "_compiled_call_impl", "_flat_weights", "_flat_weight_refs"))
"""Attributes that strategies give to layers of the user's."""
MOST = 100_000
"""The number of objects after which the search ends: a data set may be one for each example."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_OF_OPTIMIZERS = frozenset(
    (
        *("state", "param_groups", "defaults", "step", "_step_count", "_opt_called", "_zero_grad_profile_name"),
        *("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"),
    )
)
_INSPECTED = (UserDict, UserList, types.SimpleNamespace, queue.Queue)
"""Classes of the standard library whose objects are looked into."""


@final
class Search:
    """What was found so far. ``excluded``: whether a name of a scope holds no state, by the scope and the name."""

    def __init__(self, excluded: Callable[[Scope, str], bool] = lambda scope, key: False) -> None:
        self._excluded = excluded
        self.scopes: list[Scope] = []
        self.leaves: list[Leaf] = []
        self.iterators: dict[str, str] = {}
        """What cannot be read without changing it (iterators, queues), by path: the names of the classes."""
        self.seen: dict[int, Any] = {}
        """What was looked at, by its identity, which stays its own as long as it is kept here."""
        self.models: dict[str, weakref.ref[nn.Module]] = {}
        """The networks and losses that are modules, to whose parameters and modules values may refer."""
        self._globals: dict[int, tuple[Scope, dict[str, None]]] = {}
        self._names: set[str] = set()
        self.classes: dict[str, type | None] = {}
        """The classes of the user's by their names; None where several have one name."""
        self._classes: set[int] = set()
        self._todo: list[tuple[str, Any]] = []
        self._root = ""

    def known(self, tensors: Iterator[torch.Tensor]) -> None:
        """Leave these tensors to those who keep them. These may give them up: where weights are spread over ranks, no
        rank keeps the whole ones."""
        for tensor in tensors:
            self.seen[id(tensor)] = weakref.ref(tensor, functools.partial(self._forget, id(tensor)))

    def _forget(self, number: int, _: object) -> None:
        self.seen.pop(number, None)

    def visit(self, name: str, value: Any) -> None:
        """Find all that can be reached from a value."""
        self._root = name.partition(".")[0]
        self._todo.append((name, value))
        while self._todo and len(self.seen) < MOST:
            self._visit(*self._todo.pop())
        self._todo.clear()

    def inside(self, scope: Scope, keys: list[str]) -> None:
        """Find all that can be reached from these names of a scope."""
        for key in keys:
            if key in scope.mapping and not self._excluded(scope, key):
                self.visit(f"{scope.name}.{key}", scope.mapping[key])

    def counts(self, scope: Scope, key: str) -> bool:
        """Tell whether a name of a scope may hold state."""
        return not self._excluded(scope, key)

    def _visit(self, name: str, value: Any) -> None:
        if type(value) in ATOMS or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        for kinds, look in self._looks:
            if isinstance(value, kinds):
                look(self, name, value)
                if isinstance(value, tuple) and type(value) is not tuple:
                    self._class(name, type(value))
                return
        if (leaf := leaf_of(name, value)) is not None:
            if any(isinstance(item, nn.Parameter) for _, item in leaf.inside()):
                return  # as the flat weights of an LSTM: they go where the parameters go
            self._add_leaf(leaf)
            self._todo += [(f"{name}{at}", item) for at, item in leaf.inside()]
            if getattr(value, "__dict__", None) is not None and origin(type(value)) == "user":
                self._object(name, value)  # a class made from a built-in one, with attributes of its own
        elif isinstance(value, queue.SimpleQueue) or (
            hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
        ):
            self.iterators[name] = type(value).__name__
        else:
            self._object(name, value)

    def _add_leaf(self, leaf: Leaf) -> None:
        leaf.name, leaf.root = self._unique(leaf.name), self._root
        self.leaves.append(leaf)

    def _add(self, scope: Scope) -> None:
        scope.name, scope.root = self._unique(scope.name), self._root
        self.scopes.append(scope)
        for key in scope.names():
            if key in scope.mapping and not self._excluded(scope, key):
                self._todo.append((f"{scope.name}.{key}", scope.mapping[key]))

    def _unique(self, name: str) -> str:
        made, number = name, 1
        while made in self._names:
            number += 1
            made = f"{name}#{number}"
        self._names.add(made)
        return made

    # Kinds

    def _tuple(self, name: str, value: Any) -> None:
        self._todo += [(f"{name}[{i}]", item) for i, item in enumerate(value)]

    def _nothing(self, name: str, value: Any) -> None:
        pass

    def _member(self, name: str, value: enum.Enum) -> None:
        self._class(name, type(value))

    def _module(self, name: str, module: nn.Module) -> None:
        if has_extra_state(module):
            self._add_leaf(ExtraLeaf(f"{name} extra state", module))
        for key in _OF_MODULES:
            hooks = module.__dict__.get(key)
            if key.endswith("_hooks") and isinstance(hooks, Mapping):
                self._todo += [(f"{name}.{key}[{i}]", hook) for i, hook in enumerate(hooks.values())]
        if origin(type(module)) != "apportion":
            self._class(name, type(module))
            self._add(Scope(name, type(module).__name__, module.__dict__, skipped=_OF_MODULES | _OF_APPORTION))
        self._todo += [(f"{name}.{key}", child) for key, child in reversed(modules_of(module).items())]

    def _optimizer(self, name: str, optimizer: Optimizer) -> None:
        hooks = [key for key in vars(optimizer) if key.endswith("_hooks")]
        self._todo += [(f"{name}.{key}", hook) for key in hooks for hook in vars(optimizer)[key].values()]
        self._class(name, type(optimizer))
        skipped = _OF_OPTIMIZERS | frozenset(hooks)
        self._add(Scope(name, type(optimizer).__name__, vars(optimizer), skipped=skipped))

    def _schedule(self, name: str, schedule: LRScheduler) -> None:
        """What its ``state_dict()`` has is saved by that."""
        self._class(name, type(schedule))
        skipped = frozenset((*schedule.state_dict(), "optimizer"))
        saved = [value for key, value in vars(schedule).items() if key in skipped and key != "optimizer"]
        self._add(Scope(name, type(schedule).__name__, vars(schedule), skipped=skipped))
        for functions in saved:
            self._functions(name, functions)

    def _functions(self, name: str, value: Any) -> None:
        for item in value if isinstance(value, list | tuple) else (value,):
            if callable(item):
                self._todo.append((name, item))

    def _function(self, name: str, function: types.FunctionType) -> None:
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self._todo.append((name, wrapped))
        if origin(function) != "user":
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self.seen:
                self.seen[id(cell)] = cell
                self._add(Scope(f"{name}()", name, Cell(variable, cell)))
        self._todo += [(f"{name}({i})", v) for i, v in enumerate(function.__defaults__ or ())]
        self._todo += [(f"{name}({k}=)", v) for k, v in (function.__kwdefaults__ or {}).items()]
        self._add(Scope(f"{name}()", name, function.__dict__, skipped=frozenset(("__wrapped__",))))
        self._named(name, function.__globals__, {*code_names(function.__code__)})

    def _named(self, name: str, variables: dict[str, Any], names: set[str]) -> None:
        """The globals that code names, and what it names of the user's modules."""
        if id(variables) not in self._globals:
            keys: dict[str, None] = {}
            self.seen[id(variables)] = variables
            scope = Scope(f"globals of {name}", "", variables, keys=())
            self._globals[id(variables)] = scope, keys
            self._add(scope)
        scope, keys = self._globals[id(variables)]
        for key in sorted(names & variables.keys()):
            value = variables[key]
            if isinstance(value, types.ModuleType):
                if origin(value) == "user" and value.__dict__ is not variables:
                    self._named(f"{name}.{key}", value.__dict__, names)
            elif key not in keys and not (key.startswith("__") and key.endswith("__")):
                keys[key] = None
                scope.restrict(keys)
                if not self._excluded(scope, key):
                    self._todo.append((key, value))

    def _method(self, name: str, method: types.MethodType) -> None:
        self._todo += [(f"{name}.__self__", method.__self__), (name, method.__func__)]

    def _partial(self, name: str, value: functools.partial[Any]) -> None:
        self._todo += [(name, value.func), (f"{name}()", value.args), (f"{name}(=)", value.keywords)]

    def _wrapper(self, name: str, value: Any) -> None:
        self._todo.append((name, value.__wrapped__))

    def _class(self, name: str, cls: type) -> None:
        for one in cls.__mro__:
            if origin(one) != "user" or id(one) in self._classes:
                continue
            self._classes.add(id(one))
            self.seen[id(one)] = one
            self.classes[one.__qualname__] = None if one.__qualname__ in self.classes else one
            if not issubclass(one, enum.Enum):
                self._add(ClassScope(f"class {one.__qualname__}", one))

    def _class_itself(self, name: str, cls: type) -> None:
        self._class(name, cls)

    def _descriptor(self, name: str, value: Any) -> None:
        found = getattr(value, "__func__", None), *(getattr(value, part, None) for part in ("fget", "fset", "func"))
        self._todo += [(name, function) for function in found if function is not None]

    def _object(self, name: str, value: Any) -> None:
        of = origin(type(value))
        if of == "apportion":
            parts = getattr(value, "opened_parts", None)
            self._todo += [(f"{name}[{part}]", data) for part, data in (parts or {}).items()]
            return
        if of == "standard" and not isinstance(value, _INSPECTED):
            return
        self._class(name, type(value))
        if slots := slots_of(type(value)):
            self._add(Scope(name, type(value).__name__, Slots(value, slots), owner=value))
        if isinstance(getattr(value, "__dict__", None), dict):
            self._add(Scope(name, type(value).__name__, value.__dict__, owner=value))
        if callable(value) and origin(type(value)) == "user":
            self._todo.append((f"{name}.__call__", type(value).__call__))

    _looks: tuple[tuple[Any, Callable[[Search, str, Any], None]], ...] = (
        ((tuple, frozenset), _tuple),
        (enum.Enum, _member),
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (functools.partial, _partial),
        ((staticmethod, classmethod, property, functools.cached_property), _descriptor),
        (type(functools.lru_cache(lambda: None)), _wrapper),
        (types.ModuleType, _nothing),
        (type, _class_itself),
        (nn.Module, _module),
        (Optimizer, _optimizer),
        (LRScheduler, _schedule),
        ((types.BuiltinFunctionType, types.CodeType), _nothing),
    )


def code_names(code: types.CodeType) -> Iterator[str]:
    """Every name that code asks its globals for, or an object, and that of the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


def origin(value: Any) -> str:
    """Tell whose code a class, a function or a module is: "user", "apportion", "standard" or "library"."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if isinstance(value, types.FunctionType):
        name = value.__globals__.get("__name__", name)
    return _origin(str(name))


@functools.cache
def _origin(module: str) -> str:
    top = module.partition(".")[0]
    if top == "apportion":
        return "apportion"
    if top in ("__main__", "__mp_main__"):
        return "user"
    if top in sys.stdlib_module_names:
        return "standard"
    file = getattr(sys.modules.get(module) or sys.modules.get(top), "__file__", None) or ""
    return "library" if in_packages(file) else "user"
