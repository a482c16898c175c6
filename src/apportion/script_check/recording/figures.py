"""Records the values that losses and ``backward`` are computed with, from which their scale is found, and the numbers
that a script takes out of small tensors, among which are the figures of its evaluations. Tensors that hold numbers of
all ranks are known as results of collectives, or as computed from such."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import whole

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


CRITERIA = {
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "gaussian_nll_loss", "ctc_loss",
    "cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "soft_margin_loss", "multi_margin_loss",
}  # fmt: skip
"""The loss functions of torch.nn.functional that reduce over rows."""


def record_criterion(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Record one call of a loss function: its value, how it reduces, and over how many rows."""
    if not isinstance(result, Tensor) or result.numel() != 1 or not torch.is_grad_enabled():
        return
    recorder.emit(
        "criterion",
        function=name,
        value=float(whole(result)) if not isinstance(result, DTensor) else None,
        reduction=kwargs.get("reduction", "mean"),
        rows=len(args[0]) if args and isinstance(args[0], Tensor) and args[0].dim() else None,
        counted=_counted(name, args, kwargs),
        site=recorder.site(),
    )


def _counted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The number of targets that count: those other than ``ignore_index``."""
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    if name not in ("cross_entropy", "nll_loss") or not isinstance(target, Tensor) or isinstance(target, DTensor):
        return None
    return None if target.is_floating_point() else int((target != kwargs.get("ignore_index", -100)).sum())


def install(recorder: Recorder) -> None:
    """Record each backward, of the script or of a pipeline's schedule, with the value of what it is called on."""
    backward = torch.autograd.backward
    running = [False]

    @wraps(backward)
    def recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if running[0]:  # torch calls it once more inside of its own, for the mode that is entered
            backward(tensors, *args, **kwargs)
            return
        several = list(tensors) if isinstance(tensors, Sequence) else [tensors]
        first = several[0] if len(several) == 1 else None
        scalar = isinstance(first, Tensor) and not isinstance(first, DTensor) and first.numel() == 1
        value = float(first.detach()) if scalar and first is not None else None
        recorder.emit("backward", value=value, site=recorder.site())
        running[0] = True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            running[0] = False

    torch.autograd.backward = recorded
