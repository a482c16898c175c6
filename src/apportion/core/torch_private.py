"""Every private name of torch that apportion uses, with what stands in for it where a torch does not have it.

torch may rename or drop such a name in any version. A name that only makes something faster has a plain path behind
it: without the name the run is slower and otherwise the same. ``missing`` lists what this torch does not have, and
``unfamiliar`` says in a sentence what a user should know of it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.optim import Optimizer
from torch.utils import _pytree  # as torch.export and torch.func take and give trees
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.conv import _ConvNd
    from torch.nn.modules.dropout import _DropoutNd

TESTED = ((2, 9), (2, 13))
"""The first and the last minor version of torch that the tests have run with."""
missing: list[str] = []
"""The private names that this torch does not have."""


def probe(path: str) -> Any | None:
    """Return what torch has under a private name; None, and the name is noted, where there is nothing."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        missing.append(path)
        return None


def unfamiliar(version: str = torch.__version__) -> str | None:
    """A sentence about this version of torch for the user; None where it is one of the tested ones and has every
    name."""
    numbers = version.split("+")[0].split(".")
    try:
        minor = int(numbers[0]), int(numbers[1])
    except (IndexError, ValueError):
        minor = (0, 0)
    first, last = (".".join(map(str, each)) for each in TESTED)
    said = []
    if not TESTED[0] <= minor <= TESTED[1]:
        said.append(f"torch {version} is not one of the tested versions ({first} to {last})")
    if missing:
        said.append(f"torch {version} has no {', '.join(missing)}: what they make faster takes its plain path")
    return "; ".join(said) or None


# Classes that others are derived from, and trees

if TYPE_CHECKING:
    BatchNormBase = _BatchNorm
    ConvBase = _ConvNd
    DropoutBase = _DropoutNd
else:
    BatchNormBase = nn.BatchNorm1d.__mro__[1]
    ConvBase = nn.Conv1d.__mro__[1]
    DropoutBase = nn.Dropout.__mro__[1]
pytree = _pytree
DispatchMode = TorchDispatchMode


def traced_through_compiled() -> AbstractContextManager[Any]:
    """Let torch.fx, where it follows a forward, go into what was given to ``torch.compile``, in the place of an
    error."""
    config = probe("torch._dynamo.config")
    if config is None or not hasattr(config, "error_on_nested_fx_trace"):
        return nullcontext()
    return cast("AbstractContextManager[Any]", config.patch(error_on_nested_fx_trace=False))


# The compiler, which optimizers import

_COMPILER = "torch._dynamo"


@final
class _LateRules:
    """Stands in for the compiler's rules of what it traces. A process group that is set up has it forget what it has
    looked up in them, which is nothing so far."""

    def __init__(self, compiler: _LateCompiler) -> None:
        self._compiler = compiler

    def clear_lru_cache(self) -> None:
        """Does nothing: nothing was looked up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler.imported().trace_rules, name)


@final
class _LateUtilities:
    """Answers for the compiler's utilities as long as it is not imported. DistributedDataParallel asks them how
    compiled networks are to reduce their gradients."""

    def __init__(self, compiler: _LateCompiler) -> None:
        self._compiler = compiler

    def get_optimize_ddp_mode(self) -> str:
        """Returns the default: a program that chooses another one imports the compiler, to set it there."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler.imported().utils, name)


@final
class _LateCompiler(ModuleType):
    """Stands in for torch's compiler until something of it is used that is more than nothing.

    Optimizers and process groups import it or look for it, though all that they ask of it does nothing in a process
    that has compiled nothing: to break a graph, to leave a function out of one, and to forget the rules that it has
    looked up. Importing it takes a process about as long as half of torch does.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER, "The compiler of torch, which is imported when it is used.")
        self._loading = threading.RLock()
        self.trace_rules = _LateRules(self)
        self.utils = _LateUtilities(self)

    def graph_break(self, msg: str = "") -> None:
        """Does nothing: no graph is being made."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Returns a function that calls this one, by way of the compiler as soon as that is there."""
        if fn is None:
            return self.imported().disable(fn, recursive, **options)
        disabled: list[Any] = []

        @functools.wraps(fn)
        def call(*arguments: Any, **named: Any) -> Any:
            if not disabled and sys.modules.get(_COMPILER) is not self:
                disabled.append(sys.modules[_COMPILER].disable(fn, recursive, **options))
            return (disabled[0] if disabled else fn)(*arguments, **named)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what is asked of every module there is
            raise AttributeError(name)
        return getattr(self.imported(), name)

    def import_settings(self) -> None:
        """Imports the module of the compiler's settings alone, which the compiler finds there when it is imported. Does
        nothing where this torch keeps them otherwise: asking for them then imports all of it."""
        name = f"{_COMPILER}.config"
        spec = importlib.util.spec_from_file_location(name, Path(torch.__file__).parent / "_dynamo" / "config.py")
        if name in sys.modules or spec is None or spec.loader is None:
            return
        settings = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(settings)
        except Exception:
            sys.modules.pop(name, None)
        else:
            self.config = settings

    def imported(self) -> Any:
        """Imports the compiler, which is from now on in the place of this, and returns it."""
        with self._loading:
            if sys.modules.get(_COMPILER) is self:
                del sys.modules[_COMPILER]
                vars(torch).pop("_dynamo", None)
            return importlib.import_module(_COMPILER)


def import_compiler_late() -> None:
    """Has this process import torch's compiler when something is compiled, and not for its first optimizer. Does
    nothing where it is imported already."""
    if _COMPILER not in sys.modules:
        late: Any = _LateCompiler()
        sys.modules[_COMPILER] = torch._dynamo = late


def import_compiler_settings() -> None:
    """Has the settings of torch's compiler at hand where the compiler itself is imported late. Tensors without memory,
    by which torch works out how tensors in shards are laid out, look at nothing else of it."""
    late = sys.modules.get(_COMPILER)
    if isinstance(late, _LateCompiler):
        late.import_settings()


def compiler_is_imported() -> bool:
    """Whether torch's compiler is there, and not only what stands in for it: without it nothing was compiled."""
    return not isinstance(sys.modules.get(_COMPILER), _LateCompiler | None)


# Fused and joined kernels

fused_adam: Callable[..., None] | None = probe("torch._fused_adam_")
fused_adamw: Callable[..., None] | None = probe("torch._fused_adamw_")
fused_adagrad: Callable[..., None] | None = probe("torch._fused_adagrad_")


def _copy_each(into: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for one, value in zip(into, values, strict=True):
        one.copy_(value)


def _add_each(into: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for one, value in zip(into, values, strict=True):
        one.add_(value)


foreach_copy: Callable[..., None] = probe("torch._foreach_copy_") or _copy_each
foreach_add: Callable[..., None] = probe("torch._foreach_add_") or _add_each


# What autograd does

_runs: Callable[[Any], bool] | None = probe("torch._C._will_engine_execute_node")
_transforms: Callable[[], bool] | None = probe("torch._C._are_functorch_transforms_active")
can_ask_the_engine = _runs is not None and _transforms is not None
"""Can a function of one's own know which gradients the pass under way is for? Without that none is redirected."""


def pass_accumulates(node: Any) -> bool | None:
    """Whether the backward pass under way adds to the ``.grad`` of the leaf whose accumulator this is. False: that
    gradient is not asked for; None: it is handed out instead (``autograd.grad``)."""
    assert _runs is not None
    try:
        return _runs(node)
    except RuntimeError:  # the engine does not say it of a leaf whose gradient it hands out
        return None


in_a_transform: Callable[[], bool] = _transforms or (lambda: True)
"""Whether torch.func is at work (vmap, grad, jvp), which does not support a plain ``autograd.Function``."""


def in_forward_mode() -> bool:
    """Whether derivatives are computed in forward mode, which asks a function for more than a backward pass."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def applied(function: type[Function]) -> Callable[..., Any]:
    """The ``function.apply`` without its look for torch.func, for a caller that has looked already."""
    base = probe("torch._C._FunctionBase")
    if base is None or not issubclass(function, base):
        return function.apply
    return super(Function, function).apply  # type: ignore[misc, no-any-return]


# Hooks

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


forward_hooks_of: Callable[[nn.Module], dict[int, Callable[..., Any]]] = lambda m: m._forward_hooks  # noqa: E731
"""The forward hooks of a module, which are called with what it gives, in order, by number."""


def forward_hooks_with_kwargs_of(module: nn.Module) -> Collection[int]:
    """The numbers of the forward hooks that are given the module's keyword arguments, too."""
    return getattr(module, "_forward_hooks_with_kwargs", ())


_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def forward_hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """The tables in which a module keeps the hooks of its forward, and what it knows of them, by number."""
    return [getattr(module, name, {}) for name in _FORWARD_HOOKS]


def hooked(module: nn.Module, *, forward_only: bool = False) -> bool:
    """Whether a module has hooks that run when it is called, or when its gradients come."""
    return any(getattr(module, name, None) for name in (_MODULE_HOOKS[:2] if forward_only else _MODULE_HOOKS))


def backward_hooked(tensor: Tensor) -> bool:
    """Whether a tensor's gradient goes through a hook before it is accumulated."""
    return bool(getattr(tensor, "_backward_hooks", None))


def gradient_hooked(tensor: Tensor) -> bool:
    """Whether a tensor has a hook that sees its gradient, before or after it is accumulated."""
    return backward_hooked(tensor) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OPTIMIZERS = importlib.import_module("torch.optim.optimizer")  # torch.optim takes the name away
_GLOBAL_STEP_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def step_hooked(optimizer: Optimizer, *, before_only: bool = False) -> bool:
    """Whether there are hooks around an optimizer's steps: its own, or those of all optimizers."""
    count = 1 if before_only else 2
    return any(getattr(optimizer, name, None) for name in _STEP_HOOKS[:count]) or any(
        getattr(_OPTIMIZERS, name, None) for name in _GLOBAL_STEP_HOOKS[:count]
    )


def step_hooks_of(optimizer: Optimizer) -> list[Any]:
    """The functions that are called around an optimizer's steps: its own hooks, and those of all optimizers."""
    tables = [getattr(optimizer, name, None) for name in _STEP_HOOKS]
    tables += [getattr(_OPTIMIZERS, name, None) for name in _GLOBAL_STEP_HOOKS]
    return [hook for table in tables if table for hook in table.values()]


def remove_step_hooks(optimizer: Optimizer) -> None:
    """Removes the hooks of this optimizer's own around its steps; those of all optimizers stay."""
    for name in _STEP_HOOKS:
        if hasattr(optimizer, name):
            setattr(optimizer, name, OrderedDict())


def gradient_hooks_of(tensor: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks that are called with a tensor's gradient before it is accumulated, and those with the tensor after."""
    return tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {}


def mark_stepped(optimizer: Any) -> None:
    """Mark the optimizer as stepped: its schedule would warn otherwise."""
    optimizer._opt_called = True


# Modules and tensors from inside

parameters_of: Callable[[nn.Module], dict[str, Any]] = lambda m: m._parameters  # noqa: E731
buffers_of: Callable[[nn.Module], dict[str, Any]] = lambda m: m._buffers  # noqa: E731
modules_of: Callable[[nn.Module], dict[str, Any]] = lambda m: m._modules  # noqa: E731
HOLDERS = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module keeps what is registered with it."""


def persists(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer is in the module's state."""
    return buffer not in module._non_persistent_buffers_set


def persists_no_more(module: nn.Module, buffer: str) -> None:
    """Take a buffer out of the module's state."""
    module._non_persistent_buffers_set.add(buffer)


def version_of(tensor: Tensor) -> int:
    """The number of times that a tensor has been written to in place."""
    return tensor._version


_uses_of = probe("torch._C._storage_Use_Count")


def _uses(tensor: Tensor) -> int | None:
    return None if _uses_of is None else _uses_of(tensor.untyped_storage()._cdata)


_uses_alone = _uses(torch.empty(1, device="cpu"))


def is_alone_in_memory(tensor: Tensor) -> bool:
    """Whether no other tensor, and no view of this one, lies in its memory. Without torch's count, this cannot be
    known."""
    return _uses_of is not None and _uses(tensor) == _uses_alone


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another."""
    return tensor._is_view()


OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
"""The classes of torch's operators."""
attention_on_cpu: Any | None = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The operator that computes attention on the CPU, of which torch's counter of FLOPs knows nothing."""


# Collectives

DDP_COLLECTIVES = ("_verify_params_across_processes", "_broadcast_coalesced")
"""Functions of torch.distributed that DistributedDataParallel calls on all ranks: as it is made, to compare the shapes
of parameters; and to send the first rank's parameters and buffers."""
DDP_REBUILD = "_rebuild_buckets"
"""The method of its reducer that a forward calls, and in which the ranks agree on the order of the gradients, once."""


def functional_collectives() -> ModuleType | None:
    """The module of the collectives that DTensor calls; None where this torch has none."""
    try:
        return importlib.import_module("torch.distributed._functional_collectives")
    except ImportError:
        missing.append("torch.distributed._functional_collectives")
        return None


def process_group_named(name: str) -> Any | None:
    """The process group that torch knows by a name; None where there is none."""
    resolve = getattr(torch.distributed.distributed_c10d, "_resolve_process_group", None)
    try:
        return None if resolve is None else resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


# Loading


@contextmanager
def in_own_memory() -> Iterator[None]:
    """Keep torch's default_collate in a loader from making a batch in shared memory of its own. Such memory has a name
    for a moment: it would stay behind where the process is killed just then. What is loaded travels otherwise."""
    worker: Any = torch.utils.data._utils.worker
    kept, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = kept


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread, as where a checkpoint computes a forward again."""
    running = getattr(torch._C, "_current_graph_task_id", None)
    return running is not None and running() != -1


def wrap_backward(context: AbstractContextManager[Any]) -> None:
    """Has every backward run within a context: ``backward`` is a function that a TorchFunctionMode sees, and what runs
    below it, such as a checkpoint's second forward, would otherwise not be seen by the mode."""
    name = "_engine_run_backward"
    run = getattr(torch.autograd, name, None)
    if run is None:
        missing.append(f"torch.autograd.{name}")
        return

    @functools.wraps(run)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context:
            return run(*args, **kwargs)

    setattr(torch.autograd, name, within)
