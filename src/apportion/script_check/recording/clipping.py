"""Records each call of torch's functions that clip gradients, which shows whether it comes before or after the
collectives that average them."""

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
