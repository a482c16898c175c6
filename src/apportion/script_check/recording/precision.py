"""Has a script compute in float64, where rounding is far below any mistake, and on the CPU where it asks for a GPU that
is not there.

The mode in ``functions.py`` has the element types and devices among the arguments of torch's functions rewritten. What
it cannot see (parameters as they are registered, files that are loaded, arrays of numpy) is converted where it enters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from apportion.script_check.recording import no_gpu
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
    if recorder.plan["no_gpu"]:
        no_gpu.install(recorder)
    if recorder.plan["float64"]:
        _convert_entries()
        _leave_policies_out()
        _leave_compiler_out(recorder)
    else:
        _record_precision(recorder)


def widened(tree: Any) -> Any:
    """Returns a tree of lists, tuples, dicts, named tuples and data classes with its floating tensors in float64."""
    if isinstance(tree, Tensor):
        return _wide(tree)
    if isinstance(tree, MutableMapping):
        return _wide_mapping(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(widened(value) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)(widened(value) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            value = getattr(tree, field.name, None)
            if (changed := widened(value)) is not value:
                object.__setattr__(tree, field.name, changed)
    return tree


def _wide(tensor: Tensor) -> Tensor:
    wider = _WIDER.get(tensor.dtype)
    if wider is None or type(tensor) not in (Tensor, nn.Parameter):
        return tensor
    with torch.no_grad():
        return tensor.to(wider) if not tensor.requires_grad else tensor.detach().to(wider).requires_grad_()


def _wide_mapping(tree: Any) -> Any:
    changed = {key: widened(value) for key, value in tree.items()}
    if all(changed[key] is tree[key] for key in tree):
        return tree
    if type(tree) is dict:
        return changed
    for key, value in changed.items():  # a class of its own (BatchEncoding) keeps it
        tree[key] = value
    return tree


class Rewriting:
    """Rewrites element types and devices among the arguments of torch's functions, as a plan asks."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._float64, self._no_gpu = bool(plan["float64"]), bool(plan["no_gpu"])

    def replaced(self, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Returns whether a call is replaced by another, and then its result."""
        if self._no_gpu and name in ("cuda", "pin_memory"):
            return True, args[0]
        if self._float64 and name in _CASTS and len(args) == 1 and isinstance(args[0], Tensor):
            return True, args[0].to(_WIDER.get(args[0].dtype, torch.float64))
        if self._float64 and name == "_amp_foreach_non_finite_check_and_unscale_":
            _unscale(*args)
            return True, None
        if self._float64 and name == "_amp_update_scale_":
            return True, _update_scale(*args)
        return False, None

    def arguments(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments to call a function with."""
        if self._no_gpu:
            args, kwargs = no_gpu.without_numbers(name, args, kwargs)
        if _reads_bytes(name, args):
            return args, kwargs
        return tuple(map(self._argument, args)), {key: self._argument(value) for key, value in kwargs.items()}

    def result(self, name: str, result: Any) -> Any:
        """Returns the result of a function, of one that makes tensors in float64."""
        return widened(result) if self._float64 and name in _MAKERS else result

    def _argument(self, value: Any) -> Any:
        if self._float64 and isinstance(value, torch.dtype):
            return _WIDER.get(value, value)
        if self._no_gpu and no_gpu.is_gpu(value):
            return torch.device("cpu")
        return value


def _reads_bytes(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function takes the bytes of a file for numbers of a type, which is that of the file."""
    if name == "frombuffer":
        return True
    return name == "view" and bool(args) and isinstance(args[0], Tensor) and args[0].dtype in (torch.uint8, torch.int8)


def _unscale(gradients: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Divides gradients by a GradScaler's scale, as torch does where the scale is in float32."""
    for gradient in gradients:
        if not torch.isfinite(gradient).all():
            found_inf.fill_(1.0)
        gradient.mul_(inverse.to(gradient.dtype))


def _update_scale(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """Adapts a GradScaler's scale, as torch does where the scale is in float32."""
    if found_inf.item():
        scale.mul_(backoff)
        tracker.zero_()
    elif int(tracker) + 1 == interval:
        scale.mul_(growth)
        tracker.zero_()
    else:
        tracker.add_(1)
    return scale


def _leave_policies_out() -> None:
    """Has the policies of mixed precision of torch's wrappers ask for nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
    from torch.nn.parallel import DistributedDataParallel

    begin = MixedPrecisionPolicy.__init__

    @wraps(begin)
    def no_policy(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, **{key: value for key, value in kwargs.items() if not isinstance(value, torch.dtype)})

    # Element types alone are left out, as a policy also says whether inputs are cast.
    MixedPrecisionPolicy.__init__ = no_policy  # type: ignore[method-assign]
    for wrapper in (FullyShardedDataParallel, DistributedDataParallel):
        wrapper.__init__ = _without_policy(wrapper)  # type: ignore[method-assign]


def _record_precision(recorder: Recorder) -> None:
    """Records the element types of parameters and of autocast, each once."""
    seen = set[torch.dtype]()
    register, begin = nn.Module.register_parameter, torch.autocast.__init__

    def record_once(dtype: torch.dtype) -> None:
        if dtype not in seen and dtype.is_floating_point:
            seen.add(dtype)
            recorder.emit("precision", type=str(dtype).removeprefix("torch."))

    @wraps(register)
    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            record_once(param.dtype)

    @wraps(begin)
    def begun(self: torch.autocast, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self._enabled:
            record_once(self.fast_dtype)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    torch.autocast.__init__ = begun  # type: ignore[method-assign]


def _leave_compiler_out(recorder: Recorder) -> None:
    """Has what the script compiles run as it is written: the compiler would trace the mode in ``functions.py``."""
    compile_ = torch.compile

    @wraps(compile_)
    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.set_stance("force_eager")
        recorder.emit("compiled", site=recorder.site())
        return compile_(*args, **kwargs)

    torch.compile = uncompiled


def _without_policy(wrapper: Any) -> Callable[..., None]:
    begin = wrapper.__init__
    sharded = wrapper.__name__ == "FullyShardedDataParallel"

    @wraps(begin)
    def wide(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("mixed_precision", None)
        if sharded:
            kwargs["use_orig_params"] = True  # a flat parameter has no names to compare by
        begin(self, *args, **kwargs)

    return wide


def _convert_entries() -> None:
    """Converts parameters and buffers as they are registered, and what is loaded; turns autocast off."""
    torch.set_default_dtype(torch.float64)
    # A script that sets its own default, such as bfloat16, would compute in it from there on.
    torch.set_default_dtype = lambda _dtype: None
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
