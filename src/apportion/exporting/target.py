"""The kinds of file that a trained model is exported to, for other hardware or another runtime.

The folder ``targets`` is the registry: ``exporting/targets/onnx.py`` is written ``onnx`` or ``onnx(opset=20)``. What a
target compiles with is a package beside that folder.

The names of a network's inputs and outputs in a file or behind a server: those of a dict, and numbers otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from apportion.core.torch_private import pytree
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
class VaryingDimension:
    """A dimension of an input, not that of the examples, whose size differs between the inputs that were given."""

    leaf: int
    """The number of the tensor among those of the inputs."""
    dim: int
    sizes: tuple[int, ...]
    """The sizes that it has in the inputs that were given, in their order; the first is that of the sample."""

    def __str__(self) -> str:
        of = f" of input {self.leaf}" if self.leaf else ""
        return f"dimension {self.dim}{of} ({min(self.sizes)} to {max(self.sizes)} in the examples)"


@dataclass(frozen=True)
class Examples:
    """Inputs as the model takes them and what is to come out, both with the example in dimension 0."""

    inputs: Inputs
    targets: Any


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """A trained network, and all that its compiler may look at: what it is judged by is not in here."""

    module: nn.Module
    """The network in evaluation mode, which the target must leave as it is."""
    sample: Inputs
    """Inputs of two examples or more, for shapes and types."""
    calibration: Examples | None = None
    """Examples by which choices are made (scales, thresholds, numbers of steps); None: there are none."""
    training: Dataset[Any] | None = None
    """Items for fine-tuning, of which ``collate`` makes (inputs, targets); None: there are none."""
    collate: Callable[[list[Any]], Any] = default_collate
    """A list of items -> (inputs, targets), with the example in dimension 0."""
    loss: Callable[[Any, Any], Any] | None = None
    """The loss of (outputs, targets), for fine-tuning."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    """The mean of (outputs, targets) by name, that the file will be judged by; None: the accuracy of classes."""
    varying: tuple[VaryingDimension, ...] = ()
    """The dimensions, besides that of the examples, in which the inputs that were given differ."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures of a report, a row each; cells are text or numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""
    """What the figures were taken from, in whole sentences."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a target has written, and what the file is held to."""

    about: Mapping[str, Any]
    """The description of the file, of what JSON has."""
    reference: Callable[[Inputs], Sequence[Any]] | None = None
    """The arrays that the file is to compute for inputs; None: what the network itself computes."""
    compared: int | None = None
    """The number of examples, the first ones, whose outputs are compared, for a reference that is slow; None: all."""
    limit: float | None = None
    """The limit of the outputs' difference from the reference, relative to the largest number in them; None: that of
    ``export``."""
    most_lost: float | None = None
    """The limit of how much less the accuracy of the file may be than that of the network (0.003 is 0.3 points), or,
    where the targets are no classes, the share by which the first metric may be worse; beyond the uncertainty of the
    held-out examples. None: any, which the report states."""
    blamed: Callable[[], str] | None = None
    """Returns a sentence that names the layers that lose most and what else may be done, where more is lost than is
    allowed."""
    tables: tuple[Table, ...] = ()
    conclusion: str = ""
    """Whether it is worth it, in whole sentences."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What somebody's program computes with the file."""

    reader: str
    """The program and its version, by whose rules the file is run: "onnxruntime 1.31.1"."""
    outputs: Iterable[Sequence[Any]]
    """For each of the inputs the outputs, numpy arrays in the order of the model's, computed as they are asked for. A
    slow reader may end after the first two of them: how many examples it has run is said."""
    simulated_by: str | None = None
    """The name of the simulator that ran it by those rules, where it was not the reader itself."""
    reference: Callable[[Inputs], Sequence[Any]] | None = None
    """What this reader is to compute for inputs, where it computes in another type of numbers than the reference that
    the target names; None: what that says."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found when the file was run beside the network."""

    reader: str
    simulated_by: str | None
    examples: int
    """The number of examples whose outputs were compared."""
    difference: float
    """The largest difference of any output from what the file is to compute, relative to the largest number in that
    output."""
    limit: float
    """The limit that the difference had to stay within."""
    network_difference: float
    """The largest difference of any output from the network's own, relative to the largest number in that output."""
    held_out: int = 0
    """The number of examples, held out of every choice, on which the metrics are taken."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Each metric of the network itself."""
    after: Mapping[str, float] = field(default_factory=dict)
    """Each metric of the file."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported file, and how it was verified."""

    path: Path
    target: str
    nbytes: int
    about: Mapping[str, Any]
    """The target's description of the file: its inputs, its outputs and the like."""
    verifications: tuple[Verification, ...]
    """One for each reader."""
    tables: tuple[Table, ...] = ()
    conclusion: str = ""
    reports: tuple[Path, ...] = ()
    """What was written about the file beside it."""

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what JSON has. Numbers that JSON does not have, and values of other kinds, are text."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    @property
    def verification(self) -> Verification:
        """The one that differs most, of those that have run the held-out examples, or of all where none has."""
        return max(self.verifications, key=lambda one: (one.held_out > 0, one.difference))


def _plain(value: Any) -> Any:
    """The value as what JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    return str(value)


_SAID = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a text", tuple: "several in brackets",
    type(None): "None",
}  # fmt: skip
"""What a parameter of a type is called."""


def _kinds(hint: Any) -> list[Any]:
    """The types that a value with this annotation has; ``object`` where the annotation says more than these do."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if origin is Literal:
        return [type(value) for value in get_args(hint)]
    found = origin or hint
    return [found if found in _SAID else object]


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, (int, float) if kind is float else kind)


class Target(Value, ABC):
    """A kind of file to export to; its fields are the target's parameters."""

    suffix: str
    """The suffix of the target's files."""
    takes_any_size = False
    """True where a file may take inputs that differ in size in other dimensions than that of the examples."""

    def __post_init__(self) -> None:
        """Raise ValueError where a parameter is not of the type that its field says: it comes from a command line."""
        try:
            hints = get_type_hints(type(self))
        except NameError:  # a type that is imported for type checkers alone
            return
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value, kinds = getattr(self, one.name), _kinds(hints[one.name])
            if not any(_is(value, kind) for kind in kinds):
                said = " or ".join(dict.fromkeys(_SAID.get(kind, str(kind)) for kind in kinds))
                raise ValueError(f"{one.name}={value!r} must be {said}")

    @abstractmethod
    def write(self, trained: TrainedNetwork, path: Path) -> Compiled:
        """Write the file for this network. Raises ValueError, with the layer's name and the cure, where the network
        cannot be exported to the target; it is raised before anything is written."""

    @abstractmethod
    def read(self, path: Path, batches: Sequence[Inputs]) -> Sequence[Reading]:
        """Run the file for each of these inputs, on this machine, by every program there is that reads it: one at
        least. Raises ``ProgramMissing`` where there is none."""


def input_names(sample: Inputs) -> list[str]:
    """Return the names of the tensors that a network is called with: a dict's keys, joined by dots within one another;
    ``input``, or ``input_0``, ``input_1``, ..."""
    return _names(sample, "input")


def output_names(outputs: Any) -> list[str]:
    """Return the names of the tensors that a network gives: a dict's keys, joined by dots within one another;
    ``output``, or ``output_0``, ``output_1``, ..."""
    return _names(outputs, "output")


def _names(tree: Any, name: str) -> list[str]:
    if isinstance(tree, dict):
        return [".".join(map(_key, path)) for path, _ in pytree.tree_leaves_with_path(tree)]
    leaves = len(pytree.tree_leaves(tree))
    return [name] if leaves == 1 else [f"{name}_{n}" for n in range(leaves)]


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "idx", entry)))


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of a network's parameters and buffers, with their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        held = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {held.dtype} {tuple(held.shape)} ".encode())
        digest.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
