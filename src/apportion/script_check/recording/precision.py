"""Has a script compute in float64, where rounding is far below any mistake, and on the CPU where it asks for a GPU that
is not there.

The mode in ``functions.py`` has the element types and devices among the arguments of torch's functions rewritten. What
it cannot see (parameters as they are registered, files that are loaded, arrays of numpy) is converted where it enters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from apportion.script_check.recording.recorder import Recorder

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = {"float", "half", "bfloat16"}
_MAKERS = {"from_numpy", "as_tensor", "tensor", "frombuffer"}


def install(recorder: Recorder) -> None:
    """Convert what the script computes, as the plan asks: ``float64``, and ``no_gpu`` for a machine without one."""
    float64, no_gpu = bool(recorder.plan["float64"]), bool(recorder.plan["no_gpu"])
    if no_gpu:
        _stand_in_for_gpu(int(recorder.plan["ranks"]))
    if float64:
        _convert_entries()


def widened(tree: Any) -> Any:
    """Returns a tree of lists, tuples, dicts and named tuples with its floating tensors in float64."""
    if isinstance(tree, Tensor):
        wider = _WIDER.get(tree.dtype)
        if wider is None or type(tree) not in (Tensor, nn.Parameter):
            return tree
        with torch.no_grad():
            return tree.to(wider) if not tree.requires_grad else tree.detach().to(wider).requires_grad_()
    if isinstance(tree, dict):
        changed = {key: widened(value) for key, value in tree.items()}
        if all(changed[key] is tree[key] for key in tree):
            return tree
        if type(tree) is dict:
            return changed
        for key, value in changed.items():  # a class of its own (BatchEncoding) keeps it
            tree[key] = value
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(widened(value) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)(widened(value) for value in tree)
    return tree


class Rewriting:
    """Rewrites element types and devices among the arguments of torch's functions, as a plan asks."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._float64, self._no_gpu = bool(plan["float64"]), bool(plan["no_gpu"])

    def replaced(self, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Returns whether a call is replaced by another, and then its result."""
        if self._no_gpu and name == "cuda":
            return True, args[0]
        if self._float64 and name in _CASTS and len(args) == 1 and isinstance(args[0], Tensor):
            return True, args[0].double()
        return False, None

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments to call a function with."""
        return tuple(map(self._argument, args)), {key: self._argument(value) for key, value in kwargs.items()}

    def result(self, name: str, result: Any) -> Any:
        """Returns the result of a function, of one that makes tensors in float64."""
        return widened(result) if self._float64 and name in _MAKERS else result

    def _argument(self, value: Any) -> Any:
        if self._float64 and isinstance(value, torch.dtype):
            return _WIDER.get(value, value)
        if self._no_gpu and (
            (isinstance(value, torch.device) and value.type == "cuda")
            or (isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")))
        ):
            return torch.device("cpu")
        return value


def _convert_entries() -> None:
    """Converts parameters and buffers as they are registered, and what is loaded; turns autocast off."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype = lambda _dtype: None  # type: ignore[assignment]
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[misc,assignment]
    torch.HalfTensor = torch.DoubleTensor  # type: ignore[misc,assignment]

    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    @wraps(register_parameter)
    def wide_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(param.data) is Tensor and param.dtype in _WIDER and not param.is_meta:
            param.data = param.data.to(_WIDER[param.dtype])  # the object stays, as an optimizer may hold it
        register_parameter(self, name, param)

    @wraps(register_buffer)
    def wide_buffer(self: nn.Module, name: str, tensor: Tensor | None, *rest: Any, **more: Any) -> None:
        register_buffer(self, name, widened(tensor), *rest, **more)

    nn.Module.register_parameter = wide_parameter  # type: ignore[method-assign]
    nn.Module.register_buffer = wide_buffer  # type: ignore[method-assign]
    torch.load = _widening(torch.load)
    torch.from_numpy = _widening(torch.from_numpy)  # no mode sees it

    begin = torch.autocast.__init__

    @wraps(begin)
    def without_autocast(self: torch.autocast, *args: Any, **kwargs: Any) -> None:
        kwargs["enabled"] = False
        begin(self, *args[:2], **kwargs)

    torch.autocast.__init__ = without_autocast  # type: ignore[method-assign]


def _widening(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        return widened(function(*args, **kwargs))

    return wide


def _stand_in_for_gpu(ranks: int) -> None:
    """Answers for a GPU that is not there: every rank has "one", and what is asked of it happens on the CPU."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: ranks
    cuda.current_device = lambda: 0
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "init", "ipc_collect"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.reset_peak_memory_stats = lambda *args, **kwargs: None
    cuda.get_device_name = lambda *args, **kwargs: "CPU"
    cuda.is_bf16_supported = lambda *args, **kwargs: False
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign,assignment]

    open_group = dist.init_process_group

    @wraps(open_group)
    def gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        open_group("gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs)

    dist.init_process_group = gloo
    begin = DistributedDataParallel.__init__

    @wraps(begin)
    def on_cpu(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        begin(self, module, None, None, **kwargs)

    DistributedDataParallel.__init__ = on_cpu
