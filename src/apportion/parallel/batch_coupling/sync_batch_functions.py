"""Batch statistics that a user's own forward takes by a function, over the whole global batch.

``sync_batch_norm.py`` changes layers whose forward is torch's. A subclass with a forward of its own, as timm's
BatchNormAct2d, and a network that calls ``functional.batch_norm`` cannot be changed by class: inside their forward the
function itself is another one, which computes what torch's would, with the statistics of all ranks' rows. The running
statistics of instance normalisation are means over examples, and are taken over all ranks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from apportion.core.torch_private import BatchNormBase
from apportion.parallel.ops.sync_batch_norm import NonEmptyRanks, Normalize

_FUNCTIONAL = "x running_mean running_var weight bias training momentum eps"
_TORCH = "x weight bias running_mean running_var training momentum eps cudnn_enabled"
_NAMES: dict[Any, tuple[str, str]] = {
    functional.batch_norm: ("batch", _FUNCTIONAL),
    torch.batch_norm: ("batch", _TORCH),
    functional.instance_norm: ("instance", _FUNCTIONAL),
    torch.instance_norm: ("instance", _TORCH),
}
_OTHER_NAMES = {"input": "x", "use_input_stats": "training"}


@dataclass(frozen=True)
class Normalisation:
    """A call of a function that takes statistics from the batch, or moves running ones by it."""

    kind: str
    """The kind of normalisation, "batch" or "instance"."""
    x: Tensor
    """The input (N, C, ...)."""
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float
    eps: float


def normalisation(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Normalisation | None:
    """The arguments of such a call; None for any other call, also for one that normalises by given statistics."""
    if function not in _NAMES:
        return None
    kind, names = _NAMES[function]
    given = dict(zip(names.split(), args, strict=False)) | {_OTHER_NAMES.get(k, k): v for k, v in kwargs.items()}
    if not given.get("training", kind == "instance") or (kind == "instance" and given.get("running_mean") is None):
        return None
    return Normalisation(
        kind,
        given["x"],
        given.get("running_mean"),
        given.get("running_var"),
        given.get("weight"),
        given.get("bias"),
        given.get("momentum", 0.1),
        given.get("eps", 1e-5),
    )


def use_whole_functions(model: nn.Module, names: Iterable[str], attendance: NonEmptyRanks) -> None:
    """Make the functions that these modules call in their forward take their statistics over all ranks of the group. In
    place, by class: names, parameters, buffers and hooks stay."""
    disable: Callable[[Any], Any] = torch.compiler.disable  # here: as a decorator it would import the compiler
    for name in names:
        module = model.get_submodule(name)
        forward = disable(_inside(module.forward if "forward" in vars(module) else type(module).forward, attendance))
        if "forward" in vars(module):
            module.forward = forward
        else:
            module.__class__ = type(f"Whole{type(module).__name__}", (type(module),), {"forward": forward})


def own_forwards(model: nn.Module) -> list[str]:
    """The modules that are known by their class to take batch statistics in a forward that is not torch's own, or to
    keep running statistics of instances."""
    return [
        name
        for name, layer in model.named_modules()
        if (isinstance(layer, BatchNormBase) and not by_class(layer))
        or (isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats)
    ]


def by_class(layer: nn.Module) -> bool:
    """Return whether a layer is a batch normalisation with torch's own forward, which ``use_whole_batch`` changes."""
    own = (
        isinstance(layer, BatchNormBase)
        and type(layer).forward is BatchNormBase.forward
        and "forward" not in vars(layer)
    )
    return own or isinstance(layer, nn.SyncBatchNorm)


def _inside(forward: Callable[..., Any], attendance: NonEmptyRanks) -> Callable[..., Any]:
    def whole(*args: Any, **kwargs: Any) -> Any:
        with _WholeBatch(attendance):
            return forward(*args, **kwargs)

    return whole


class _WholeBatch(TorchFunctionMode):
    def __init__(self, attendance: NonEmptyRanks) -> None:
        super().__init__()
        self._attendance = attendance

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        asked = normalisation(func, args, kwargs or {})
        if asked is None:
            return func(*args, **(kwargs or {}))
        return (_batch_norm if asked.kind == "batch" else _instance_norm)(asked, self._attendance)


def _batch_norm(asked: Normalisation, who: NonEmptyRanks) -> Tensor:
    y, mean, squares, n = Normalize.apply(asked.x, asked.weight, asked.bias, asked.eps, who.group, who.present)
    with torch.no_grad():
        for running, now in ((asked.running_mean, mean), (asked.running_var, squares / (n - 1))):
            if running is not None:
                running.mul_(1 - asked.momentum).add_(now.to(running.dtype), alpha=asked.momentum)
    return y  # type: ignore[no-any-return]


def _instance_norm(asked: Normalisation, who: NonEmptyRanks) -> Tensor:
    """Normalise each example by itself; the running statistics become means over the examples of all ranks."""
    x = asked.x
    with torch.no_grad():
        variances, means = torch.var_mean(x, dim=list(range(2, x.dim())))
        rows = x.new_tensor([float(len(x)) if who.present else 0.0], dtype=torch.float64)
        sums = torch.cat([means.double().mean(0) * rows, variances.double().mean(0) * rows, rows])
        who.group.all_reduce(sums).wait()
        mean, variance = (sums[:-1] / sums[-1]).chunk(2)
        for running, now in ((asked.running_mean, mean), (asked.running_var, variance)):
            if running is not None:
                running.mul_(1 - asked.momentum).add_(now.to(running.dtype), alpha=asked.momentum)
    # Without running statistics, which another such function around this one would take for its own.
    return functional.instance_norm(x, None, None, asked.weight, asked.bias, True, asked.momentum, asked.eps)
