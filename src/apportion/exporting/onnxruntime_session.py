"""The one place where ONNX Runtime (on the CPU) is imported: it sends its maker data on how it is used, unless that is
turned off before the first import."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BF16 = "tensor(bfloat16)"
WEIGHTS = "apportion.weights"
"""The key of a file's metadata with the digest of the weights that it was exported from."""
_TRAINING = b"training_mode"
_BF16_NUMBER = 16
"""ONNX's number of the type bfloat16."""


def runtime() -> Any:
    """Import the package onnxruntime with its telemetry turned off, and return it."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def session(path: str | Path | bytes, *, threads: int) -> Any:
    """Return a session for this file, or for its bytes. Its threads block while they wait, and nothing is printed.
    Raises what ONNX Runtime does."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    # Batch normalization in training mode writes its running statistics over its inputs. Constants of equal numbers are
    # made one by ConstantSharing, so that a bias of zeros would be written over as well.
    apart = ["ConstantSharing"] if _may_train(path) else []
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"], disabled_optimizers=apart)


def _may_train(path: str | Path | bytes) -> bool:
    """Return whether a file has a node with the attribute training_mode, whatever its value is."""
    if isinstance(path, bytes):
        return _TRAINING in path
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(_TRAINING) >= 0


def metadata(path: str | Path) -> dict[str, str]:
    """Return what a file says of itself. Raises what ONNX Runtime does."""
    return dict(session(path, threads=1).get_modelmeta().custom_metadata_map)


def run_bits(session: Any, inputs: Mapping[str, NDArray[Any]], options: Any = None) -> list[NDArray[Any]]:
    """Run ``session.run(None, inputs, options)`` with bfloat16, which numpy does not have, as its bits in uint16, for
    inputs and outputs."""
    kinds = {value.name: value.type for value in session.get_inputs()}
    held = {name: np.ascontiguousarray(x) for name, x in inputs.items()}  # ONNX Runtime only points there
    make = runtime().OrtValue
    given = {
        name: make.ortvalue_from_numpy_with_onnx_type(x, _BF16_NUMBER)
        if kinds[name] == BF16
        else make.ortvalue_from_numpy(x)
        for name, x in held.items()
    }
    return [_bits(value) for value in session.run_with_ort_values(None, given, options)]


def _bits(value: Any) -> NDArray[Any]:
    if value.data_type() != BF16:
        return np.asarray(value.numpy())
    shape = value.shape()
    data = bytearray(ctypes.string_at(value.data_ptr(), 2 * math.prod(shape)))
    return np.frombuffer(data, dtype=np.uint16).reshape(shape)
