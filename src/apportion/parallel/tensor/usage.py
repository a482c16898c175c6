"""A look at one forward pass of a network: what its graph does not tell of how its layers and weights are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from apportion.core import tree
from apportion.core.torch_private import pytree
from apportion.parallel.tracing.network import undisturbed


@dataclass
class Look:
    """The record of what one forward pass did."""

    outside: set[int] = field(default_factory=set)
    """The parameters (by id) that something else than their own layer used."""
    dims: dict[str, int] = field(default_factory=dict)
    """The number of dimensions of each layer's output."""
    packed: set[str] = field(default_factory=set)
    """The layers that were given packed sequences."""
    within: dict[str, set[str]] = field(default_factory=dict)
    """The layers inside of which a layer was called, each time."""


def look(model: nn.Module, inputs: Any, *state: Any) -> Look:
    """Run one forward pass, of which nothing remains, and record how layers and weights are used."""
    found, running = Look(), [model]
    names = {module: name for name, module in model.named_modules()}

    def begin(module: nn.Module, given: tuple[Any, ...]) -> None:
        inside = {names[outer] for outer in running}
        found.within[names[module]] = found.within.get(names[module], inside) & inside
        running.append(module)
        if any(isinstance(x, PackedSequence) for x in given):
            found.packed.add(names[module])

    def end(module: nn.Module, given: Any, output: Any) -> None:
        running.pop()
        if isinstance(output, Tensor):
            found.dims[names[module]] = output.dim()

    hooks = [h for m in model.modules() for h in (m.register_forward_pre_hook(begin), m.register_forward_hook(end))]
    try:
        with undisturbed(model), _Uses(running, found.outside):
            tree.call(model, inputs, *state)
    finally:
        for hook in hooks:
            hook.remove()
    return found


_ASKS = ("size", "dim", "__set__", "is_floating_point", "numel")
_LOOKS = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "requires_grad", "grad", "layout", "ndim", "is_leaf", "is_cuda", "is_sparse",
        "is_nested", "is_meta", "is_quantized", "grad_fn",
    )
)  # fmt: skip
"""The attributes that tell something of a tensor and give nothing of the numbers in it; ``weight.T`` is a use of it."""


class _Uses(TorchFunctionMode):
    """A mode that notes the parameters that are used outside of their own layer."""

    def __init__(self, running: Sequence[nn.Module], outside: set[int]) -> None:
        super().__init__()
        self._running, self._outside = running, outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LOOKS and getattr(func, "__name__", "") not in _ASKS:
            used = {id(p) for p in pytree.tree_leaves((args, kwargs)) if isinstance(p, nn.Parameter)}
            if used:
                self._outside |= used - self._own()
        return func(*args, **(kwargs or {}))

    def _own(self) -> set[int]:
        module = self._running[-1]
        # A layer of torch's uses its children's weights as it likes; it is sliced as one, or not at all.
        recurse = type(module).__module__.startswith("torch.nn.")
        return {id(p) for p in module.parameters(recurse=recurse)}
