"""A record of what a forward pass asks of autograd while it runs, which a network in parts cannot always give: it is
made once, when the parts are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apportion.core import torch_private, tree
from apportion.core.data.rows import rows_of
from apportion.parallel.tracing.network import undisturbed

_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_FLAG: Any = Tensor.requires_grad
_FREEZING = (Tensor.requires_grad_, _FLAG.__set__)


class AutogradUse(TorchFunctionMode):
    """A mode that records what a forward pass has asked of autograd so far."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = False
        """Tells whether the forward pass has asked for a gradient."""
        self.of_gradients = False
        """Tells whether the forward pass has asked for a gradient that is itself differentiated."""
        self.freezes = False
        """Tells whether a weight has been frozen or unfrozen in a part of the forward pass."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _BACKWARD:
            self.gradients = True
            self.of_gradients |= bool((kwargs or {}).get("create_graph")) or torch_private.in_a_transform()
        elif func in _FREEZING and isinstance(args[0], nn.Parameter):
            self.freezes = True
        return func(*args, **(kwargs or {}))


def asked(model: nn.Module, inputs: Any) -> AutogradUse:
    """Return what a forward pass of the first rows asks of autograd; it leaves no trace. A model that cannot be called
    in this way asks for nothing here: the strategy that cuts it reports more about that."""
    seen = AutogradUse()
    flags = [(p, p.requires_grad) for p in model.parameters()]
    with suppress(Exception), undisturbed(model), torch.enable_grad(), seen:
        tree.call(model, rows_of(inputs, slice(0, 2)))
    for p, flag in flags:
        p.requires_grad_(flag)
    return seen


def refuse_gradients_of_gradients(seen: AutogradUse, model: nn.Module) -> None:
    """Raise ValueError where the forward pass differentiates a gradient: messages between ranks have no second
    derivative."""
    if seen.of_gradients:
        raise ValueError(
            f"the forward of {type(model).__name__} differentiates a gradient (create_graph=True, or torch.func), and "
            "what the ranks of a network in parts send each other can be differentiated once: use data_parallel"
        )


def refuse_untraceable(seen: AutogradUse, model: nn.Module) -> None:
    """Raise ValueError where the forward pass does to gradients what no stage of it could do."""
    what = "asks for a gradient (torch.autograd.grad)" if seen.gradients else "freezes a weight for a part of itself"
    if seen.gradients or seen.freezes:
        raise ValueError(
            f"the forward of {type(model).__name__} {what}, which would need all stages at once; so it cannot be cut "
            "into stages: use data_parallel"
        )
