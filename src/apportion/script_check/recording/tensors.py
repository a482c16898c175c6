"""What is recorded of a tensor: its values in float64, whole or, of a large network, a sample of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LARGEST_SAMPLE = 1 << 16
"""The elements recorded of one tensor of a network that has more than ``LARGEST_WHOLE`` of them."""
LARGEST_WHOLE = 1 << 22

gathering = list[bool]()
"""Holds something while a DTensor is made whole: its collectives are not the script's."""


def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor. Of a DTensor that is a collective, which all ranks of its mesh have to call."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    gathering.append(True)
    try:
        return tensor.full_tensor()
    finally:
        gathering.pop()


def values(tensor: Tensor, sampled: bool = False) -> np.ndarray[Any, Any]:
    """Returns the values of a tensor, integers as they are and others in float64; with ``sampled`` at equal distances
    where there are more than ``LARGEST_SAMPLE``."""
    full = whole(tensor)
    if full.layout != torch.strided:
        full = full.to_dense()
    if sampled and full.numel() > LARGEST_SAMPLE:
        full = full.flatten()[:: full.numel() // LARGEST_SAMPLE]
    full = full.cpu()
    if full.is_complex():
        return torch.view_as_real(full.to(torch.complex128).resolve_conj()).numpy().copy()
    if full.is_floating_point():
        return full.to(torch.float64).numpy().copy()
    return full.numpy().copy()


def placements(tensor: Tensor) -> str:
    """Returns how a DTensor is placed, as torch writes it; empty for an ordinary tensor."""
    return str(tensor.placements) if isinstance(tensor, DTensor) else ""


def local_bytes(tensor: Tensor) -> bytes:
    """Returns the bytes of what this rank holds of a tensor; none of one that is sparse or has no memory."""
    tensor = tensor.detach()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_meta or local.layout != torch.strided:
        return b""
    local = local.to(torch.float64) if local.dtype == torch.bfloat16 else local
    return np.ascontiguousarray(local.cpu().numpy()).tobytes()


def digest(data: bytes | np.ndarray[Any, Any] | Tensor) -> str:
    """Returns 16 hexadecimal digits that differ wherever the bytes of the data differ."""
    if isinstance(data, Tensor):
        data = values(data)
    return hashlib.blake2b(
        data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes(), digest_size=8
    ).hexdigest()
