"""Records each call of torch's functions that clip gradients, the scale of each GradScaler after its updates, and when
gradients are scaled and made unscaled: their order shows what is clipped."""

from __future__ import annotations

import inspect
import math
import time
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from apportion.script_check.recording.collectives import Collectives, replace_everywhere

_LIMITS = {"clip_grad_norm_": "max_norm", "clip_grads_with_norm_": "max_norm", "clip_grad_value_": "clip_value"}


def install(collectives: Collectives) -> None:
    """Record the event ``clip``: ``function``, ``limit``, ``norm`` (before the clipping; None for values, and for a
    sharded norm, whose value would take a collective), ``factor`` (by which this rank's gradients, or its shards of
    them, have become smaller; None where they are zero), the ``names`` of the parameters, and ``site``."""
    under_way = list[str]()  # one of these functions calls another
    for name, limit in _LIMITS.items():
        function = getattr(torch.nn.utils, name, None)
        if function is not None:
            replace_everywhere(
                function, _recording_function(collectives, function, limit, under_way), ("torch.nn.utils",)
            )
    _watch_scalers(collectives)


def _recording_function(collectives: Collectives, function: Any, limit: str, under_way: list[str]) -> Any:
    bind = inspect.signature(function).bind

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        recorder = collectives.recorder
        if torch.compiler.is_compiling() or not recorder.active or under_way:
            return function(*args, **kwargs)
        given = bind(*args, **kwargs).arguments
        parameters = given["parameters"]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = {**given, "parameters": parameters}  # it may have been a generator
        under_way.append(function.__name__)
        before = _norm(parameters)
        try:
            norm = function(**given)
        finally:
            under_way.pop()
        value = given.get("total_norm", norm)
        found = [collectives.names.find(parameter) for parameter in parameters if parameter.grad is not None]
        recorder.emit(
            "clip",
            function=function.__name__,
            limit=float(given[limit]),
            norm=float(value) if isinstance(value, Tensor) and not isinstance(value, DTensor) else None,
            factor=_norm(parameters) / before if before else None,
            names=[each[0] if each else "" for each in found],
            site=recorder.site(),
            time=time.monotonic(),
        )
        return norm

    return recorded


def _norm(parameters: list[Tensor]) -> float:
    """The norm of the gradients, or of the shards of them that this rank has."""
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    with torch.no_grad():
        return math.hypot(*(float(torch.linalg.vector_norm(each.to_dense().double())) for each in local))


def _watch_scalers(collectives: Collectives) -> None:
    """Watch torch's GradScaler. Records ``scaler`` after ``update``; ``scaled`` with the ``scale`` that a loss was
    multiplied by; ``unscaled`` with the ``names`` of an optimizer's parameters, by ``unscale_`` or within ``step``."""
    recorder = collectives.recorder
    update, scale, unscale = (getattr(torch.amp.GradScaler, name) for name in ("update", "scale", "unscale_"))

    @wraps(update)
    def updated(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        recorder.emit("scaler", scale=float(self.get_scale()), site=recorder.site())

    @wraps(scale)
    def scaled(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            recorder.emit("scaled", scale=float(self.get_scale()), site=recorder.site())
        return scale(self, outputs)

    @wraps(unscale)
    def unscaled(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        unscale(self, optimizer)
        if self.is_enabled():
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            found = [collectives.names.find(each) for each in parameters]
            recorder.emit("unscaled", names=[each[0] for each in found if each], site=recorder.site())

    torch.amp.GradScaler.update = updated  # type: ignore[method-assign]
    torch.amp.GradScaler.scale = scaled  # type: ignore[method-assign]
    torch.amp.GradScaler.unscale_ = unscaled  # type: ignore[method-assign]
