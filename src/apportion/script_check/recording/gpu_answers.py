"""The answers of ``torch.cuda`` and ``torch.accelerator`` on a machine with a GPU for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

_NOTHING = (
    "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "seed", "seed_all", "init",
    "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats",
    "set_stream", "set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all", "set_device_index",
    "set_device_idx", "set_sync_debug_mode",
)  # fmt: skip
_NONE = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization",
    "get_sync_debug_mode",
)  # fmt: skip
_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


def answer(gpus: int) -> None:
    """Answer for GPUs that are not there."""
    _answer_for_cuda(gpus)
    _answer_for_accelerator()


def _answer_for_cuda(gpus: int) -> None:
    cuda = torch.cuda
    current = [int(os.environ.get("LOCAL_RANK", "0"))]
    answers: dict[str, Callable[..., Any]] = {
        **{name: lambda *args, **kwargs: None for name in _NOTHING},
        **{name: lambda *args, **kwargs: 0 for name in _NONE},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpus,
        "current_device": lambda: current[0],
        "get_device_name": lambda *args, **kwargs: "CPU",
        "get_device_capability": lambda *args, **kwargs: (8, 0),
        "get_device_properties": lambda *args, **kwargs: SimpleNamespace(
            name="CPU", total_memory=1 << 34, multi_processor_count=1, major=8, minor=0
        ),
        "mem_get_info": lambda *args, **kwargs: (1 << 34, 1 << 34),
        "memory_stats": lambda *args, **kwargs: {},
        "memory_summary": lambda *args, **kwargs: "",
        "is_bf16_supported": lambda *args, **kwargs: True,
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "current_stream": lambda *args, **kwargs: _Stream(),
        "default_stream": lambda *args, **kwargs: _Stream(),
        "stream": _nothing,
        "device": _nothing,
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, value in answers.items():
        setattr(cuda, name, value)
    cuda.nccl.version = lambda: (2, 27, 3)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: 0)
    cuda.nvtx.range = _nothing
    for name in ("start", "stop"):
        setattr(cuda.profiler, name, lambda: None)
    cuda.profiler.profile = _nothing
    for name in (f"{each}Tensor" for each in _TYPES):
        setattr(cuda, name, getattr(torch, name))


def _answer_for_accelerator() -> None:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    for name in (
        "set_device_index", "set_device_idx", "synchronize", "empty_cache", "set_stream", "memory_allocated",
        "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    ):  # fmt: skip
        setattr(accelerator, name, getattr(torch.cuda, name))
    accelerator.get_memory_info = torch.cuda.mem_get_info
    accelerator.device_index = _nothing
    accelerator.is_available = lambda *args, **kwargs: True
    accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cuda")
    accelerator.device_count = torch.cuda.device_count
    accelerator.current_device_index = torch.cuda.current_device
    accelerator.current_device_idx = torch.cuda.current_device
    accelerator.current_stream = lambda *args, **kwargs: _Stream()


class _Stream:
    """A stream on which everything is already done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """Nothing is under way."""

    def wait_event(self, event: Any) -> None:
        """Nothing is under way."""

    def record_event(self, event: Any = None) -> Any:
        """Returns an event that has happened."""
        return event or _Event()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def is_capturing(self) -> bool:
        """Whether a graph is captured."""
        return False

    def query(self) -> bool:
        """Whether all is done."""
        return True


class _Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """It has happened already."""

    def wait(self, stream: Any = None) -> None:
        """It has happened already."""

    def synchronize(self) -> None:
        """It has happened already."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Zero milliseconds, as nothing runs on a GPU."""
        return 0.0


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield
