"""Values of every datatype of the Open Inference Protocol that clients know: their ends, and what is awkward."""

from __future__ import annotations

from typing import Any

import numpy as np

VALUES: dict[str, Any] = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 7, 255], np.uint8),
    "UINT16": np.array([0, 7, 65535], np.uint16),
    "UINT32": np.array([0, 7, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 7, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 7, 127], np.int8),
    "INT16": np.array([-32768, 7, 32767], np.int16),
    "INT32": np.array([-(2**31), 7, 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 7, 2**63 - 1], np.int64),
    "FP16": np.array([0.5, -1.0, 65504.0], np.float16),
    "FP32": np.array([0.1, -1.0, 3e38], np.float32),
    "FP64": np.array([0.1, -1.0, 1e300], np.float64),
    "BYTES": np.array([b"one", b"", "zw\u00f6lf".encode()], dtype=object),
}
