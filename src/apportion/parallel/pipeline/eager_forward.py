"""The network's own forward, of which a rank computes one stretch: for networks whose graph cannot be traced.

::

    the forward         mask  embed  add  block 0  block 1  |  block 2  norm  head  loss
    rank 0 computes     mask  embed  add  block 0  block 1  |  it leaves the forward here
    rank 1 computes     mask    -     -      -        -     |  block 2  norm  head  loss

Every rank calls the forward as it is written. A module that another rank computes is not called: it gives tensors of
the meta device, which have shapes and no numbers, and so does every function that is given one of these, or a
parameter. What is made of the inputs alone (masks, positions) every rank computes. Where a rank's stretch begins, the
tensors that are used from there on are exchanged for those that were received, in place: the forward goes on with them,
wherever it keeps them.

Which tensors these are is recorded in one forward of the whole network: each tensor that depends on a module or a
parameter has a number, in the order in which they are made, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from apportion.core import tree
from apportion.parallel.pipeline.meta_shapes import CannotRun, alike, fresh, leaves, mapped, on_meta, shapes_of

# One forward of a network in which its modules and the functions between them are seen, and tensors numbered.

NUMBER = "_apportion_number"
"""The attribute that holds the number of a tensor which depends on a module or a parameter, with the walk that gave it:
a buffer that a forward writes to is there in the next walk too."""
WITHIN = "_apportion_within"
"""The attribute that holds, in a recording, the name of the module within which a tensor was made."""
_DEVICE: Any = Tensor.device.__get__
_LOOKS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "requires_grad", "layout", "ndim", "is_leaf", "is_sparse", "grad_fn", "is_nested")
)
_ASKS = frozenset((
    "size", "dim", "numel", "ndimension", "stride", "is_contiguous", "is_floating_point", "is_complex", "__len__",
    "element_size", "get_device", "__hash__", "__format__",
))  # fmt: skip
"""The functions that tell something of a tensor, and nothing of the numbers in it."""
_DRAWS = frozenset((
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "bernoulli_", "uniform_", "normal_", "exponential_", "log_normal_", "geometric_",
    "cauchy_", "random_", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
))  # fmt: skip
"""The functions that draw random numbers, which one rank alone computes."""


class Walk(TorchFunctionMode):
    """One forward, in which modules and the functions between them are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        """True while one of the modules is being called."""
        self._counts = False
        """True while this object itself computes."""
        self.calls = 0
        """The number of calls that have begun."""
        self.values = 0
        """The number of tensors that have been numbered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._counts:
            return func(*args, **kwargs)
        if self.inside:
            return self.within(func, args, kwargs)
        if func in _LOOKS:
            return func(*args, **kwargs)
        if func == _DEVICE:
            return self.device_of(args[0])
        name = getattr(func, "__name__", "")
        if name in _ASKS:
            return func(*args, **kwargs)
        given = list(leaves((args, kwargs)))
        if name not in _DRAWS and not any(self.number_of(t) is not None or isinstance(t, nn.Parameter) for t in given):
            self.free(name, given)
            return func(*args, **kwargs)
        self.use(given, self.calls)
        result = self.compute(func, name, args, kwargs, given)
        if writes(name, kwargs):
            given = [
                t for t in given if self.number_of(t) is not None or not any(t is one for one in into(args, kwargs))
            ]
            self.number(into(args, kwargs), given)
            given = [*given, *into(args, kwargs)]
        else:
            result = self.another(result, given)
        self.number(result, given)
        return result

    def number(self, result: Any, given: Sequence[Tensor]) -> None:
        """Give every tensor of a result its number."""
        known = {id(t) for t in given}
        for t in leaves(result):
            if id(t) not in known and not isinstance(t, nn.Parameter):
                known.add(id(t))
                setattr(t, NUMBER, (self, self.values))
                self.named(t)
                self.values += 1

    def device_of(self, tensor: Tensor) -> torch.device:
        return tensor.device

    def free(self, name: str, given: Sequence[Tensor]) -> None:
        """Handle a function of the inputs alone that is about to be computed."""

    def within(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def compute(self, func: Any, name: str, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        return func(*args, **kwargs)

    def use(self, given: Any, at: int) -> None:
        """Handle the use of these tensors, after ``at`` calls."""

    def named(self, tensor: Tensor) -> None:
        """Handle a tensor that is given the next number."""

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.calls += 1
        given = list(leaves((args, kwargs)))
        self.use(given, self.calls)
        with self.called():
            result = self.another(run(*args, **kwargs), given)
        self.number(result, given)
        return result

    def number_of(self, tensor: Tensor) -> int | None:
        """The number that this walk has given a tensor; None: none."""
        walk, number = getattr(tensor, NUMBER, (None, None))
        return number if walk is self else None

    def another(self, result: Any, given: Sequence[Tensor]) -> Any:
        """The result, in which another tensor of the same elements stands for each one that was given: whether
        ``contiguous`` gives what it is given depends on strides, which differ for other rows and on the meta device,
        and numbers may not."""

        def convert(t: Any) -> Any:
            numbered = isinstance(t, Tensor) and self.number_of(t) is not None
            if not numbered or t.layout != torch.strided or not any(t is g for g in given):
                return t
            return fresh(t, ()) if t.is_meta else torch.ops.aten.alias.default(t)

        return mapped(result, convert)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    @contextmanager
    def called(self) -> Iterator[None]:
        self.inside, self._counts = True, False
        try:
            yield
        finally:
            self.inside, self._counts = False, True


def writes(name: str, kwargs: Any) -> bool:
    ends = name.endswith("_") and not name.endswith("__")
    return ends or name in ("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__") or "out" in kwargs


def into(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a function writes to."""
    return [*leaves(args[:1]), *leaves(kwargs.get("out"))]


END = 1 << 30


class _Reached(BaseException):
    """Signals the end of a rank's stretch; it is a BaseException, since a forward might catch an Exception."""


class OtherWay(ValueError):
    """A forward that calls other modules or functions for this batch than in the forward that was recorded."""


@dataclass
class Recorded:
    """The record of one forward of the whole network."""

    calls: list[str] = field(default_factory=list)
    """The modules that were called, in order; ``#2`` at a second call."""
    modules: list[nn.Module] = field(default_factory=list)
    like: list[Any] = field(default_factory=list)
    """The result of each call, its tensors described by the tensors that the call was given; None where that says too
    little."""
    nbytes: list[int] = field(default_factory=list)
    """The bytes of each numbered tensor."""
    made: list[int] = field(default_factory=list)
    """The number of calls that had begun when each numbered tensor was made."""
    used: list[int] = field(default_factory=list)
    """The number of calls that had begun when each numbered tensor was used last."""
    parameters: dict[int, set[int]] = field(default_factory=dict)
    """The parameters (by id) that functions between the modules use, each with the numbers of calls after which it is
    used."""

    def crossing(self, at: int) -> list[int]:
        """The numbers of the tensors that are made before a call and used from it on."""
        return [n for n, (made, used) in enumerate(zip(self.made, self.used, strict=True)) if made <= at < used]

    def before(self, at: int) -> int:
        """The number of tensors that are made before a call."""
        return sum(made <= at for made in self.made)


@final
class OwnForward:
    """A network, and the modules of it that are called by one rank or another."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self.model, self._units = model, units
        self._kinds: list[tuple[nn.Module, type]] = []
        self._walk: Walk | None = None
        self.names = {module: name for name, module in units.items()}
        for name, module in units.items():
            self._kinds.append((module, type(module)))
            try:
                module.__class__ = _intercepted(type(module), self._call)
            except TypeError as error:
                raise CannotRun(f"{name} is a {type(module).__name__}, whose calls cannot be distinguished") from error

    def close(self) -> None:
        """Leave the modules as they were."""
        for module, kind in self._kinds:
            module.__class__ = kind

    def _call(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._walk is None or self._walk.inside:
            return run(*args, **kwargs)
        with self._walk.counting():
            return self._walk.call(module, run, args, kwargs)

    def record(self, inputs: Any) -> Recorded:
        """Run one forward of the whole network, and record it."""
        walk = _Recording(self)
        outputs = self._walked(walk, inputs)
        walk.use(leaves(outputs), END)
        return walk.found

    def stretch(self, inputs: Any, recorded: Recorded, begin: int, end: int, received: Sequence[Any]) -> Any:
        """Run the calls from ``begin`` to ``end`` with what lies between them. ``received``: what the stretch before
        gave. Returns what the next stretch receives; the last one returns the network's outputs."""
        walk = _Stretch(self, recorded, begin, end, received)
        try:
            outputs = self._walked(walk, inputs)
        except _Reached:
            return walk.handed_on()
        if end < len(recorded.calls):
            raise walk.other_way()
        walk.use(leaves(outputs), END)
        return outputs

    def _walked(self, walk: Walk, inputs: Any) -> Any:
        self._walk = walk
        try:
            with walk:
                return tree.call(self.model, inputs)
        finally:
            self._walk = None


def _intercepted(kind: type, call: Callable[..., Any]) -> type:
    """A subclass of a module's class, whose calls go to ``call`` first."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    names = {"__call__": __call__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def _values(result: Any) -> tuple[Any, ...]:
    return result if type(result) is tuple else (result,)


@final
class _Recording(Walk):
    """A walk through the whole network that records it."""

    def __init__(self, own: OwnForward) -> None:
        super().__init__()
        self.own = own
        self.found = Recorded()
        self._times: dict[str, int] = {}

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.own.names[module]
        self._times[name] = self._times.get(name, 0) + 1
        self.found.calls.append(name if self._times[name] == 1 else f"{name}#{self._times[name]}")
        self.found.modules.append(module)
        given = list(leaves((args, kwargs)))
        result = super().call(module, run, args, kwargs)
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values(), *_values(result))):
            raise CannotRun(
                f"{name} is given a PackedSequence, or gives one, whose sizes another stage would not have: pack and "
                "unpack within one module that both layers are in, or use data_parallel"
            )
        self.found.like.append(alike(result, given))
        return result

    def within(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        given = {id(t) for t in leaves((args, kwargs))}
        for t in leaves(result):
            if id(t) not in given and not isinstance(t, nn.Parameter):
                setattr(t, WITHIN, self.found.calls[-1])
        return result

    def free(self, name: str, given: Sequence[Tensor]) -> None:
        for t in given:
            if (where := getattr(t, WITHIN, None)) is not None:
                raise CannotRun(
                    f"{where} keeps a tensor that the forward takes from it afterwards ({name} is called with it), "
                    f"which another stage would not have: let {where} return it"
                )

    def use(self, given: Any, at: int) -> None:
        for t in given:
            if isinstance(t, nn.Parameter):
                self.found.parameters.setdefault(id(t), set()).add(at)
            elif (number := self.number_of(t)) is not None:
                self.found.used[number] = at
            else:
                self.free("a layer or a function" if at != END else "the caller", [t])

    def named(self, tensor: Tensor) -> None:
        self.found.nbytes.append(tensor.nbytes)
        self.found.made.append(self.calls)
        self.found.used.append(-1)


@final
class _Stretch(Walk):
    """A walk in which one rank computes its stretch of the network."""

    def __init__(self, own: OwnForward, recorded: Recorded, begin: int, end: int, received: Sequence[Any]) -> None:
        super().__init__()
        self.own = own
        self._recorded, self._begin, self._end = recorded, begin, end
        self._received = list(received)
        self._arrive = recorded.crossing(begin) if begin else []
        last = end >= len(recorded.calls)
        self._leave = [] if last else recorded.crossing(end)
        self._kept: dict[int, Tensor] = {}
        self._wanted = {*self._arrive, *self._leave}
        self._computes = begin == 0
        self._where = torch.device("cpu")

    def device_of(self, tensor: Tensor) -> torch.device:
        return self._where if tensor.is_meta else tensor.device

    def named(self, tensor: Tensor) -> None:
        if self.values in self._wanted:
            self._kept[self.values] = tensor

    def use(self, given: Any, at: int) -> None:
        if self._computes and any(t.is_meta for t in given):
            raise self.other_way()

    def call(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.calls == self._end:
            raise _Reached
        if self.calls == self._begin and not self._computes:
            self._begins()
        if self._computes:
            return super().call(module, run, args, kwargs)
        like = self._recorded.like[self.calls]
        self.calls += 1
        given = list(leaves((args, kwargs)))
        with self.called():
            result = self.another(shapes_of(module, self.own.names[module], args, kwargs, like), given)
        self.number(result, given)
        return result

    def _begins(self) -> None:
        """Put what was received in the place of the tensors that the forward goes on with."""
        count, *tensors = self._received
        if count != self.values or any(n not in self._kept for n in self._arrive):
            raise self.other_way()
        for number, tensor in zip(self._arrive, tensors, strict=True):
            if tensor.shape != self._kept[number].shape:
                raise self.other_way()
            swap_tensors(self._kept[number], tensor)
            setattr(self._kept[number], NUMBER, (self, number))
        self._computes = True

    def handed_on(self) -> list[Any]:
        if any(n not in self._kept for n in self._leave):
            raise self.other_way()
        return [self.values, *(self._kept[n] for n in self._leave)]

    def other_way(self) -> OtherWay:
        return OtherWay(
            f"{type(self.own.model).__name__} calls other layers or functions for this batch than for the one that it "
            "was cut into stages by: let its forward do the same for every batch, or use data_parallel"
        )

    def compute(self, func: Any, name: str, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        if self._computes:
            return func(*args, **kwargs)
        if name in ("cpu", "cuda"):
            return args[0]
        if writes(name, kwargs):
            for t in into(args, kwargs):
                if not t.is_meta:
                    swap_tensors(t, torch.empty_like(t, device="meta"))
        try:
            result = on_meta(func, args, kwargs, given)
        except Exception as error:
            raise CannotRun(
                f"between its layers the forward of {type(self.own.model).__name__} asks for the numbers in a tensor "
                f"({name}), which another stage has: do so within a layer"
            ) from error
        return fresh(result, given)
