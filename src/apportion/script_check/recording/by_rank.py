"""Runs some modules of one process on each rank's rows alone, so that they take the statistics that the ranks take.

What a layer's statistics change is then left out of a comparison, and any other difference is found beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from apportion.script_check.recording.modules import Networks
from apportion.script_check.recording.recorder import Recorder


def install(recorder: Recorder, networks: Networks) -> None:
    """Have the modules that the plan names run by ranks from their network's first forward on."""
    named = set(recorder.plan["by_rank"])
    done = set[int]()

    def before(module: nn.Module, inputs: Any) -> None:
        if id(module) in done:
            return
        done.add(id(module))
        for each in module.modules():
            if networks.module_name(each) in named and "forward" not in vars(each):
                each.forward = _by_rank(recorder, each, each.forward)

    register_module_forward_pre_hook(before)


def _by_rank(recorder: Recorder, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        rows, given = sum(recorder.parts), args[0] if args else None
        if not module.training or len(recorder.parts) < 2 or kwargs or not isinstance(given, Tensor):
            return forward(*args, **kwargs)
        if not given.dim() or len(given) % rows:
            return forward(*args, **kwargs)
        sizes = [part * (len(given) // rows) for part in recorder.parts]
        outputs = [forward(*each) for each in zip(*(_split(arg, sizes) for arg in args), strict=True)]
        return torch.cat(outputs) if all(isinstance(each, Tensor) for each in outputs) else forward(*args)

    return called


def _split(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(value, Tensor) and value.dim() and len(value) == sum(sizes):
        return list(value.split(list(sizes)))
    return [value for _ in sizes]
