"""Linear layers whose weight is stored as (inputs, outputs), as the Conv1D of GPT-2 has it: known by what they compute,
and cut by outputs, which are gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apportion.comm.differentiable import copy_to, gather_from
from apportion.comm.group import Group
from apportion.core.torch_private import parameters_of
from apportion.parallel.ops.matmul import linear
from apportion.parallel.tensor.slicing import Slicer, shares
from apportion.parallel.tracing.network import undisturbed


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer computes ``x @ weight + bias``, and nothing else: it is tried."""
    own = dict(layer.named_parameters())
    if type(layer).__module__.startswith("torch.nn") or set(own) not in ({"weight"}, {"weight", "bias"}):
        return False
    weight, bias = own["weight"], own.get("bias")
    plain = not any(True for _ in layer.children()) and not any(True for _ in layer.buffers())
    if not plain or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[1:]):
        return False
    x = torch.linspace(-1.0, 1.0, 6 * len(weight), dtype=weight.dtype, device=weight.device).view(2, 3, -1)
    with undisturbed(layer):
        expected = x @ weight if bias is None else x @ weight + bias
        try:
            found = layer.forward(x)
        except Exception:  # it takes something else
            return False
    same = isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
    return same and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def slice_transposed(layer: nn.Module, slicer: Slicer) -> None:
    """Cut a transposed layer so that each rank computes some of the outputs, and all ranks then get all of them. In
    place, by class."""
    sliced: Any = layer
    width = sliced.weight.shape[1]
    sliced.__class__, sliced.group = TransposedSlice, slicer.group
    sliced.sizes = [len(share) for share in shares(width, slicer.group.size)]
    slicer.cut(layer, "weight", None, slicer.own(width))
    if "bias" in parameters_of(layer):
        slicer.cut(layer, "bias", slicer.own(width))


class TransposedSlice(nn.Module):
    """A transposed Linear layer cut by outputs: x (..., in), whole -> (..., out), whole."""

    group: Group
    sizes: list[int]
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = linear(copy_to(x, self.group), self.weight.t(), self._parameters.get("bias"))
        return gather_from(y, self.group, -1, self.sizes)
