"""The kinds of file that a trained model is exported to, for other hardware or another runtime.

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
"""The inputs of a model, with the examples in dimension 0: a tensor (``model(x)``), a tuple (``model(*x)``) or a dict
(``model(**x)``)."""


def called(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model with a dict by names, with a tuple by position."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported file, and what was found when it was run beside the model."""

    path: Path
    target: str
    nbytes: int
    examples: int
    """The number of examples that both the file and the model have computed."""
    difference: float
    """The largest difference of any output, relative to the largest number in that output."""
    limit: float
    """The limit that the difference had to stay within."""
    about: Mapping[str, Any]
    """The target's description of the file: its inputs, its outputs and the like."""


class Target(Value, ABC):
    """A kind of file to export to; its fields are the target's parameters."""

    suffix: str
    """The suffix of the target's files."""

    @abstractmethod
    def write(self, module: nn.Module, sample: Inputs, path: Path) -> Mapping[str, Any]:
        """Write the file for this module, which is in evaluation mode; ``sample`` is inputs of two examples or more.
        Returns what there is to say about the file. Raises ValueError, with the reason, where the module cannot be
        exported to the target."""

    @abstractmethod
    def run(self, path: Path, batches: Sequence[Inputs]) -> list[list[Any]]:
        """Run the file for each of these inputs, on this machine. Returns its outputs (numpy arrays, in the order of
        the model's), which are compared with the model's own."""
