"""Knows which tensors are results of collectives, or were computed from such: the figures of all ranks together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_INTO_FIRST = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
_MOST = 1 << 12


class Reductions:
    """The tensors of evaluations that hold numbers of all ranks."""

    def __init__(self) -> None:
        self._marked = dict[int, weakref.ref[Tensor]]()
        for name in _INTO_FIRST:
            setattr(dist, name, self._watched(getattr(dist, name)))
        dist.gather = self._gathering(dist.gather)

    def marked(self, tensor: Tensor) -> bool:
        """Whether a tensor holds numbers of all ranks."""
        found = self._marked.get(id(tensor))
        return found is not None and found() is tensor

    def follow(self, args: tuple[Any, ...], result: Any) -> None:
        """Mark the result of a function of which an argument is marked."""
        if not self._marked or not isinstance(result, Tensor) or torch.is_grad_enabled():
            return
        if any(self.marked(tensor) for tensor in _tensors(args)):
            self._mark(result)

    def _mark(self, tensor: Tensor) -> None:
        if len(self._marked) > _MOST:
            self._marked = {key: found for key, found in self._marked.items() if found() is not None}
        self._marked[id(tensor)] = weakref.ref(tensor)

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def reduced(*args: Any, **kwargs: Any) -> Any:
            for tensor in _tensors((args[0] if args else next(iter(kwargs.values()), None),)):
                self._mark(tensor)
            return function(*args, **kwargs)

        return reduced

    def _gathering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            for tensor in _tensors((kwargs.get("gather_list", args[1] if len(args) > 1 else None),)):
                self._mark(tensor)
            return function(*args, **kwargs)

        return gathered


def _tensors(args: Any) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))
