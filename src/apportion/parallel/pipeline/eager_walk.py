"""One forward of a network in which its modules and the functions between them are seen, and tensors numbered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apportion.parallel.pipeline.meta_shapes import fresh, leaves, mapped

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

        def one(t: Any) -> Any:
            numbered = isinstance(t, Tensor) and self.number_of(t) is not None
            if not numbered or t.layout != torch.strided or not any(t is g for g in given):
                return t
            return fresh(t, ()) if t.is_meta else torch.ops.aten.alias.default(t)

        return mapped(result, one)

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
