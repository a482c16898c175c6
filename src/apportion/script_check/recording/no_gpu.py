"""Answers for a GPU that is not there: every rank has "one", and what is asked of it happens on the CPU, over gloo.

The functions of ``torch.cuda`` and ``torch.accelerator`` answer as on a machine with a GPU for each rank. Devices among
the arguments of torch's functions are rewritten by the mode in ``functions.py``; those of constructors and of
collectives, which it does not see, here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apportion.script_check.recording.recorder import Recorder

_CPU = torch.device("cpu")
_NOTHING = (
    "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "init", "ipc_collect",
    "reset_peak_memory_stats", "reset_max_memory_allocated", "set_stream", "set_per_process_memory_fraction",
    "set_rng_state", "set_rng_state_all", "set_device_index", "set_device_idx",
)  # fmt: skip
_NONE = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization")


def is_gpu(value: Any) -> bool:
    """Whether a value names a GPU."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def without_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a function without the numbers that stand for GPUs, as in ``tensor.to(rank)``."""
    if name == "to" and len(args) > 1 and type(args[1]) is int:
        args = (args[0], _CPU, *args[2:])
    if type(kwargs.get("device")) is int:
        kwargs = {**kwargs, "device": _CPU}
    return args, kwargs


def install(recorder: Recorder) -> None:
    """Answer for one GPU for each rank."""
    _answer_for_cuda(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _answer_for_accelerator()
    _move_modules()
    _use_gloo()
    _move_constructors()


def _answer_for_cuda(ranks: int) -> None:
    cuda = torch.cuda
    current = [int(os.environ.get("LOCAL_RANK", "0"))]
    answers: dict[str, Callable[..., Any]] = {
        **{name: lambda *args, **kwargs: None for name in _NOTHING},
        **{name: lambda *args, **kwargs: 0 for name in _NONE},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: ranks,
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
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: 0)
    cuda.nvtx.range = _nothing


def _answer_for_accelerator() -> None:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    for name in ("set_device_index", "set_device_idx", "synchronize", "empty_cache", "set_stream"):
        setattr(accelerator, name, lambda *args, **kwargs: None)
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
        """Milliseconds, of which none are counted."""
        return 0.0


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _move_modules() -> None:
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    move: Any = nn.Module.to

    @wraps(move)
    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = without_numbers("to", (self, *args), kwargs)
        args = tuple(_CPU if is_gpu(value) else value for value in args)
        kwargs = {key: _CPU if is_gpu(value) else value for key, value in kwargs.items()}
        return move(*args, **kwargs)

    nn.Module.to = moved  # type: ignore[method-assign]


def _use_gloo() -> None:
    """Opens groups of gloo, which has no average: a sum of parts divided beforehand stands for it."""
    dist.is_nccl_available = lambda: True

    def gloo(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        @wraps(function)
        def opened(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            if len(args) > position and isinstance(args[position], str) and "nccl" in args[position]:
                args = (*args[:position], "gloo", *args[position + 1 :])
            if "nccl" in str(kwargs.get("backend", "")):
                kwargs["backend"] = "gloo"
            return function(*args, **kwargs)

        return opened

    dist.init_process_group = gloo(dist.init_process_group, 0)
    dist.new_group = gloo(dist.new_group, 2)
    for name, position in (("all_reduce", 0), ("reduce_scatter_tensor", 1), ("reduce", 0)):
        setattr(dist, name, _averaging(getattr(dist, name), position))


def _averaging(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    @wraps(function)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        operation = kwargs.get(
            "op", next((a for a in args if isinstance(a, dist.ReduceOp | dist.ReduceOp.RedOpType)), None)
        )
        if operation == dist.ReduceOp.AVG:
            group = kwargs.get("group")
            tensor = args[position] if len(args) > position else kwargs.get("tensor", kwargs.get("input"))
            if isinstance(tensor, Tensor):
                tensor.div_(dist.get_world_size(group))
            args = tuple(dist.ReduceOp.SUM if a is operation else a for a in args)
            if "op" in kwargs:
                kwargs["op"] = dist.ReduceOp.SUM
        return function(*args, **kwargs)

    return averaged


def _move_constructors() -> None:
    """Rewrites devices among the arguments of constructors."""
    from torch.amp import GradScaler
    from torch.distributed import device_mesh, fsdp, pipelining
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    def rewritten(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            plain = tuple("cpu" if isinstance(a, str) and is_gpu(a) else _CPU if is_gpu(a) else a for a in args)
            kwargs = {k: ("cpu" if isinstance(v, str) else _CPU) if is_gpu(v) else v for k, v in kwargs.items()}
            return function(*plain, **{**kwargs, **{k: v for k, v in fixed.items() if k in kwargs}})

        return called

    for owner in (GradScaler, torch.autocast, device_mesh.DeviceMesh, pipelining.PipelineStage):
        owner.__init__ = rewritten(owner.__init__)  # type: ignore[method-assign]
    device_mesh.init_device_mesh = rewritten(device_mesh.init_device_mesh)
    setattr(dist, "init_device_mesh", device_mesh.init_device_mesh)  # noqa: B010 (torch does not declare it)
    DistributedDataParallel.__init__ = rewritten(  # type: ignore[method-assign]
        DistributedDataParallel.__init__, device_ids=None, output_device=None
    )
    fsdp.FullyShardedDataParallel.__init__ = rewritten(  # type: ignore[method-assign]
        fsdp.FullyShardedDataParallel.__init__, device_id=None
    )
    fsdp.CPUOffloadPolicy.__init__ = _unpinned(fsdp.CPUOffloadPolicy.__init__)  # type: ignore[method-assign]
    DataLoader.__init__ = rewritten(  # type: ignore[method-assign]
        DataLoader.__init__, pin_memory=False, pin_memory_device=""
    )
    torch.Generator = _Generator  # type: ignore[misc]


def _unpinned(begin: Callable[..., None]) -> Callable[..., None]:
    @wraps(begin)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, pin_memory=False)

    return made


class _Generator(torch.Generator):
    """A generator on the CPU, whichever device is asked for."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]
