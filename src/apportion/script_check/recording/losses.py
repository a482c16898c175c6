"""Records the values that losses and ``backward`` are computed with, from which one can tell how they are scaled."""

from __future__ import annotations

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


def criterion(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Record one call of a loss function: its value, how it reduces, and over how many rows."""
    if not isinstance(result, Tensor) or result.numel() != 1 or not torch.is_grad_enabled():
        return
    recorder.emit(
        "criterion",
        function=name,
        value=float(whole(result)) if not isinstance(result, DTensor) else None,
        reduction=kwargs.get("reduction", "mean"),
        rows=len(args[0]) if args and isinstance(args[0], Tensor) and args[0].dim() else None,
        site=recorder.site(),
    )


def install(recorder: Recorder) -> None:
    """Record each ``backward`` that the script calls, with the value of what it is called on."""
    backward = torch.Tensor.backward

    @wraps(backward)
    def recorded(self: Tensor, *args: Any, **kwargs: Any) -> None:
        value = float(self.detach()) if self.numel() == 1 and not isinstance(self, DTensor) else None
        recorder.emit("backward", value=value, site=recorder.site())
        backward(self, *args, **kwargs)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]
