"""The spikes of a layer over all steps, as a function that has a gradient.

A neuron adds v to what flows in and fires where v has reached the threshold. Forwards the rule is that of the
simulator. Backwards the step function has the slope a / threshold, where a is a triangle around the threshold as wide
as the threshold on each side (Esser et al., 2016), and time runs from the last step to the first (Neftci et al.,
2019)::

    x[t] = (1 - a[t]) x[t + 1] + a[t] g[t]        x: the gradient of what flows in; g: that of threshold * spikes

So what flows in too late to fire has no gradient, and what has flowed in for long has that of the activation which the
neurons stand for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apportion.exporting.spiking.graph import Neurons
from apportion.exporting.spiking.membranes import Membranes


def spike_train(neurons: Neurons, moving: Tensor | None, each: Tensor, steps: int) -> Tensor:
    """threshold * spikes, (steps * examples, *shape), the first step first; differentiable by all three tensors.

    ``neurons``: their threshold has one number for each channel; ``moving``: what spikes cause in each step,
    (steps * examples, *shape), None where there are no spikes before; ``each``: what flows in every step besides,
    (examples, *shape).
    """
    scale = neurons.threshold.reshape(-1, *[1] * (each.ndim - 2))
    train: Tensor = _SpikeTrain.apply(neurons, moving, each, scale, steps)
    return train


class _SpikeTrain(torch.autograd.Function):
    """The function that ``spike_train`` applies."""

    @staticmethod
    def forward(ctx: Any, neurons: Neurons, moving: Tensor | None, each: Tensor, scale: Tensor, steps: int) -> Tensor:
        """Run all steps, and keep the membranes as they were before the neurons fired."""
        layout = torch.channels_last if each.ndim == 4 else torch.contiguous_format
        train = torch.empty((steps * len(each), *each.shape[1:]), dtype=each.dtype, memory_format=layout)
        before = torch.empty_like(train)
        state = Membranes.at_rest(neurons, train[: len(each)])
        flows = [None] * steps if moving is None else moving.split(len(each))
        for flow, reached, out in zip(flows, before.split(len(each)), train.split(len(each)), strict=True):
            state.v += each
            if flow is not None:
                state.v += flow
            reached.copy_(state.v)
            torch.mul(state.step(None), scale, out=out)
        ctx.save_for_backward(before, train, scale)
        ctx.reset, ctx.steps, ctx.moves = neurons.reset, steps, moving is not None
        return train

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Run the steps backwards."""
        before, train, scale = ctx.saved_tensors
        count = len(before) // ctx.steps
        gradient = torch.empty_like(before)
        later = torch.zeros_like(before[:count])
        of_each, of_scale = torch.zeros_like(later), torch.zeros_like(later)
        parts = zip(*(x.split(count) for x in (before, train, grads[0], gradient)), strict=True)
        for v, spikes, g, flow in reversed(list(parts)):
            share = v / scale
            slope = _slope(share, ctx.reset)
            if ctx.reset == "zero":  # where it begins anew does not depend on how much there was
                pull = g
                torch.mul(later, spikes == 0, out=flow)
            else:
                pull = g - later
                flow.copy_(later)
            flow.addcmul_(slope, pull)
            # The threshold moves what it lets out, and where it is: d(scale * spikes) / d(scale).
            of_scale += pull * (spikes / scale - slope * share)
            if ctx.reset == "subtract_clipped_multi":
                flow *= share > -1
            later = flow
            of_each += flow
        others = [d for d in range(of_scale.ndim) if d != 1]
        total = of_scale.sum(others).reshape(scale.shape)
        return None, gradient if ctx.moves else None, of_each, total, None


def _slope(share: Tensor, reset: str) -> Tensor:
    """a of membranes in units of the threshold."""
    if reset == "subtract_clipped_multi":  # the number of spikes has no largest value
        return share.clamp(0, 1)
    return (1 - (share - 1).abs_()).clamp_(min=0)
