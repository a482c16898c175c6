"""Hooks on the gradients of parameters, run on the gradient of the whole batch.

Autograd would call them with the gradient of the rows that this rank has, or of one micro-batch: the clamp of a sum is
not the sum of the clamps. So their places are taken, and they are called once the gradients have been added up, in the
order in which a backward pass comes to the parameters: from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core.torch_private import gradient_hooks_of

Hooks = tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]], nn.Parameter]
"""The hooks of a parameter that are given the gradient, those that are given the parameter once it has one, and the
parameter itself."""


class GradientHooks:
    """The hooks that some parameters have now."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._hooks = {name: _taken(p) for name, p in named if any(gradient_hooks_of(p))}

    @property
    def names(self) -> list[str]:
        """The names of the parameters that have hooks."""
        return list(self._hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    @torch.no_grad()
    def __call__(self, parameters: Mapping[nn.Parameter, str], *, of_parameters: bool = True) -> None:
        """Call the hooks of these parameters, by their names: their gradients are whole. ``of_parameters``: call those
        hooks, too, that are given the parameter, which ``torch.autograd.grad`` does not call."""
        for p, name in reversed(list(parameters.items())):
            if name in self._hooks and p.grad is not None:
                given, after, owner = self._hooks[name]
                self._call(p, given, after if of_parameters else {}, owner)

    def _call(self, p: nn.Parameter, given: Any, after: Any, owner: nn.Parameter) -> None:
        now, then = gradient_hooks_of(owner)
        for key, hook in given.items():
            if key in now:  # nobody has removed it
                changed = hook(p.grad)
                p.grad = p.grad if changed is None else changed
        for key, hook in after.items():
            if key in then and p.grad is not None:
                hook(p)


def _taken(p: nn.Parameter) -> Hooks:
    given, after = gradient_hooks_of(p)
    found = dict(given), dict(after)
    for hooks in (given, after):
        for key in hooks:
            hooks[key] = _nothing
    return *found, p


def _nothing(_: Tensor) -> None:
    pass
