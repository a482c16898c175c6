"""The runtime for ONNX files, which ONNX Runtime runs on the CPU. A run that is past its deadline is stopped after the
operation it is at."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from apportion.exporting.onnxruntime_session import run_bits, runtime, session
from apportion.serving.protocol.datatypes import DATATYPES, NAMES, Array, objects
from apportion.serving.runtimes.remote_runtime import Alarm
from apportion.serving.runtimes.runtime import Expired, Runtime, Spec

_TYPES = {
    "float16": "FP16", "float": "FP32", "double": "FP64", "bfloat16": "BF16", "bool": "BOOL", "string": "BYTES",
    **{f"{sign}int{bits}": f"{sign}INT{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


@final
class OnnxRuntime(Runtime):
    """An ONNX file as a program of a member. ``threads``: the threads that one run computes with; they block while they
    wait."""

    def __init__(self, path: str | Path, *, threads: int = 1) -> None:
        try:
            self._session = session(path, threads=threads)
        except Exception as error:  # onnxruntime's own have no base but this
            raise ValueError(f"{path} cannot be run: {error}") from error
        self._ort = runtime()
        self.runtime = f"onnxruntime {self._ort.__version__}"
        self.inputs = tuple(map(_spec, self._session.get_inputs()))
        self.outputs = tuple(map(_spec, self._session.get_outputs()))
        self._names = [spec.name for spec in self.inputs]
        self._bf16 = "BF16" in {spec.datatype for spec in (*self.inputs, *self.outputs)}
        self._running: Any = None
        self._alarm = Alarm(self._stop)

    def run(self, inputs: Sequence[Array], deadline: float) -> list[Array]:
        """Compute the outputs for these inputs, as ``Runtime.run`` says."""
        given = [_texts(x) if spec.datatype == "BYTES" else x for x, spec in zip(inputs, self.inputs, strict=True)]
        named = dict(zip(self._names, given, strict=True))
        self._running = options = self._ort.RunOptions()
        self._alarm.set(deadline)
        try:
            found: list[Array]
            found = run_bits(self._session, named, options) if self._bf16 else self._session.run(None, named, options)
        except Exception as error:
            if options.terminate:
                raise Expired from error
            raise ValueError(str(error)) from error
        finally:
            self._alarm.clear()
        if time.monotonic() > deadline:
            raise Expired
        return [_bytes(x) if spec.datatype == "BYTES" else x for x, spec in zip(found, self.outputs, strict=True)]

    def example(self) -> list[Array] | None:
        """Return one row of each input that the model computes, found by trying sizes for the dimensions of any size;
        None where none of them runs."""
        shapes = [(spec.datatype, x.shape) for spec, x in zip(self.inputs, self._session.get_inputs(), strict=True)]
        for rows in free_sizes(shapes):
            try:
                self.run(rows, math.inf)
            except ValueError:
                continue
            return rows
        return None

    def close(self) -> None:
        """Stop the thread that watches the deadlines."""
        self._alarm.close()

    def _stop(self) -> None:
        self._running.terminate = True


def _texts(values: Array) -> Array:
    """Convert bytes to Python's strings, which ONNX Runtime takes. A value that is not UTF-8 raises UnicodeDecodeError,
    which is a ValueError."""
    made = np.empty(values.size, dtype=object)
    made[:] = [value.decode() for value in values.reshape(-1)]
    return made.reshape(values.shape)


def _bytes(texts: Array) -> Array:
    return objects([text.encode() for text in texts.reshape(-1)]).reshape(texts.shape)


def _spec(argument: Any) -> Spec:
    kind = str(argument.type)
    inner = kind.removeprefix("tensor(").removesuffix(")")
    if inner not in _TYPES:
        raise ValueError(f"{argument.name} is a {kind}: only tensors of {', '.join(_TYPES)} are served")
    return Spec(argument.name, _TYPES[inner], tuple(n if isinstance(n, int) else None for n in argument.shape))


assert {*NAMES.values()} | {"BF16"} == {*_TYPES.values()}


# Inputs for a network of which nothing is known but their types and shapes, with sizes for the dimensions that may
# have any.


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
