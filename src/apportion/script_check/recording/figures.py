"""Records the numbers that a script takes out of small tensors, among which are the figures of its evaluations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from apportion.script_check.recording.recorder import Recorder

NAMES = {"item", "__float__", "__int__", "tolist", "__format__", "__repr__", "numpy"}
"""The functions by which numbers leave a tensor."""
LARGEST = 1 << 12
"""The most numbers that are recorded of one tensor."""


def record_figure(recorder: Recorder, name: str, args: tuple[Any, ...], reduced: bool) -> None:
    """Record the numbers of a tensor that the script's own code, or a library on its behalf, reads as numbers.
    ``reduced``: whether they are results of a collective, or computed from such."""
    tensor = args[0] if args else None
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or recorder.drawing or not recorder.active:
        return
    if tensor.numel() > LARGEST or tensor.is_complex() or tensor.is_meta or tensor.layout != torch.strided:
        return
    numbers = tensor.detach().to("cpu", torch.float64, copy=True).flatten().numpy().tolist()
    recorder.emit(
        "figure",
        function=name,
        values=numbers,
        reduced=reduced,
        direct=recorder.is_direct(),
        gradients=torch.is_grad_enabled(),
        site=recorder.site(),
    )
