"""Functions that send plain JSON and whole states from one rank to all."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.comm.group import Group, bytes_of


def broadcast_message(message: Any, group: Group, *, source: int = 0, device: torch.device | None = None) -> Any:
    """Send the source's message (plain JSON) to every rank."""
    data = json.dumps(message).encode() if group.rank == source else b""
    # The length comes first, in a message of its own: a receiver has to give a buffer of the right size.
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    group.broadcast(length, source=source)
    buffer = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if group.rank == source:
        buffer.copy_(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))
    group.broadcast(buffer, source=source)
    return json.loads(buffer.cpu().numpy().tobytes())


def gather_messages(message: Any, group: Group, *, device: torch.device | None = None) -> list[Any]:
    """Gather every rank's message (plain JSON), in rank order."""
    data = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8).copy()
    rows = group.all_gather_rows(torch.from_numpy(data).to(device or "cpu"))
    return [json.loads(row.cpu().numpy().tobytes()) for row in rows]


def broadcast_tensors(
    tensors: dict[str, Tensor] | None, group: Group, *, source: int = 0, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Send the source's tensors by name to every rank (on the CPU)."""
    described = None
    if tensors is not None:
        described = [[k, str(t.dtype).removeprefix("torch."), list(t.shape)] for k, t in tensors.items()]
    received = {}
    for name, dtype, shape in broadcast_message(described, group, source=source, device=device):
        if tensors is not None:
            tensor = tensors[name].to(device=device or "cpu").resolve_conj().resolve_neg().contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        # All ranks know the shapes by now, so that they skip an empty tensor alike.
        if tensor.numel():
            group.broadcast(bytes_of(tensor), source=source)
        received[name] = tensor.cpu()
    return received
