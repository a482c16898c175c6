"""The mode that sees every function of torch in the script's thread, and hands each kind to the file it concerns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from apportion.core.torch_private import in_backward, wrap_backward
from apportion.script_check.recording import losses, randomness
from apportion.script_check.recording.constants import Constants
from apportion.script_check.recording.plain_optimizers import PlainOptimizers
from apportion.script_check.recording.precision import Rewriting
from apportion.script_check.recording.recorder import Recorder


class Functions(TorchFunctionMode):
    """Rewrites arguments, leaves dropout out, and records losses."""

    def __init__(self, recorder: Recorder, plain: PlainOptimizers, constants: Constants) -> None:
        super().__init__()
        self._recorder, self._plain, self._constants = recorder, plain, constants
        self._rewriting = Rewriting(recorder.plan)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__" or function is torch.device or not (args or kwargs):
            return function(*args, **kwargs)
        done, result = self._rewriting.replaced(name, args)
        if done:
            return result
        if args:
            self._plain.change(name, args[0])
        args, kwargs = self._rewriting.arguments(name, args, kwargs)
        args, kwargs = self._constants.seen(name, args, kwargs)
        if self._recorder.plan["no_dropout"]:
            done, result = randomness.dropout(self._recorder, name, args, kwargs)
            if done:
                return result
            if name == "scaled_dot_product_attention":
                args, kwargs = randomness.attention(self._recorder, args, kwargs)
            if name == "multi_head_attention_forward" and kwargs.get("training", True):
                args = randomness.attention_module(self._recorder, args)
        result = self._rewriting.result(name, function(*args, **kwargs))
        if name in losses.CRITERIA and isinstance(result, Tensor) and not in_backward():
            losses.criterion(self._recorder, name, args, kwargs, result)
        return result


def install(recorder: Recorder, plain: PlainOptimizers, constants: Constants) -> None:
    """Enter the mode for the rest of the process."""
    mode = Functions(recorder, plain, constants)
    wrap_backward(mode)
    mode.__enter__()
