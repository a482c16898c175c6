"""Finds collectives that cut the gradient: their input has a graph, and their outputs have none.

In a pass of one process with ``join_gathers``, the outputs of such collectives get the graph of their input: where that
changes a gradient, the loss depends on them, and the script loses the part of the gradient that runs through them.

A collective inside of ``no_grad()`` cuts the gradient as well, unless it belongs to an ``autograd.Function`` that has a
backward of its own: what follows in the same block has to compute a graph, too, until the block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apportion.script_check.recording.recorder import Recorder


def install(recorder: Recorder) -> None:
    """Watch the collectives of torch.distributed that gather."""
    for name in ("all_gather", "all_gather_into_tensor", "_all_gather_base"):
        if hasattr(dist, name):
            setattr(dist, name, _watched(recorder, name, getattr(dist, name)))


def _watched(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        into = args[0] if args else next((kwargs[k] for k in ("tensor_list", "output_tensor") if k in kwargs), None)
        source = (
            args[1] if len(args) > 1 else next((kwargs[k] for k in ("tensor", "input_tensor") if k in kwargs), None)
        )
        enabled = torch.is_grad_enabled()
        if not isinstance(source, Tensor) or not source.requires_grad or (source.is_leaf and not enabled):
            return result
        outputs = [into] if isinstance(into, Tensor) else list(into) if isinstance(into, Sequence) else []
        cut = [out for out in outputs if isinstance(out, Tensor) and not out.requires_grad]
        if cut:
            site = recorder.site()
            recorder.emit("cut", function=name, shape=tuple(source.shape), site=site, gradients=enabled)
            if recorder.plan.get("join_gathers") and len(cut) == 1 and cut[0].shape == source.shape:
                if result is not None:
                    result.wait()
                torch.set_grad_enabled(True)
                cut[0].copy_(source)
        return result

    return gathered
