"""Records each call of torch's functions that clip gradients, so that one can see whether it comes before or after the
collectives that average them."""

from __future__ import annotations

import inspect
import time
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from apportion.script_check.recording.collectives import Collectives, replace_everywhere
from apportion.script_check.recording.tensors import whole

_LIMITS = {"clip_grad_norm_": "max_norm", "clip_grads_with_norm_": "max_norm", "clip_grad_value_": "clip_value"}


def install(collectives: Collectives) -> None:
    """Record the event ``clip``: ``function``, ``limit``, ``norm`` (before the clipping; None for values; that of
    shards takes a collective, as the clipping itself does), the ``names`` of the parameters, and ``site``."""
    under_way = list[str]()  # one of these functions calls another
    for name, limit in _LIMITS.items():
        function = getattr(torch.nn.utils, name, None)
        if function is not None:
            replace_everywhere(function, _wrapper(collectives, function, limit, under_way), ("torch.nn.utils",))


def _wrapper(collectives: Collectives, function: Any, limit: str, under_way: list[str]) -> Any:
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
            norm=float(whole(value)) if isinstance(value, Tensor) else None,
            names=[each[0] if each else "" for each in found],
            site=recorder.site(),
            time=time.monotonic(),
        )
        return norm

    return recorded
