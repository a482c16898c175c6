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
    alive, going_on = (~steps.ended).to(dtype), (~(steps.ended | steps.cut)).to(dtype)
    found = torch.empty_like(values)
    given: Any = steps.rewards.to(dtype), alive, going_on, steps.counts.to(dtype), values, after, found
    if values.device.type == "cpu":  # by numpy, whose small operations cost a fifth of torch's
        given = tuple(t.numpy() for t in given)
    _gather_back(*given, gamma=gamma, gae=gae)
    return found


def _gather_back(*given: Any, gamma: float, gae: float) -> None:
    """Give each step, from the last to the first, what the next one has. Tensors or arrays, (..., T, K)."""
    rewards, alive, going_on, counts, values, after, found = given
    deltas = rewards + gamma * after * alive - values
    passed_on, later = gamma * gae * going_on, 0.0
    for t in range(deltas.shape[-2] - 1, -1, -1):
        at = (..., t, slice(None))
        later = (deltas[at] + passed_on[at] * later) * counts[at]
        found[at] = later
