"""Runs the modules of one process on parts of their rows.

In one pass, this finds the modules whose output for a row depends on the other rows of the batch. Each module that is
called is run once more on the two halves of its rows; where the outputs of the halves, joined, are not those of the
whole, it mixes rows, as a batch normalisation does. Outside of modules, the functions that reduce over rows or compare
them with each other are recorded with their lines.

In another pass, such modules run on each rank's rows alone, so that they take the statistics that the ranks take. What
a layer's statistics change is then left out of a comparison, and any other difference is found beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from apportion.script_check.recording.modules import Networks
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import tensors_of

MOST_FORWARDS = 4
"""The forwards of outermost modules that are looked into."""
TOLERANCE = 1e-9
REDUCTIONS = {
    "mean", "std", "var", "std_mean", "var_mean", "sum", "max", "min", "amax", "amin", "median", "norm", "quantile",
    "argmax", "sort", "topk", "softmax", "log_softmax", "logsumexp", "cumsum", "batch_norm", "cov", "corrcoef",
}  # fmt: skip
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "einsum", "cdist", "cosine_similarity"}


class Splits:
    """The modules that mix rows. ``outside``: whether no module's forward is running."""

    def __init__(self, recorder: Recorder, networks: Networks) -> None:
        self._recorder, self._networks = recorder, networks
        self._depth, self._forwards, self._rows = 0, 0, 0
        self._testing = False

    @property
    def outside(self) -> bool:
        """Whether no module's forward is running."""
        return self._depth == 0 and not self._testing

    def before(self, module: nn.Module, inputs: Any) -> None:
        """Before each forward of each module."""
        if self._testing or self._recorder.drawing:  # a transform of images is a module, too
            return
        self._depth += 1
        if self._depth == 1:
            self._forwards += torch.is_grad_enabled()
            self._rows = max((len(each) for each in tensors_of(inputs) if each.dim()), default=0)

    def after(self, module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        """After each forward of each module: runs it again on the halves of its rows."""
        if self._testing or self._recorder.drawing:
            return
        self._depth -= 1
        if self._depth == 0 and not self._rows:
            return
        if (
            not torch.is_grad_enabled()
            or self._forwards > MOST_FORWARDS
            or not isinstance(output, Tensor | tuple | dict)
        ):
            return
        if any(isinstance(each, FSDPModule) for each in module.modules()):
            return
        name = self._networks.module_name(module)
        if name is not None and (relative := self._mixes(module, inputs, kwargs, output)) is not None:
            self._recorder.emit("mixes_rows", module=name, type=type(module).__name__, relative=relative)

    def _mixes(self, module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> float | None:
        rows = self._rows or max((len(each) for each in tensors_of((inputs, kwargs)) if each.dim()), default=0)
        if rows < 2 or any(isinstance(each, DTensor) for each in tensors_of((inputs, kwargs, output))):
            return None
        saved = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        drawn = self._recorder.draws
        self._testing = True
        try:
            # The halves must leave no trace: buffers such as running means are put back below, the generator by
            # fork_rng, and the hooks ignore these forwards.
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                halves = [
                    module.forward(*half_of_rows(inputs, rows, half), **half_of_rows(kwargs, rows, half))
                    for half in (0, 1)
                ]
            parts = zip(tensors_of(output), *map(tensors_of, halves), strict=False)
            found = [_distance(whole, first, second, rows) for whole, first, second in parts]
        except Exception:  # a module that cannot take half of its rows says nothing
            return None
        finally:
            with torch.no_grad():
                for buffer, values in saved:
                    buffer.copy_(values)
            self._testing = False
        if self._recorder.draws > drawn:
            return None  # its halves draw other numbers than the whole, which says nothing of the rows
        largest = max(found, default=0.0)
        return largest if largest > TOLERANCE else None

    def record_statistic(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a function outside of modules that reduces over rows or compares them."""
        if not self.outside or name not in REDUCTIONS | PRODUCTS or not args or not isinstance(args[0], Tensor):
            return
        source, first = args[0], next(iter(tensors_of(result)), None)
        if first is None or not source.dim() or isinstance(source, DTensor | nn.Parameter):
            return
        if name in PRODUCTS:
            mixes = first.dim() == 2 and first.shape[0] == len(source) and first.shape[1] == len(source)
        else:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            mixes = dim is None or dim == 0 or dim == -source.dim() or (isinstance(dim, tuple | list) and 0 in dim)
        if mixes and (site := self._recorder.site()):
            self._recorder.emit("row_statistic", function=name.strip("_"), rows=len(source), site=site)


def half_of_rows(tree: Any, rows: int, half: int) -> Any:
    """Returns the first (0) or second (1) half of a tree's rows; a tensor whose first dimension is not a multiple
    of ``rows`` stays whole."""
    if isinstance(tree, Tensor):
        if not tree.dim() or len(tree) % rows or not len(tree):
            return tree
        middle = rows // 2 * (len(tree) // rows)
        return tree[:middle] if half == 0 else tree[middle:]
    if isinstance(tree, Mapping):
        return {key: half_of_rows(value, rows, half) for key, value in tree.items()}
    return type(tree)(half_of_rows(each, rows, half) for each in tree) if type(tree) in (list, tuple) else tree


def _distance(whole: Tensor, first: Tensor, second: Tensor, rows: int) -> float:
    """The distance of a module's output from that of its halves, over the norm; 0 for what has no rows."""
    if not whole.dim() or not whole.is_floating_point() or len(first) + len(second) != len(whole) or len(whole) % rows:
        return 0.0
    joined = torch.cat([first, second]).detach()
    if joined.shape != whole.shape:
        return 0.0
    norm = whole.detach().norm()
    return float((joined - whole.detach()).norm() / norm) if norm else 0.0


def install(recorder: Recorder, networks: Networks) -> Splits:
    """Look into each module's forward."""
    splits = Splits(recorder, networks)
    register_module_forward_pre_hook(splits.before)
    register_module_forward_hook(splits.after, with_kwargs=True, always_call=True)
    return splits


def install_by_rank(recorder: Recorder, networks: Networks) -> None:
    """Have the modules that the plan names run by ranks from their network's first forward on."""
    named = set(recorder.plan["by_rank"])
    done = set[int]()

    def before(module: nn.Module, inputs: Any) -> None:
        if id(module) in done:
            return
        done.add(id(module))
        for each in module.modules():
            if networks.module_name(each) in named and "forward" not in vars(each):
                each.forward = _by_rank(recorder, each, each.forward)

    register_module_forward_pre_hook(before)


def _by_rank(recorder: Recorder, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        rows, given = sum(recorder.parts), args[0] if args else None
        if not module.training or len(recorder.parts) < 2 or kwargs or not isinstance(given, Tensor):
            return forward(*args, **kwargs)
        if not given.dim() or len(given) % rows:
            return forward(*args, **kwargs)
        sizes = [part * (len(given) // rows) for part in recorder.parts]
        outputs = [forward(*each) for each in zip(*(_split(arg, sizes) for arg in args), strict=True)]
        return torch.cat(outputs) if all(isinstance(each, Tensor) for each in outputs) else forward(*args)

    return called


def _split(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(value, Tensor) and value.dim() and len(value) == sum(sizes):
        return list(value.split(list(sizes)))
    return [value for _ in sizes]
