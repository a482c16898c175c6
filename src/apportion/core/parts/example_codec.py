"""Examples as bytes, and back: nests of tuples, lists and dicts of tensors, arrays, numbers and text.

Nothing is pickled, so that reading what another rank has sent runs no code.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.comm.group import bytes_of

_HEAD = struct.Struct("<Q")
_PLAIN = (bool, int, float, str, type(None))


def encode(examples: Sequence[Any]) -> bytearray:
    """The examples as bytes. Raises ValueError where one holds something else, such as an image of a library."""
    tensors: list[Tensor] = []
    nests = [_taken_apart(example, tensors) for example in examples]
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    head = json.dumps({"nests": nests, "tensors": kinds}).encode()
    found = bytearray(_HEAD.pack(len(head)) + head)
    for tensor in tensors:
        if tensor.numel():
            found += bytes_of(tensor).numpy().tobytes()
    return found


def decode(data: bytearray) -> list[Any]:
    """The examples that ``encode`` made the bytes of."""
    (length,) = _HEAD.unpack_from(data)
    at = _HEAD.size + length
    head = json.loads(data[_HEAD.size : at])
    tensors = []
    for name, shape in head["tensors"]:
        tensor, at = _tensor(data, at, getattr(torch, name), shape)
        tensors.append(tensor)
    return [_put_together(nest, tensors) for nest in head["nests"]]


def _tensor(data: bytearray, at: int, dtype: torch.dtype, shape: Sequence[int]) -> tuple[Tensor, int]:
    """The tensor whose bytes begin at a place, and the place where they end."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty([*shape], dtype=dtype), at
    if not 0 < nbytes <= len(data) - at:  # before anything is allocated
        raise ValueError(f"a tensor of {nbytes:,} bytes is said to be in the {len(data) - at:,} bytes that are left")
    flat = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=at).clone()
    return flat.view(dtype).view([*shape]), at + nbytes


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """A value as plain JSON, its tensors by their numbers."""
    kind = type(value)
    if kind is Tensor and value.layout is torch.strided:
        tensors.append(value.detach().cpu().resolve_conj().resolve_neg().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        tensors.append(torch.from_numpy(np.array(value, order="C")))
        return {"number" if isinstance(value, np.generic) else "array": len(tensors) - 1}
    if kind in (tuple, list):
        return {kind.__name__: [_taken_apart(item, tensors) for item in value]}
    if kind is dict:
        return {"dict": [[_taken_apart(k, tensors), _taken_apart(v, tensors)] for k, v in value.items()]}
    if kind in _PLAIN:
        return {"plain": value}
    raise ValueError(
        f"an example holds a {kind.__module__}.{kind.__qualname__}, and between hosts go tensors, numpy arrays, "
        "numbers and text alone, in tuples, lists and dicts: let the data set make tensors of it"
    )


def _put_together(nest: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    ((kind, value),) = nest.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "number":
        return tensors[value].numpy()[()]
    if kind == "plain":
        return value
    if kind == "dict":
        return {_put_together(k, tensors): _put_together(v, tensors) for k, v in value}
    items = [_put_together(item, tensors) for item in value]
    return tuple(items) if kind == "tuple" else items
