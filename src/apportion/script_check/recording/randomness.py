"""Turns dropout off, and records the state of the generator that each mask would have been drawn from.

Dropout differs between N ranks and one process by design, so no mask is drawn. Where two ranks would draw the same mask
for different rows, the states are the same and the inputs are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import digest, local

DROPOUTS = {
    "dropout", "dropout_", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "dropout1d", "dropout2d",
    "dropout3d", "native_dropout",
}  # fmt: skip

ATTENTIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Functions with an argument ``dropout_p``, and its position. What the second one calls inside is seen by no mode."""


def dropout(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Returns whether a function is a dropout that draws, and then its input in place of its output."""
    if name not in DROPOUTS or not args or not isinstance(args[0], Tensor):
        return False, None
    share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    if not training or not share:
        return False, None
    _record_mask(recorder, name, args[0])
    return True, (args[0], torch.ones_like(args[0], dtype=torch.bool)) if name == "native_dropout" else args[0]


def attention(
    recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of an attention without its dropout; those of other functions as they are."""
    position = ATTENTIONS.get(name)
    if position is None:
        return args, kwargs
    if (kwargs.get("dropout_p") or (len(args) > position and args[position])) and kwargs.get("training", True):
        _record_mask(recorder, name, args[0] if args else kwargs["query"])
        kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        args = (*args[:position], 0.0, *args[position + 1 :]) if len(args) > position else args
    return args, kwargs


def _record_mask(recorder: Recorder, name: str, rows: Tensor) -> None:
    held = local(rows)
    recorder.emit(
        "mask",
        function=name,
        state=digest(torch.get_rng_state()),
        rows=digest(held),
        shape=tuple(held.shape),
        sharded=isinstance(rows, DTensor),
        site=recorder.site(),
    )


def install(recorder: Recorder) -> None:
    """Turn off the dropout between the layers of recurrent networks, which no function of torch shows."""

    def before(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.RNNBase) and module.dropout and module.training:
            _record_mask(recorder, type(module).__name__, inputs[0])
            module.dropout = 0.0

    register_module_forward_pre_hook(before)
