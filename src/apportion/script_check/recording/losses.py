"""Records the values that losses and ``backward`` are computed with, from which one can tell how they are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import whole

CRITERIA = {
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "gaussian_nll_loss", "ctc_loss",
    "cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "soft_margin_loss", "multi_margin_loss",
}  # fmt: skip
"""The loss functions of torch.nn.functional that reduce over rows."""


def record_criterion(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Record one call of a loss function: its value, how it reduces, and over how many rows."""
    if not isinstance(result, Tensor) or result.numel() != 1 or not torch.is_grad_enabled():
        return
    recorder.emit(
        "criterion",
        function=name,
        value=float(whole(result)) if not isinstance(result, DTensor) else None,
        reduction=kwargs.get("reduction", "mean"),
        rows=len(args[0]) if args and isinstance(args[0], Tensor) and args[0].dim() else None,
        counted=_counted(name, args, kwargs),
        site=recorder.site(),
    )


def _counted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The number of targets that count: those other than ``ignore_index``."""
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    if name not in ("cross_entropy", "nll_loss") or not isinstance(target, Tensor) or isinstance(target, DTensor):
        return None
    return None if target.is_floating_point() else int((target != kwargs.get("ignore_index", -100)).sum())


def install(recorder: Recorder) -> None:
    """Record each backward, of the script or of a pipeline's schedule, with the value of what it is called on."""
    backward = torch.autograd.backward
    running = [False]

    @wraps(backward)
    def recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if running[0]:  # torch calls it once more inside of its own, for the mode that is entered
            backward(tensors, *args, **kwargs)
            return
        several = list(tensors) if isinstance(tensors, Sequence) else [tensors]
        first = several[0] if len(several) == 1 else None
        scalar = isinstance(first, Tensor) and not isinstance(first, DTensor) and first.numel() == 1
        value = float(first.detach()) if scalar and first is not None else None
        recorder.emit("backward", value=value, site=recorder.site())
        running[0] = True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            running[0] = False

    torch.autograd.backward = recorded
