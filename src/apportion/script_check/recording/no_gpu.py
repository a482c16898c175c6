"""Answers for a GPU that is not there: every rank has "one", and what is asked of it happens on the CPU, over gloo.

The functions of ``torch.cuda`` and ``torch.accelerator`` answer as on a machine with a GPU for each rank. Devices among
the arguments of torch's functions are rewritten by the mode in ``functions.py``; those of constructors and of
collectives, which it does not see, here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apportion.script_check.recording import gpu_answers, synchronized_statistics
from apportion.script_check.recording.recorder import Recorder

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
    gpu_answers.answer(int(recorder.plan["gpus"]))
    synchronized_statistics.install()
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
