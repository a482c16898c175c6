"""Images with their channels last in memory, where a network computes the same that way.

A CPU's convolutions and poolings are a tenth faster on them, and a maximum is taken at several times the speed. Shapes
stay (n, c, h, w); but for the order of the sums, so does every number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core import tree
from apportion.core.data.rows import rows_of
from apportion.parallel.tracing.network import undisturbed


def channels_last(inputs: Any) -> Any:
    """Return the inputs with images (n, c, h, w) laid out with the channels last in memory."""

    def laid_out(t: Tensor) -> Tensor:
        return t.contiguous(memory_format=torch.channels_last) if _is_images(t) else t

    return tree.map_tensors(laid_out, inputs)


def takes_channels_last(model: nn.Module, calls: Sequence[Callable[..., Any]], inputs: Any) -> bool:
    """Return whether these calls of a model's layers give the same on images with the channels last. They do not where
    a forward pass calls ``view`` on what its last convolution gives, for one; and only a plain convolution gains."""
    if not any(_is_images(t) and t.device.type == "cpu" for t in tree.tensors(inputs)) or not _convolves(model):
        return False
    few = rows_of(inputs, slice(0, 2))
    try:
        for call in calls:
            with undisturbed(model):
                expected = tree.tensors(tree.call(call, few))
            with undisturbed(model):
                found = tree.tensors(tree.call(call, channels_last(few)))
            pairs = zip(found, expected, strict=True)
            if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs):
                return False
    except (RuntimeError, ValueError):  # ValueError: batch normalisation of a single value
        return False
    return True


def _is_images(t: Tensor) -> bool:
    return t.dim() == 4 and t.is_floating_point()


def _convolves(model: nn.Module) -> bool:
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return bool(found) and all(module.groups == 1 for module in found)
