"""The mode that sees every function of torch in the script's thread, and hands each kind to the file it concerns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from apportion.core.torch_private import in_backward, wrap_backward
from apportion.script_check.recording import draws, figures, randomness
from apportion.script_check.recording.constants import Constants
from apportion.script_check.recording.figures import Reductions
from apportion.script_check.recording.plain_optimizers import PlainOptimizers
from apportion.script_check.recording.precision import Rewriting
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.splits import Splits


class Functions(TorchFunctionMode):
    """Rewrites arguments, leaves dropout out, and records figures."""

    def __init__(
        self,
        recorder: Recorder,
        splits: Splits | None = None,
        plain: PlainOptimizers | None = None,
        constants: Constants | None = None,
    ) -> None:
        super().__init__()
        self._splits, self._plain, self._constants = splits, plain, constants
        self._recorder, self._rewriting = recorder, Rewriting(recorder.plan)
        self._draws = draws.WatchedDraws(recorder)
        draws.install(recorder, self._draws)
        self._reductions = Reductions()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function is torch.device and self._recorder.plan["no_gpu"] and type(next(iter(args), None)) is int:
            return torch.device("cuda", args[0])
        if name == "__get__" or function is torch.device or not (args or kwargs):
            return function(*args, **kwargs)
        if name == "empty" and args and args[0] == (0,):  # torch reads bytes into it, whose element type is a fact
            return function(*args, **kwargs)
        done, result = self._rewriting.replaced(name, args)
        if done:
            return result
        if self._plain is not None and args:
            self._plain.before_change(name, args[0])
        args, kwargs = self._rewriting.arguments(name, args, kwargs)
        if self._constants is not None:
            args, kwargs = self._constants.exchange(name, args, kwargs)
        if self._recorder.plan["no_dropout"]:
            done, result = randomness.dropout(self._recorder, name, args, kwargs)
            if done:
                return result
            args, kwargs = randomness.attention(self._recorder, name, args, kwargs)
        if name in draws.NAMES:
            return self._draws.draw(name, function, args, kwargs)
        result = self._rewriting.result(name, function(*args, **kwargs))
        self._record(name, args, kwargs, result)
        return result

    def _record(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if in_backward():  # a checkpoint computes again what is recorded already
            return
        if self._splits is not None:
            self._splits.record_statistic(name, args, kwargs, result)
        if name in figures.NAMES:
            figures.record_figure(self._recorder, name, args, self._reductions.marked(args[0]) if args else False)
        else:
            self._reductions.follow(args, result)
        if name in figures.CRITERIA and isinstance(result, Tensor):
            figures.record_criterion(self._recorder, name, args, kwargs, result)


def install(recorder: Recorder, splits: Splits | None, plain: PlainOptimizers, constants: Constants) -> None:
    """Enter the mode for the rest of the process."""
    mode = Functions(recorder, splits, plain, constants)
    wrap_backward(mode)
    mode.__enter__()
