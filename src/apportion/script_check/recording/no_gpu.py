"""Answers for a GPU that is not there: every rank has "one", and what is asked of it happens on the CPU, over gloo.

The functions of ``torch.cuda`` and ``torch.accelerator`` answer as on a machine with a GPU for each rank. Devices among
the arguments of torch's functions are rewritten by the mode in ``functions.py``; those of constructors and of
collectives, which it does not see, here. SyncBatchNorm, which torch does not have on the CPU, takes its statistics over
gloo.
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
from torch.nn.parallel import DistributedDataParallel

from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import gathering

_CPU = torch.device("cpu")


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
    if name == "type" and len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
    return args, kwargs


def install(recorder: Recorder) -> None:
    """Answer for the GPUs that the plan names."""
    _answer_for_gpus(int(recorder.plan["gpus"]))
    _synchronize_statistics()
    _move_modules()
    _move_loaded()
    _use_gloo()
    _move_constructors()
    _accept_bfloat16_hooks()


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


def _move_loaded() -> None:
    """Loads on the CPU what a script would load on a GPU, and has the CPU as the default device in place of one."""
    load, set_default = torch.load, torch.set_default_device

    @wraps(load)
    def loaded(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(file, "cpu" if map_location is not None else None, *args, **kwargs)

    @wraps(set_default)
    def default(device: Any) -> None:
        set_default(_CPU if is_gpu(device) or type(device) is int else device)

    torch.load, torch.set_default_device = loaded, default  # type: ignore[assignment]


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
        # Divided before the sum and not after it: an asynchronous call has no result yet when the function returns.
        if operation == dist.ReduceOp.AVG:
            group = kwargs.get("group")
            tensor = args[position] if len(args) > position else kwargs.get("tensor", kwargs.get("input"))
            if isinstance(tensor, Tensor):
                part = tensor / dist.get_world_size(group)
                if position:  # the input of another output stays as it is
                    args = tuple(part if a is tensor else a for a in args)
                    kwargs = {key: part if value is tensor else value for key, value in kwargs.items()}
                else:
                    tensor.copy_(part)
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


def _accept_bfloat16_hooks() -> None:
    """Accepts communication hooks that sum in bfloat16, which DDP refuses where torch has no NCCL."""
    from torch.nn.parallel import DistributedDataParallel

    check: Any = DistributedDataParallel._check_comm_hook

    @wraps(check)
    def checked(self: DistributedDataParallel, hook: Any) -> None:
        if getattr(hook, "__name__", "") not in ("bf16_compress_hook", "bf16_compress_wrapper_hook"):
            check(self, hook)

    DistributedDataParallel._check_comm_hook = checked  # type: ignore[method-assign]


def _unpinned(begin: Callable[..., None]) -> Callable[..., None]:
    @wraps(begin)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, pin_memory=False)

    return made


class _Generator(torch.Generator):
    """A generator on the CPU, whichever device is asked for."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


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


def _answer_for_gpus(gpus: int) -> None:
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


class _AlreadyDone:
    """What a stream and an event have in common where everything is already done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """Whether all is done."""
        return True


class _Stream(_AlreadyDone):
    """A stream on which everything is already done."""

    cuda_stream = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """Nothing is under way."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        """Returns an event that has happened."""
        return event or _Event()

    def is_capturing(self) -> bool:
        """Whether a graph is captured."""
        return False


class _Event(_AlreadyDone):
    """An event that has happened."""

    def record(self, stream: Any = None) -> None:
        """It has happened already."""

    wait = record

    def elapsed_time(self, other: Any) -> float:
        """Zero milliseconds, as nothing runs on a GPU."""
        return 0.0


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _NoLayer(nn.Module):
    """A layer that no script has."""


class _SumOfRanks(torch.autograd.Function):
    """The sum over all ranks of a group, which is also that of the gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _summed(gradients[0], ctx.group), None


def _summed(part: Tensor, group: Any) -> Tensor:
    total = part.detach().clone(memory_format=torch.contiguous_format)
    gathering.append(True)  # a collective of this module, and not of the script
    try:
        dist.all_reduce(total, group=group)
    finally:
        gathering.pop()
    return total


def _synchronize_statistics() -> None:
    """Have SyncBatchNorm compute on the CPU."""
    nn.SyncBatchNorm.forward = _forward  # type: ignore[method-assign]
    begin: Any = DistributedDataParallel.__init__

    @wraps(begin)
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        nn.modules.SyncBatchNorm = _NoLayer  # type: ignore[misc,assignment]
        try:  # the wrapper looks for layers of this name, to refuse them on the CPU
            begin(self, *args, **kwargs)
        finally:
            nn.modules.SyncBatchNorm = nn.SyncBatchNorm  # type: ignore[misc]

    DistributedDataParallel.__init__ = begun  # type: ignore[method-assign]


def _forward(self: Any, input: Tensor) -> Tensor:
    if not self.training or not dist.is_initialized() or dist.get_world_size(self.process_group) < 2:
        return nn.BatchNorm1d.forward(self, input)
    dimensions = [each for each in range(input.dim()) if each != 1]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    count = input.new_full((1,), input.numel() / input.shape[1])
    total = _SumOfRanks.apply(torch.cat([input.sum(dimensions), count]), self.process_group)
    # In two passes, as E[x²] - E[x]² would cancel most digits where the mean is large.
    mean = total[:-1] / total[-1]
    squares = _SumOfRanks.apply((input - mean.view(shape)).square().sum(dimensions), self.process_group)
    variance = squares / total[-1]
    if self.track_running_stats:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            # As torch does: a momentum of None means the average over all batches so far.
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, share)
            # The running variance is the unbiased one, that of the batch is not.
            self.running_var.lerp_(squares / (total[-1] - 1), share)
    normal: Tensor = (input - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
    if self.affine:
        normal = normal * self.weight.view(shape) + self.bias.view(shape)
    return normal
