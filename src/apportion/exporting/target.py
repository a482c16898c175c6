"""What a trained net is exported to: a kind of file that other hardware or another runtime takes.

The folder ``targets`` is the registry: ``exporting/targets/onnx.py`` is written ``onnx`` or ``onnx(opset=20)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from apportion.core.value import Value

Inputs = Any
"""Of a net, dimension 0 the example: a tensor (``model(x)``), a tuple (``model(*x)``) or a dict (``model(**x)``)."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file, and what was found when it was run beside the net."""

    path: Path
    target: str
    nbytes: int
    examples: int
    """That both have computed."""
    difference: float
    """The largest of any output's, relative to the largest number in that output."""
    limit: float
    """That it had to stay within."""
    about: Mapping[str, Any]
    """What the target has to say of it: its inputs and outputs, and the like."""


class Target(Value, ABC):
    """A value whose fields are the target's parameters."""

    suffix: str
    """Of its files."""

    @abstractmethod
    def write(self, module: nn.Module, sample: Inputs, path: Path) -> Mapping[str, Any]:
        """The file for this module, which is in evaluation mode; ``sample`` is inputs of two examples or more. Returns
        what there is to say about it. ValueError, with the reason, where the net cannot be exported to it."""

    @abstractmethod
    def run(self, path: Path, batches: Sequence[Inputs]) -> list[list[Any]]:
        """The outputs (numpy arrays, in the order of the net's) of the file for each of these inputs, on this machine:
        to be held against the net's own."""
