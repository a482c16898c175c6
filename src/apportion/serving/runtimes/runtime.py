"""The interface of what a member computes: a model that is loaded, with the runtime that runs it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from apportion.serving.batching import Pace
from apportion.serving.protocol.datatypes import DATATYPES, Array, objects

SIZES = (1, 2, 4, 8, 16, 32)
"""The numbers of rows of the batches that are timed when a program is loaded."""
TIMES = 5
"""The number of times that each size of batch is timed."""


@dataclass(frozen=True)
class Spec:
    """The specification of an input or an output. None in its shape is any number."""

    name: str
    datatype: str
    shape: tuple[int | None, ...]

    def refusal(self, datatype: str, shape: Sequence[int]) -> str | None:
        """Return why a tensor does not fit; None where it does."""
        if datatype != self.datatype:
            return f"{self.name} is {datatype}, the net takes {self.datatype}"
        if len(shape) != len(self.shape) or any(w not in (None, n) for w, n in zip(self.shape, shape, strict=True)):
            wanted = [-1 if n is None else n for n in self.shape]
            return f"{self.name} has shape {list(shape)}, the net takes {wanted} (-1: any number)"
        return None

    def filled(self, rows: int) -> Array:
        """Return zeros of this shape; a dimension of any number is 1, except for that of the rows."""
        shape = [n if n is not None else rows if at == 0 else 1 for at, n in enumerate(self.shape)]
        if self.datatype == "BYTES":
            return objects([b""] * int(np.prod(shape))).reshape(shape)
        return np.zeros(shape, dtype=DATATYPES[self.datatype])

    def to_json(self) -> dict[str, Any]:
        """Return the specification as it is sent between processes."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Spec:
        """Return the specification that ``to_json`` gave as a dict."""
        return Spec(data["name"], data["datatype"], tuple(data["shape"]))


class Expired(Exception):
    """The deadline passed while a batch was computed, and the rest of the batch was not computed."""


class Runtime(ABC):
    """A loaded program, which is used by one thread."""

    runtime: str
    """The name of the runtime, with its version."""
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]

    @abstractmethod
    def run(self, inputs: Sequence[Array], deadline: float) -> list[Array]:
        """Compute the outputs for these inputs, in the order of the specs. ``deadline`` is a time of
        ``time.monotonic``: past it ``Expired`` is raised, as soon as one operation has ended. Raises ValueError where
        the model refuses the inputs."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give back what the program holds."""

    @property
    def batched(self) -> bool:
        """Return whether the rows of several requests fit into one batch, by the shapes."""
        every = (*self.inputs, *self.outputs)
        return bool(every) and all(spec.shape and spec.shape[0] is None for spec in every)


Specs = tuple[Spec, ...]


def with_free_sizes(program: Runtime, rows: Sequence[Sequence[Array]]) -> tuple[Specs, Specs]:
    """Return the inputs and outputs of a program, with None for each size in which these rows, or what the program
    computes for them, differ."""
    found: list[Specs] = [program.inputs, program.outputs]
    for row in rows:
        try:
            outputs = program.run(row, float("inf"))
        except ValueError:  # of a size that it does not take
            continue
        found = [tuple(map(_widened, specs, arrays)) for specs, arrays in zip(found, (row, outputs), strict=True)]
    return found[0], found[1]


def _widened(spec: Spec, array: Array) -> Spec:
    """Return the specification with None for each size that is another one in this array."""
    if len(spec.shape) != array.ndim:
        return spec
    return replace(spec, shape=tuple(n if n == m else None for n, m in zip(spec.shape, array.shape, strict=True)))


def timed(program: Runtime, sample: Sequence[Array] | None, *, seconds: float, sizes: Sequence[int]) -> Pace:
    """Return how long batches of these sizes take: medians, of growing sizes as far as the time allows. ``sample``: one
    row."""
    pace, end = Pace(), time.monotonic() + seconds
    for rows in sizes:
        inputs = [spec.filled(rows) for spec in program.inputs]
        if sample is not None:
            inputs = [np.ascontiguousarray(np.repeat(row[:1], rows, 0)) if rows > 1 else row for row in sample]
        taken = []
        for turn in range(TIMES + 1):
            began = time.monotonic()
            program.run(inputs, float("inf"))
            if turn:  # the first one touches its memory
                taken.append(time.monotonic() - began)
            if time.monotonic() > end and taken:
                break
        pace.seconds[rows] = sorted(taken)[len(taken) // 2]
        if time.monotonic() + 2 * TIMES * pace.seconds[rows] > end:
            break
    return pace
