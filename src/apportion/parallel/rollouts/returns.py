"""What a rollout was worth: generalised advantage estimates over steps that end, are cut short, or do not count.

Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", ICLR 2016. With
``gae=1`` they are the n-step returns of Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", ICML 2016.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """The steps of some environments, each tensor (..., T, K): T steps of K environments."""

    rewards: Tensor
    ended: Tensor
    """True where the environment came to an end of its own: nothing is worth anything after it."""
    cut: Tensor
    """True where the episode was cut short by a limit: what would have come is worth what the network says."""
    counts: Tensor
    """False on steps that only reset an environment: nothing was decided there."""


def advantages(steps: Steps, values: Tensor, after: Tensor, *, gamma: float, gae: float) -> Tensor:
    """The advantage of each step, (..., T, K). ``values`` (..., T, K): of the observations that were acted on;
    ``after``: of those that each step led to, the last ones of an episode where it was cut. No gradient passes."""
    dtype = values.dtype
    deltas = steps.rewards.to(dtype) + gamma * after * ~steps.ended - values
    passed_on = gamma * gae * (~(steps.ended | steps.cut)).to(dtype)
    counts = steps.counts.to(dtype)
    found = torch.empty_like(values)
    if values.device.type == "cpu":  # by numpy, whose small operations cost a fifth of torch's
        _gather_back(deltas.numpy(), passed_on.numpy(), counts.numpy(), found.numpy())
    else:
        _gather_back(deltas, passed_on, counts, found)
    return found


def _gather_back(deltas: Any, passed_on: Any, counts: Any, found: Any) -> None:
    """Give each step, from the last to the first, what the next one has. Tensors or arrays, (..., T, K)."""
    later: Any = 0.0
    for t in range(deltas.shape[-2] - 1, -1, -1):
        later = (deltas[..., t, :] + passed_on[..., t, :] * later) * counts[..., t, :]
        found[..., t, :] = later
