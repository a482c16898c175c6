"""Digests the code that decides which network a workload trains, and the switches of torch, numpy and Python by which
the same code computes other numbers: the first part of the key of a cached proof."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from apportion.core import tree
from apportion.core.workload import Workload
from apportion.runtime.proof.installed_packages import release
from apportion.runtime.proof.value_digest import Digester, UnhashableError, seal

FIELDS = (
    "model", "loss", "update", "count", "collate", "augment", "carry", "schedule", "optimizer", "parts",
    "batch_size", "clip_grad_norm", "order", "precision", "compile", "per_rank_draws",
)  # fmt: skip
"""The fields of the workload that are digested. The seed is not among them: a proof holds for any. The data are
compared by their rows (``runtime.cached_proof``)."""


class Digested(NamedTuple):
    """A digest, or what stands in its way."""

    digest: str | None
    unhashable: str | None
    """The place of the value that has no digest, and what it is: ``loss: log: a _io.TextIOWrapper``."""
    parts: Mapping[str, str] = MappingProxyType({})
    """The digests of its parts, by names that a person can read: ``loss=``, ``torch's flags``."""


def digested(
    workload: Workload,
    *,
    network: nn.Module | None = None,
    optimizers: Mapping[str, Optimizer] | None = None,
    batch: Any = None,
    given: Mapping[str, Any] | None = None,
) -> Digested:
    """Returns everything that decides which network is trained, as a hexadecimal digest: the same in every process,
    another after every edit; or the name of a value that has no digest.

    ``network``: as the workload's factory made it, before a strategy has changed it; ``optimizers``: made for it,
    before any update; ``batch``: a pytree, of which shapes and dtypes count; ``given``: what else decides, as plain
    values (strategy, ranks, device, threads).
    """
    of = Digester()
    try:
        found = {f"{name}=": of(name, getattr(workload, name)) for name in FIELDS}
        if network is not None:
            found["the layers of the network"] = seal("network", *_network(of, network))
        if optimizers is not None:
            found["the optimizers"] = seal("optimizers", *_optimizers(of, optimizers))
        found["the shapes of an example"] = seal("batch", *(f"{tuple(t.shape)} {t.dtype}" for t in tree.tensors(batch)))
        found["how it is trained"] = of("given", dict(given or {}))
        found["the versions of Python, torch, numpy or apportion"] = seal("versions", *_versions())
        found["the flags of torch or numpy"] = seal("flags", *flags())
    except UnhashableError as error:
        return Digested(None, str(error))
    parts = {name: digest.hex() for name, digest in found.items()}
    return Digested(seal("workload", *(part for pair in parts.items() for part in pair)).hex(), None, parts)


def _network(of: Digester, network: nn.Module) -> Iterator[Any]:
    """Yields every layer's class and plain attributes; names, shapes and dtypes of all parameters and buffers, and
    which of them are one tensor. The values are left out: a network is the same whatever its weights are."""
    first: dict[int, int] = {}
    tensors = (*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False))
    for number, (name, tensor) in enumerate(tensors):
        alike = first.setdefault(id(tensor), number)
        kind = type(tensor).__qualname__
        line = f"{name} {kind} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {alike}"
        # Layers refer to their parameters: from now on each counts by its name and shape, and not by its values.
        of.stands_for(tensor, seal("network's", line))
        yield line
    for name, layer in network.named_modules(remove_duplicate=False):
        yield name
        try:
            yield of.layer(layer)
        except UnhashableError as error:
            error.place.insert(0, f"the network's layer {name}" if name else "the network")
            raise


def _optimizers(of: Digester, optimizers: Mapping[str, Optimizer]) -> Iterator[Any]:
    for name, optimizer in optimizers.items():
        yield from (name, of(f"the class of optimizer {name}".rstrip(), type(optimizer)))
        for group in optimizer.param_groups:
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            yield from (len(group["params"]), of(f"the settings of optimizer {name}".rstrip(), settings))


def _versions() -> tuple[str, ...]:
    """Returns the versions of what computes."""
    return (
        platform.python_version(),
        platform.machine(),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        np.__version__,
        # Holds the size and time of every file of this package: an edit of it makes all cached proofs stale.
        str(release("apportion")),
        os.environ.get("APPORTION_PLAIN", ""),
    )


_BACKENDS = (
    "cuda.matmul.allow_tf32", "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.fp32_precision", "cuda.flash_sdp_enabled", "cuda.mem_efficient_sdp_enabled",
    "cuda.math_sdp_enabled", "cuda.cudnn_sdp_enabled", "cuda.fp16_bf16_reduction_math_sdp_allowed", "cudnn.enabled",
    "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32", "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "mkldnn.enabled", "mkldnn.deterministic",
    "mkldnn.allow_tf32", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision",
    "mkldnn.fp32_precision", "fp32_precision", "mha.get_fastpath_enabled", "nnpack.enabled", "opt_einsum.enabled",
    "opt_einsum.strategy", "quantized.engine",
)  # fmt: skip
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
