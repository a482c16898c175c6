"""The digest of a network's weights, by which a file that was exported from them is known."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of a network's parameters and buffers, with their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        held = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {held.dtype} {tuple(held.shape)} ".encode())
        digest.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
