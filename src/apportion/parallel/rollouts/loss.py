"""The loss of an actor-critic on rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from apportion.parallel.rollouts.policy import ActionPolicy
from apportion.parallel.rollouts.unrolled import Judged


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


@final
@dataclass(frozen=True)
class ActorCriticLoss:
    """The mean over the steps that count of policy gradient, value error and entropy (Mnih et al. 2016, section 4)."""

    policy: ActionPolicy
    gamma: float = 0.99
    gae: float = 1.0
    value: float = 0.5
    entropy: float = 0.01
    normalise_advantages: bool = False
    """Are the advantages of a batch brought to a mean of 0 and a deviation of 1? Each actor's by themselves."""

    def __call__(self, outputs: Judged, targets: dict[str, Tensor]) -> Tensor:
        """The loss of what ``Unrolled`` says of the rollouts that ``Rollouts`` gives."""
        steps = Steps(*(targets[name] for name in Steps._fields))
        counts = steps.counts.to(outputs.values.dtype)
        gain, worth = self._gains(outputs, steps)
        if self.normalise_advantages:
            gain = _normalised(gain, counts)
        chosen, entropy = self.policy.judge(outputs.policies, targets["actions"])
        error = (worth - outputs.values[:, :-1]).square()
        loss: Tensor = self.value * error - chosen * gain
        if self.entropy:
            loss = loss - self.entropy * entropy
        # A rollout of one step may be one that only resets: its loss is 0, and so is its gradient.
        mean: Tensor = (loss * counts).sum() / counts.sum().clamp_min(1.0)
        return mean

    @torch.no_grad()
    def _gains(self, outputs: Judged, steps: Steps) -> tuple[Tensor, Tensor]:
        """The advantages, and what the values should have been. (A, T, K) each."""
        values = outputs.values.detach()[:, :-1]
        scaled = steps._replace(rewards=steps.rewards / outputs.scale)
        gain = advantages(scaled, values, outputs.after.detach(), gamma=self.gamma, gae=self.gae)
        return gain, gain + values


def _normalised(gain: Tensor, counts: Tensor) -> Tensor:
    total = counts.sum((1, 2), keepdim=True).clamp_min(1.0)
    centred = (gain - (gain * counts).sum((1, 2), keepdim=True) / total) * counts
    return centred / ((centred.square().sum((1, 2), keepdim=True) / total).sqrt() + 1e-8)


def terms(targets: Any) -> float:
    """The number of steps that count."""
    return float(targets["counts"].sum())
