"""The loss of an actor-critic on rollouts, and the network that is called on whole rollouts at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.parallel.rollouts.policy import ActionPolicy
from apportion.parallel.rollouts.returns import Steps, advantages


@final
class Unrolled(nn.Module):
    """An actor-critic called on the observations of whole rollouts.

    ``network(observations (n, ...)) -> (policy (n, numbers), value (n,) or (n, 1))``. Called with observations (A, T +
    1, K, ...), the last of which was not acted on, and with those with which episodes were cut short, (A, F, ...), it
    gives the policies (A, T, K, numbers), and the values of both. Called with anything else it is the network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observations: Tensor, last: Tensor | None = None) -> Any:
        if last is None:
            return self.network(observations)
        many, steps, width = observations.shape[:3]
        flat, cut = observations.flatten(0, 2), last.flatten(0, 1)
        policy, value = self.network(torch.cat([flat, cut]) if len(cut) else flat)
        value = value.flatten()
        policies = policy[: len(flat)].unflatten(0, (many, steps, width))[:, :-1]
        values = value[: len(flat)].unflatten(0, (many, steps, width))
        return policies, values, value[len(flat) :].unflatten(0, (many, last.shape[1]))


@final
@dataclass(frozen=True)
class ActorCriticLoss:
    """The mean over the steps that count of policy gradient, value error and entropy (Mnih et al. 2016, section 4)."""

    policy: ActionPolicy
    gamma: float = 0.99
    gae: float = 1.0
    value: float = 0.5
    entropy: float = 0.01

    def __call__(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """outputs: what ``Unrolled`` gives; targets: what ``Rollouts`` gives."""
        numbers, values, last = outputs
        steps = Steps(*(targets[name] for name in Steps._fields))
        with torch.no_grad():
            found = values.detach()
            after = found[:, 1:]
            if last.shape[1]:
                at = targets["last_at"]
                there = last.detach().gather(1, at.clamp_min(0).flatten(1)).view_as(at)
                after = torch.where(at >= 0, there, after)
            gain = advantages(steps, found[:, :-1], after, gamma=self.gamma, gae=self.gae)
            worth = gain + found[:, :-1]
        counts = steps.counts.to(values.dtype)
        chosen = -self.policy.log_probability(numbers, targets["actions"]) * gain
        error = (worth - values[:, :-1]).square()
        loss: Tensor = chosen + self.value * error - self.entropy * self.policy.entropy(numbers)
        mean: Tensor = (loss * counts).sum() / counts.sum()
        return mean


def terms(targets: dict[str, Tensor]) -> float:
    """The number of steps that count."""
    return float(targets["counts"].sum())
