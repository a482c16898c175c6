"""Inputs for a network of which nothing is known but their types and shapes, with sizes for the dimensions that may
have any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from apportion.serving.protocol.datatypes import DATATYPES, Array, objects

SIDES = (8, 16, 32, 64, 224, 1)
"""The sizes that are tried for dimensions of any size, where 5, 6, 7, ... do not run: a convolution needs some, and
other dimensions have to be equal."""


def free_sizes(inputs: Sequence[tuple[str, Sequence[int | str | None]]]) -> Iterator[list[Array]]:
    """Return one row of zeros of each input (datatype, shape), in one choice of sizes after another. Dimensions that
    share a name, a string in the shape, share their size; dimension 0 is that of the rows."""
    keys = [
        [s if isinstance(s, int | str) else (n, at) for at, s in enumerate(shape)]
        for n, (_, shape) in enumerate(inputs)
    ]
    of_rows = {shape[0] for shape in keys if shape and not isinstance(shape[0], int)}
    free = {key for shape in keys for key in shape if not isinstance(key, int)} - of_rows
    choices: list[dict[object, int]] = [{key: 5 + at for at, key in enumerate(sorted(free, key=str))}]
    choices += [dict.fromkeys(free, side) for side in SIDES] if free else []
    for sizes in choices:
        shapes = [[k if isinstance(k, int) else 1 if k in of_rows else sizes[k] for k in shape] for shape in keys]
        yield [_zeros(datatype, shape) for (datatype, _), shape in zip(inputs, shapes, strict=True)]


def _zeros(datatype: str, shape: Sequence[int]) -> Array:
    if datatype == "BYTES":
        return objects([b"0"] * int(np.prod(shape))).reshape(shape)
    return np.zeros(shape, dtype=DATATYPES[datatype])
