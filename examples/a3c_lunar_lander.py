"""LunarLander-v3 by an actor-critic: a lander learns to come down between two flags from what it does itself.

    apportion train examples/a3c_lunar_lander.py:workload --strategy single_device

It is solved when the mean over 100 episodes, played greedily, is at least 200. Looked at every 16,384 frames, seeds 0
to 4 got there by single_device after 541,000 to 2,605,000 frames and 24 to 116 seconds of training, 90 in the median;
PPO of Stable-Baselines3 with the settings of its zoo took 71 to 131 seconds in turns with them, 94 in the median, and
393,000 to 639,000 frames (benchmarks/rows/reinforcement.py --only lunar). Scores rise and fall on their way.

What matters, of about 25 settings that were tried, most of them with one or two seeds: rollouts of 128 steps (with 5 to
64 most runs fell back, to hovering until the time is over or to crashes), of few environments, so that there are many
updates (32 environments with a learning rate of 0.005 got 2 of 5 seeds there), and orthogonal matrices to begin with.
By a parameter server it was not measured.
"""

import torch
from torch import Tensor, nn

import apportion


class ActorCritic(nn.Module):
    """A policy over the engines, and the value of where the lander is."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        self.value = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        for layers, last in (
            (self.policy, 0.01),
            (self.value, 1.0),
        ):  # at first each engine is as probable as the others
            for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, last), strict=True):
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x)


workload = apportion.actor_critic(
    "LunarLander-v3",
    model=ActorCritic,
    optimizer=lambda p: torch.optim.Adam(p, lr=0.002, eps=1e-5),
    frames=3_000_000,
    environments=8,
    steps=128,
    gamma=0.997,
    gae=0.98,
    entropy=0.0,
    normalise_rewards=True,
    normalise_advantages=True,
    clip_grad_norm=0.5,
    episodes=100,
    evaluate_every=100_000,
)
