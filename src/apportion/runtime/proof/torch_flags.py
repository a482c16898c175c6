"""The switches of torch, numpy and Python by which the same code computes other numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_BACKENDS = (
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.fp32_precision",
    "cuda.flash_sdp_enabled",
    "cuda.mem_efficient_sdp_enabled",
    "cuda.math_sdp_enabled",
    "cuda.cudnn_sdp_enabled",
    "cuda.fp16_bf16_reduction_math_sdp_allowed",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.enabled",
    "mkldnn.deterministic",
    "mkldnn.allow_tf32",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
    "mkldnn.fp32_precision",
    "fp32_precision",
    "mha.get_fastpath_enabled",
    "nnpack.enabled",
    "opt_einsum.enabled",
    "opt_einsum.strategy",
    "quantized.engine",
)
"""The names below ``torch.backends``; those that this version of torch lacks count as absent."""
_FUNCTIONS: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch.get_default_device,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_cache_enabled,
    torch.__future__.get_overwrite_module_params_on_conversion,
    torch.__future__.get_swap_module_params_on_conversion,
    torch.sparse.check_sparse_tensor_invariants.is_enabled,
)


def flags() -> Iterator[str]:
    """Yields each switch with its name."""
    for function in _FUNCTIONS:
        yield f"{function.__name__}={function()}"
    for device in ("cpu", "cuda"):
        yield f"autocast {device}={torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    for name in _BACKENDS:
        yield f"{name}={_backend(name)}"
    yield f"fill_uninitialized_memory={torch.utils.deterministic.fill_uninitialized_memory}"  # type: ignore[attr-defined]
    yield f"flushes denormals={float(torch.tensor(1e-40) * 1.0) == 0.0}"
    yield f"numpy errors={sorted(np.geterr().items())}"
    yield f"assertions={sys.flags.optimize == 0}"


def _backend(name: str) -> Any:
    found: Any = torch.backends
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        return found
    try:
        return found()
    except Exception:  # of a library that this build lacks
        return None
