"""What a rollout was worth: generalised advantage estimates over steps that end, are cut short, or do not count.

Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", ICLR 2016. With
``gae=1`` they are the n-step returns of Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", ICML 2016.
"""

from __future__ import annotations

from typing import NamedTuple

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
    ``after``: of those that each step led to, the last ones of an episode where it was cut."""
    found = torch.empty_like(values)
    later = torch.zeros_like(values[..., 0, :])
    going_on = (~(steps.ended | steps.cut)).to(values.dtype)
    deltas = steps.rewards + gamma * after * ~steps.ended - values
    for t in range(values.shape[-2] - 1, -1, -1):
        at = (..., t, slice(None))
        later = deltas[at] + gamma * gae * going_on[at] * later
        later = later * steps.counts[at]
        found[at] = later
    return found
