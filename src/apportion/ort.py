"""ONNX Runtime on the CPU, which is imported here alone: it sends its maker what it is used for, unless that is said to
be unwanted before it is first imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def runtime() -> Any:
    """The package."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def session(path: str | Path, *, threads: int) -> Any:
    """For this file. Threads that wait block; nothing is printed. Raises what ONNX Runtime does."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
