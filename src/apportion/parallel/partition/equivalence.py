"""A comparison of a network in parts with the plain one, before any training.

A graph that was traced leaves out what the trace could not see: a hook, a branch, a change in place that nothing reads,
a weight that is used outside of its layer. Most such mistakes do not crash. So one batch goes through both, evaluated,
with every parameter multiplied by one number: a weight that was copied on the way, and is never updated, shows then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from apportion.comm.group import Group, collective
from apportion.core import torch_private, tree
from apportion.core.data.batch import rows_of
from apportion.core.modes import evaluating
from apportion.parallel.tracing.network import undisturbed

FACTOR = 1.0625
"""The factor that parameters are multiplied by for the comparison."""
BOUND = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}
"""The largest difference that counts as rounding, relative to the largest output, by precision."""


def outputs_of(model: nn.Module, call: Callable[[], Any]) -> list[Tensor] | None:
    """Return what the plain model gives in evaluation mode; None where it draws random numbers, and gives something
    else each time, or where it cannot be called: the strategy that cuts it reports more about that."""
    try:
        with evaluating(model.modules()), undisturbed(model), _multiplied(model):
            first, second = (_cloned(call()) for _ in range(2))
    except Exception:
        return None
    return first if difference(first, second) == 0.0 else None


@collective
def refuse_others(
    model: nn.Module, call: Callable[[], Any], expected: Sequence[Tensor] | None, precision: str, group: Group
) -> None:
    """Raise ValueError, on every rank, where the parts give other outputs than ``expected``: ``call`` gives their
    outputs on those ranks that have them. Called by all ranks."""
    if expected is None:
        return
    with undisturbed(model), _multiplied(model):
        found = call()
    worst = torch.zeros(1, dtype=torch.float64, device=expected[0].device if expected else None)
    if found is not None:
        worst[0] = difference(tree.tensors(found), expected)
    group.all_reduce(worst).wait()
    if not worst.item() <= BOUND[precision] * group.size:
        raise ValueError(
            f"the network in parts gives other outputs than the whole one (by {worst.item():.2g} of the largest): "
            "something in its forward is not seen when it is traced, as a hook, a branch, or a change in place; "
            "use data_parallel"
        )


@contextmanager
def _multiplied(model: nn.Module) -> Iterator[None]:
    parameters = list(model.parameters())
    with torch.no_grad():
        before = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.mul_(FACTOR)
        try:
            yield
        finally:
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)


def _cloned(outputs: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tree.tensors(outputs)]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest number that is expected; infinite where the shapes
    differ."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.numel():
            a, b = a.detach().double(), b.to(a.device).double()
            apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max()
            scale = b.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-30)
            worst = max(worst, float((apart / scale).nan_to_num(float("inf"))))
    return worst


def copied(values: Any) -> Any:
    """Copy the tensors of a tree."""
    return tree.map_tensors(Tensor.clone, values)


def same_outputs(found: Any, expected: Any) -> bool:
    """Return whether stages one after the other have given what the network gives whole, up to rounding."""
    ours, theirs = tree.tensors(found), tree.tensors(expected)
    return len(ours) == len(theirs) and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in zip(ours, theirs, strict=True)
    )


# A record of what a forward pass asks of autograd while it runs, which a network in parts cannot always give: it is
# made once, when the parts are made.

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
