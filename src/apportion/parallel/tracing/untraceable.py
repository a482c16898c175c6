"""The reason why a forward cannot be followed, in a sentence that names the line: what torch.fx says is about
torch.fx."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn

from apportion.core.torch_private import pytree
from apportion.parallel.tracing.side_effects import HOLDERS
from apportion.process import PACKAGE

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(PACKAGE)


def reason(error: BaseException) -> str:
    """The reason for an error that a forward raised as it was called with stand-ins for tensors."""
    frames = traceback.extract_tb(error.__traceback__)
    told = str(error).splitlines()[0] if str(error) else ""
    if said_here(error):
        return told
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OWN, "<"))]
    where = f"at {Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].line}) " if own else ""
    if "control flow" in told:
        return f"{where}what is in a tensor, or its shape, decides about control flow"
    if "iterat" in told or "__len__" in told or "'len'" in told or "len(" in told:
        return f"{where}it loops over a tensor or asks for a length, which is known only as it runs"
    return f"{where}it does what is known only as it runs"


def said_here(error: BaseException) -> bool:
    """Return whether an error's message is one of this package, and not what torch or the network says of the stand-ins
    that it is given."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OWN)


def unregistered(root: nn.Module, module: nn.Module) -> str:
    """The message for a module that torch does not find: it says which attribute has the module."""
    for path, owner in root.named_modules():
        for name, value in vars(owner).items():
            holds = isinstance(value, list | tuple | dict) and name not in HOLDERS
            if holds and any(leaf is module for leaf in pytree.tree_leaves(value)):
                return (
                    f"{f'{path}.{name}'.lstrip('.')} is a {type(value).__name__} with a {type(module).__name__} in it, "
                    "which torch does not find there, nor trains or saves: make it an nn.ModuleList or nn.ModuleDict"
                )
    return f"it calls a {type(module).__name__} that is not an attribute of a module, and that torch does not find"
