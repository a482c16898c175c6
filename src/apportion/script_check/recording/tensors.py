"""What is recorded of a tensor: its values in float64, whole or, of a large network, a sample of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LARGEST_SAMPLE = 1 << 16
"""The elements recorded of one tensor of a network that has more than ``LARGEST_WHOLE`` of them."""
LARGEST_WHOLE = 1 << 22
LARGEST_ROW = 1 << 10
"""The elements by which a row is distinguished from others."""
ROW_DIGITS = 6

gathering = list[bool]()
"""Not empty while a DTensor is made whole: the collectives of that are not the script's."""


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


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor: its shard of a DTensor, all of another one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def set_values(tensor: Tensor, recorded: np.ndarray[Any, Any] | None) -> None:
    """Give a tensor values that were recorded, unless there are none or they are those of another shape."""
    held = local(tensor)
    if recorded is not None and recorded.shape == tuple(held.shape):
        held.copy_(torch.as_tensor(recorded))


def values(tensor: Tensor, sampled: bool = False) -> np.ndarray[Any, Any]:
    """Returns the values of a tensor, integers as they are and others in float64; with ``sampled`` at equal distances
    where there are more than ``LARGEST_SAMPLE``."""
    full = whole(tensor)
    if full.layout != torch.strided:
        full = full.to_dense()
    if sampled and full.numel() > LARGEST_SAMPLE:
        full = full.flatten()[:: full.numel() // LARGEST_SAMPLE]
    full = full.resolve_conj()  # copies below, as memory that numpy has seen cannot be resized, which FSDP does
    if full.is_complex():
        return torch.view_as_real(full.to("cpu", torch.complex128, copy=True)).numpy()
    if full.is_floating_point():
        return full.to("cpu", torch.float64, copy=True).numpy()
    return full.to("cpu", copy=True).numpy()


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors of a tree of lists, tuples, dicts and objects that are mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)


def placements(tensor: Tensor) -> str:
    """Returns how a DTensor is placed, as torch writes it; empty for an ordinary tensor."""
    return str(tensor.placements) if isinstance(tensor, DTensor) else ""


def local_bytes(tensor: Tensor) -> bytes:
    """Returns the bytes of what this rank holds of a tensor; empty for one that is sparse or has no memory."""
    held = local(tensor.detach())
    if held.is_meta or held.layout != torch.strided:
        return b""
    held = held.to(torch.float64) if held.dtype == torch.bfloat16 else held
    copied = held.resolve_conj().resolve_neg().to("cpu", copy=True)  # as memory that numpy has seen is not resized
    return np.ascontiguousarray(copied.numpy()).tobytes()


def digest(data: bytes | np.ndarray[Any, Any] | Tensor) -> str:
    """Returns 16 hexadecimal digits that differ wherever the bytes of the data differ."""
    if isinstance(data, Tensor):
        data = values(data)
    return hashlib.blake2b(
        data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes(), digest_size=8
    ).hexdigest()


def row_digests(inputs: Any) -> list[str] | None:
    """Returns a digest of each row of the first tensor among a network's inputs that has rows; None where there is
    none, or where it is sharded."""
    for value in inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple | list) else ():
        if isinstance(value, DTensor):
            return None
        if isinstance(value, Tensor):
            if not value.dim() or not value.numel() or value.layout != torch.strided:
                continue
            rows = value.detach().to("cpu")
            if rows.dtype in (torch.bfloat16, torch.float16):
                rows = rows.float()
            array = rows.resolve_conj().reshape(len(rows), -1)[:, :LARGEST_ROW].clone().numpy()
            if array.dtype.kind in "fc":
                array = np.round(array, ROW_DIGITS) + 0.0  # an input that was computed is the same but for rounding
            return [digest(row.tobytes()) for row in np.ascontiguousarray(array)]
        if isinstance(value, dict | tuple | list) and (found := row_digests(value)) is not None:
            return found
    return None
