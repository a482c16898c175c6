"""Records the numbers that a script takes out of small tensors, among which are the figures of its evaluations, and
which of these tensors hold numbers of all ranks, as results of collectives or computed from such."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from apportion.script_check.recording.recorder import Recorder

NAMES = {"item", "__float__", "__int__", "tolist", "__format__", "__repr__", "numpy"}
"""The functions by which numbers leave a tensor."""
LARGEST = 1 << 12
"""The most numbers that are recorded of one tensor."""


def record_figure(recorder: Recorder, name: str, args: tuple[Any, ...], reduced: bool) -> None:
    """Record the numbers of a tensor that the script's own code, or a library on its behalf, reads as numbers.
    ``reduced``: whether they are results of a collective, or computed from such."""
    tensor = args[0] if args else None
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or recorder.drawing or not recorder.active:
        return
    if tensor.numel() > LARGEST or tensor.is_complex() or tensor.is_meta or tensor.layout != torch.strided:
        return
    numbers = tensor.detach().to("cpu", torch.float64, copy=True).flatten().numpy().tolist()
    recorder.emit(
        "figure",
        function=name,
        values=numbers,
        reduced=reduced,
        direct=recorder.is_direct(),
        gradients=torch.is_grad_enabled(),
        site=recorder.site(),
    )


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
