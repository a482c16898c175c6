"""Records that the script has loaded the state of a network or of an optimizer."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from apportion.script_check.recording.recorder import Recorder


def install(recorder: Recorder) -> None:
    """Watch ``load_state_dict`` of modules and optimizers."""
    load_module, load_optimizer = nn.Module.load_state_dict, Optimizer.load_state_dict

    @wraps(load_module)
    def module_loaded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = load_module(self, *args, **kwargs)
        recorder.emit("restore", what=type(self).__name__, site=recorder.site())
        return result

    @wraps(load_optimizer)
    def optimizer_loaded(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = load_optimizer(self, *args, **kwargs)
        recorder.emit("restore", what=type(self).__name__, site=recorder.site())
        return result

    nn.Module.load_state_dict = module_loaded  # type: ignore[method-assign]
    Optimizer.load_state_dict = optimizer_loaded  # type: ignore[method-assign]
