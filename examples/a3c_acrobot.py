"""Acrobot-v1 by an actor-critic (Mnih et al. 2016): two links learn to swing up from what they do.

    apportion train examples/a3c_acrobot.py:workload --strategy single_device
    apportion train examples/a3c_acrobot.py:workload --strategy parameter_server --workers 2

It is taken as solved when the mean over 100 episodes, played greedily, is at least -100. By single_device 5 of 5 seeds
got there by the first evaluation, after 25,000 frames and 2.2 to 3.0 seconds of one slow core without the evaluation,
and ended at -79 to -85. By parameter_server with 2 workers a run of one seed scored -82.6 at its first evaluation,
after 55,000 frames, and -82.3 at the end.
"""

import torch
from torch import Tensor, nn

import apportion


class ActorCritic(nn.Module):
    """A policy over the three torques, and the value of where the links are."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
        self.value = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        with torch.no_grad():
            self.policy[-1].weight.mul_(0.1)  # at first each torque is as probable as the others

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), 20.0 * self.value(x)  # values are tens: the last layer need not grow to them


workload = apportion.actor_critic(
    "Acrobot-v1",
    model=ActorCritic,
    optimizer=lambda p: torch.optim.RMSprop(p, lr=0.001, alpha=0.99, eps=1e-5),
    frames=100_000,
    environments=16,
    steps=16,
    gae=0.95,
    entropy=0.0,
    clip_grad_norm=0.5,
    episodes=100,
    evaluate_every=25_000,
)
