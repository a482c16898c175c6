"""A node of a graph as the rules see it: its attributes, the shapes and values of its tensors, and where their rows
are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.serving.row_independence.row_axis import RowAxis, RowsMixed

COUNTS = (2, 3)
"""The numbers of rows at which the shapes of all tensors are found."""


class Content(Enum):
    """What a tensor depends on that has no axis of rows."""

    FIXED = "neither the rows nor their number"
    COUNTED = "the number of rows"
    NUMBERS = "the number of rows: the numbers of the rows themselves, from 0 on, in dimension 0"
    UNCLEAR = "the number of rows, in a way that is not known for all numbers"


Rows = RowAxis | Content


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph. ``shapes`` and ``values`` are at each of ``COUNTS``; values are known where they do not
    depend on what the rows hold."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    rows: Rows
    values: tuple[NDArray[Any], ...] | None = None


@dataclass(frozen=True)
class GraphNode:
    """A node. ``version``: of the operators of its domain. An optional input or output that is left out is None."""

    op: str
    name: str
    version: int
    inputs: Sequence[Tensor | None]
    output_shapes: Sequence[tuple[tuple[int, ...], ...] | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def has(self, at: int) -> bool:
        """Return whether the input is given."""
        return at < len(self.inputs) and self.inputs[at] is not None

    def tensor(self, at: int) -> Tensor:
        """Return an input."""
        if not self.has(at):
            raise RowsMixed(f"has no input {at}")
        tensor = self.inputs[at]
        assert tensor is not None
        return tensor

    def shape(self, at: int) -> tuple[int, ...]:
        """Return the shape of an input at the first number of rows."""
        return self.tensor(at).shapes[0]

    def rank(self, at: int) -> int:
        """Return the number of dimensions of an input."""
        return len(self.shape(at))

    def out_shape(self, at: int = 0) -> tuple[int, ...]:
        """Return the shape of an output at the first number of rows."""
        shapes = self.output_shapes[at]
        assert shapes is not None
        return shapes[0]

    def rows(self, at: int) -> RowAxis | None:
        """Return where the rows of an input are; None where it has none. Raises RowsMixed where it depends on their
        number, with which no row may be computed."""
        if not self.has(at):
            return None
        rows = self.tensor(at).rows
        if rows in (Content.COUNTED, Content.NUMBERS, Content.UNCLEAR):
            raise RowsMixed(f"computes with {self.tensor(at).name!r}, which depends on the number of rows")
        return rows if isinstance(rows, RowAxis) else None

    def must_be_fixed(self, *places: int) -> None:
        """Raise RowsMixed where one of these inputs has rows."""
        for at in places:
            if self.rows(at) is not None:
                raise RowsMixed(f"has rows in its input {self.tensor(at).name!r}")

    def integers(self, at: int) -> list[int] | None:
        """Return the numbers in an input that is the same whatever the rows are; None where it is not given."""
        if not self.has(at):
            return None
        tensor = self.tensor(at)
        if tensor.values is None or tensor.rows is not Content.FIXED:
            raise RowsMixed(f"takes {tensor.name!r}, which is not always the same, as a size or an axis")
        return [int(n) for n in np.asarray(tensor.values[0]).reshape(-1)]

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def axis(self, default: int, rank: int, name: str = "axis") -> int:
        """Return an attribute that counts dimensions, from 0 on."""
        return int(self.attribute(name, default)) % max(rank, 1)
