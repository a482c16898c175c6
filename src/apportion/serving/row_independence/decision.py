"""The decision whether requests to a member are computed together. What is undecided is computed one by one.

They are where the network gives for rows together what it gives for each of them alone. That is read from its graph,
and then tried on the network itself: with rows that differ in value, in kind and in magnitude, since a range, a mean or
a count over all rows shows only where another row changes it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

import numpy as np

from apportion.serving.protocol.datatypes import Array, from_bf16, objects, to_bf16
from apportion.serving.row_independence.graph_reader import GraphReading, read
from apportion.serving.runtimes.runtime import Runtime, Spec

SECONDS = 2.0
"""The seconds after which no further row is tried; two always are."""
_FLOATS = (1.0, 1e3, 1e-3, 30.0)
"""The magnitudes of random numbers."""
_WHOLE = (2, 10, 100, 1000, 30_000)
"""The numbers below which random whole numbers are drawn."""
_TEXTS = ((b"",), (b"0", b"1", b"17", b"-3.5"), (b"a", b"b", b"of", b"the"), (b"row", b"a rare word", b"B", b"zz"))
_TOLERANCE = {"FP16": 1e-2, "BF16": 5e-2}
"""The largest difference, relative to the largest output of the row, where it is not ``_TOLERANCE_FP32``."""
_TOLERANCE_FP32, _TOLERANCE_QUANTIZED = 1e-3, 5e-2
"""The largest difference for float32; and in a quantized network, where a sum that is rounded the other way moves a
number by a whole step of its range."""


Trial = tuple[list[Array], list[Array]]


def why_rows_differ(program: Runtime, row: Sequence[Array], *, quantized: bool = False) -> str | None:
    """Return why rows may not be computed together; None where they gave together what each of them gives alone.
    ``row``: one row of each input that the program is known to compute. ``quantized``: it rounds to whole numbers on
    the way."""
    alone = _alone(program, row)
    if len(alone) < 2:
        return "no two rows could be tried"
    if any(x.ndim == 0 or len(x) != 1 for _, outputs in alone for x in outputs):
        return "it gives another number of rows than it is given"
    for order in (alone, alone[::-1], alone[:2]):
        if (why := _beside_each_other(program, order, quantized=quantized)) is not None:
            return why
    return None


def remembers(program: Runtime, row: Sequence[Array], *, quantized: bool = False) -> bool:
    """Return whether the program gives a row another output after it has computed other rows than before."""
    trials = _alone(program, row)
    for rows, outputs in trials[:2]:
        _begin_random_numbers_again()
        found = program.run(rows, math.inf)
        if any(not _close(*of, quantized) for of in zip(program.outputs, found, outputs, strict=True)):
            return True
    return False


def _begin_random_numbers_again() -> None:
    """Seed torch, where it is imported, so that a module draws the same numbers each time: draws are not memory."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def _alone(program: Runtime, row: Sequence[Array]) -> list[Trial]:
    """Return (inputs, outputs) of rows that the program takes, each computed by itself."""
    found: list[Trial] = []
    end = time.monotonic() + SECONDS
    for rows in _tried(program.inputs, row):
        if time.monotonic() > end and len(found) > 1:
            break
        _begin_random_numbers_again()
        try:
            found.append((rows, program.run(rows, math.inf)))
        except (ValueError, IndexError):  # such a number is none that it takes, as of a word that it does not know
            continue
    return found


def _beside_each_other(program: Runtime, order: Sequence[Trial], *, quantized: bool) -> str | None:
    """Return what is wrong where these rows are computed as one batch."""
    try:
        found = program.run([np.concatenate(x) for x in zip(*(rows for rows, _ in order), strict=True)], math.inf)
    except (ValueError, IndexError) as error:
        return f"it does not take {len(order)} rows that it takes one by one ({error})"
    for at, (_, outputs) in enumerate(order):
        for spec, whole, own in zip(program.outputs, found, outputs, strict=True):
            if whole.ndim == 0 or len(whole) != len(order) or not _close(spec, whole[at : at + 1], own, quantized):
                return f"a row has another {spec.name} beside other rows than alone, in a trial"
    return None


def _tried(specs: Sequence[Spec], row: Sequence[Array]) -> list[list[Array]]:
    """Return rows to try: the one that is given, and others in its shape."""
    made, random = [list(row)], np.random.default_rng(0)
    turns = max(len(_FLOATS), len(_WHOLE), len(_TEXTS))
    for turn in range(turns):
        made.append([_other(spec, x, turn, random) for spec, x in zip(specs, row, strict=True)])
    # Whole numbers that the network knows, where it takes floating ones besides that differ.
    floats = [
        [_other(s, x, n, random) if x.dtype.kind == "f" else x for s, x in zip(specs, row, strict=True)] for n in (0, 1)
    ]
    # The same number everywhere, from zero on: each is known to most networks.
    same = [[_same(spec, x, n) for spec, x in zip(specs, row, strict=True)] for n in (0, 1, 2)]
    return [*made, *floats, *same]


def _other(spec: Spec, x: Array, turn: int, random: np.random.Generator) -> Array:
    if spec.datatype == "BYTES":
        texts = _TEXTS[turn % len(_TEXTS)]
        return objects([texts[n] for n in random.integers(len(texts), size=x.size)]).reshape(x.shape)
    if spec.datatype == "BF16":
        return to_bf16((random.normal(size=x.shape) * _FLOATS[turn % len(_FLOATS)]).astype(np.float32))
    if x.dtype.kind == "f":
        largest = float(np.finfo(x.dtype).max) / 8
        return np.clip(random.normal(size=x.shape) * _FLOATS[turn % len(_FLOATS)], -largest, largest).astype(x.dtype)
    if x.dtype.kind == "b":
        return random.random(x.shape) < (turn + 1) / (len(_WHOLE) + 1)
    most = min(_WHOLE[turn % len(_WHOLE)], int(np.iinfo(x.dtype).max))
    return random.integers(most, size=x.shape).astype(x.dtype)


def _same(spec: Spec, x: Array, number: int) -> Array:
    if spec.datatype == "BYTES":
        return objects([b"%d" % number] * x.size).reshape(x.shape)
    if spec.datatype == "BF16":
        return to_bf16(np.full(x.shape, number, np.float32))
    return np.full(x.shape, number, x.dtype)


def _close(spec: Spec, some: Array, other: Array, quantized: bool) -> bool:
    """Return whether two outputs are equal but for rounding."""
    if some.shape != other.shape:
        return False
    if spec.datatype == "BF16":
        some, other = from_bf16(some), from_bf16(other)
    if some.dtype.kind != "f":
        return bool((some == other).all())
    tolerance = _TOLERANCE_QUANTIZED if quantized else _TOLERANCE.get(spec.datatype, _TOLERANCE_FP32)
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.abs(other[np.isfinite(other)])
        largest = float(finite.max(initial=0.0))
        return bool(np.allclose(some, other, rtol=tolerance, atol=tolerance * largest + 1e-6, equal_nan=True))


NOT_ALLOWED = "batch=False"
"""The reason where the settings say that requests are never computed together."""


def why_not_together(program: Runtime, row: Sequence[Array] | None, graph: str | None, *, batch: bool) -> str | None:
    """Return why requests may not be computed together; None where they may. ``row``: one row of each input that the
    program computes. ``graph``: an ONNX file of the same net. None: there is none. ``batch``: the settings allow it.
    Raises ValueError where the program's answers depend on what it computed before."""
    reading = GraphReading("") if row is None or graph is None else read(graph, row)
    if row is not None and not reading.random and remembers(program, row, quantized=reading.quantized):
        raise ValueError(
            "the network gives an input another output after other inputs, as batch normalization in training mode "
            "can: what one client asks would change the answers to others; export it in evaluation mode (model.eval())"
        )
    if not batch:
        return NOT_ALLOWED
    if not program.batched:
        every = (*program.inputs, *program.outputs)
        fixed = next((spec.name for spec in every if not spec.shape or spec.shape[0] is not None), "it")
        return f"{fixed} has no dimension 0 of any size"
    if row is None:
        return "no row was found that it computes"
    if graph is None:
        return "it has no ONNX graph, in which it could be read whether its rows depend on each other"
    return reading.why or why_rows_differ(program, row, quantized=reading.quantized)
