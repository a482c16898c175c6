"""Named tensors in one safetensors file: ties stored once, complex numbers as pairs, and back as they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from apportion.errors import CheckpointError

_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex128, torch.complex64),
}


def storable(part: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors as safetensors takes them (on the CPU, contiguous, no memory in common), and notes to undo
    it: the order, which name is tied to which, which are complex. All of it is in one note: several are written in no
    fixed order, and equal states must give equal files."""
    stored: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES:
            kind = f"a {tensor.dtype} {tensor.layout} tensor on {tensor.device}"
            raise ValueError(
                f"{part}/{name} is {kind}, which a checkpoint cannot hold: keep it dense, in an ordinary dtype"
            )
        if tensor.numel() and (tied := first.setdefault(_identity(tensor), name)) != name:
            ties[name] = tied
            continue
        stored[name] = _dense(tensor)
        # safetensors refuses tensors that share memory. Equal views were recorded as ties above; what still overlaps,
        # as two slices of one tensor, is copied.
        if stored[name].untyped_storage().data_ptr() in storages:
            stored[name] = stored[name].clone()
        storages.add(stored[name].untyped_storage().data_ptr())
    notes = {"order": list(tensors), "ties": ties, "complex": [n for n in stored if tensors[n].is_complex()]}
    return stored, {"apportion": json.dumps(notes)}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*where, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _dense(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous()


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["apportion"])
            # Copied out of the mapped file, which another process may change while the state is in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is not a dict)
            tensors |= {name: torch.view_as_complex(tensors[name]) for name in notes["complex"]}
            tensors |= {name: tensors[tied] for name, tied in notes["ties"].items()}
            return {name: tensors[name] for name in notes["order"]}
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch could not map it
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} was not written by apportion: its notes do not fit its tensors") from error
