"""Functions that a workload has called around an optimizer's steps, which look over the weights that it has."""

from __future__ import annotations

from torch.optim import Optimizer

from apportion.core.torch_private import step_hooks_of

OURS = "of_apportion"
"""The attribute of hooks that this package has registered itself."""


def refuse_step_hooks(optimizer: Optimizer, why: str) -> None:
    """Raise ValueError where an optimizer has step hooks, or all optimizers have. ``why``: what a hook would see."""
    for hook in step_hooks_of(optimizer):
        if not getattr(hook, OURS, False):
            name = getattr(hook, "__qualname__", type(hook).__name__).rpartition("<locals>.")[2]
            raise ValueError(
                f"{type(optimizer).__name__} has the step hook {name}, and {why}: use clip_grad_norm= for clipping, "
                "do it in the loss or the forward, or use data_parallel, map_reduce or single_device, whose hooks see "
                "the whole"
            )
