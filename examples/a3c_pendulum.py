"""Pendulum-v1 by an actor-critic with a Gaussian policy: a motor learns to swing a pendulum up and to hold it there.

    apportion train examples/a3c_pendulum.py:workload --strategy single_device
    apportion train examples/a3c_pendulum.py:workload --strategy parameter_server --workers 2

The mean over 100 episodes, played with the mean torque, is asked to be at least -200. By single_device 5 of 5 seeds
were there at the first or second evaluation, after 100,000 to 200,000 frames, 9 to 25 seconds of one slow core without
the evaluations, and ended at -149 to -177. By parameter_server with 2 workers a run of one seed scored -170 after
205,000 frames and -153 at the end, after 65 seconds. With gamma=0.9 and no bonus for entropy 2 of 4 seeds stayed at
about -700; the bonus alone took these two to -180 and -204.
"""

import torch
from torch import Tensor, nn

import apportion


class ActorCritic(nn.Module):
    """A mean torque within the bounds of the motor, the logarithm of one deviation for all states, and the value."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.value = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_deviation = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = 2.0 * self.mean(x).tanh()
        return torch.cat([mean, self.log_deviation.expand_as(mean)], -1), self.value(x)


workload = apportion.actor_critic(
    "Pendulum-v1",
    model=ActorCritic,
    optimizer=lambda p: torch.optim.RMSprop(p, lr=0.001, alpha=0.99, eps=1e-5),
    frames=500_000,
    environments=16,
    steps=8,
    gamma=0.95,
    gae=0.95,
    entropy=0.01,
    normalise_rewards=True,
    clip_grad_norm=0.5,
    episodes=100,
    evaluate_every=100_000,
)
