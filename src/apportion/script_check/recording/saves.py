"""Records what the script saves and loads, so that weights after a load can be compared with those that were saved, and
that it has loaded the state of a network or of an optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import LARGEST_WHOLE, local, values


def install(recorder: Recorder) -> None:
    """Watch torch.save, torch.load, distributed checkpoints, and ``load_state_dict`` of modules and optimizers."""
    save, load = torch.save, torch.load
    load_state, load_optimizer = nn.Module.load_state_dict, Optimizer.load_state_dict

    @wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        result = save(obj, f, *args, **kwargs)
        recorder.emit("save", path=_path(f), tensors=_tensors(obj), site=recorder.site())
        return result

    @wraps(load)
    def loaded(f: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(f, *args, **kwargs)
        recorder.emit("load", path=_path(f), site=recorder.site())
        return result

    @wraps(load_state)
    def restored(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = load_state(self, *args, **kwargs)
        recorder.emit(
            "load_state",
            type=type(self).__name__,
            missing=list(getattr(result, "missing_keys", ())),
            unexpected=list(getattr(result, "unexpected_keys", ())),
            site=recorder.site(),
        )
        recorder.emit("restore", what=type(self).__name__, site=recorder.site())
        return result

    @wraps(load_optimizer)
    def optimizer_restored(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = load_optimizer(self, *args, **kwargs)
        recorder.emit("restore", what=type(self).__name__, site=recorder.site())
        return result

    torch.save, torch.load, nn.Module.load_state_dict = saved, loaded, restored  # type: ignore[method-assign]
    Optimizer.load_state_dict = optimizer_restored  # type: ignore[method-assign]
    for name, kind in (("save", "save"), ("async_save", "save"), ("load", "load")):
        if hasattr(dcp, name):
            setattr(dcp, name, _checkpoint(recorder, kind, getattr(dcp, name)))


def _checkpoint(recorder: Recorder, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        recorder.emit(kind, path=_path(kwargs.get("checkpoint_id", "")), tensors={}, site=recorder.site())
        return result

    return called


def _path(file: Any) -> str:
    return os.path.abspath(file) if isinstance(file, str | os.PathLike) else str(getattr(file, "name", ""))


def _tensors(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the tensors of what is saved by dotted name; shards as they are, on this rank alone."""
    found = dict[str, Any]()
    if isinstance(tree, nn.Module):
        tree = tree.state_dict()
    if isinstance(tree, Tensor):
        held = local(tree)
        if held.numel() <= LARGEST_WHOLE and not held.is_meta:
            found[prefix.rstrip(".")] = values(held)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            found |= _tensors(value, f"{prefix}{key}.")
    return found
