"""Pong from its pixels by an actor-critic: the smaller network of Mnih et al. 2016, on the vector of ale-py.

    apportion train examples/a3c_pong.py:workload --strategy parameter_server --workers 2

It was not trained to a score: on two slow cores that would take days. What was measured is that it runs: 50 updates, or
4,000 frames, by single_device in 190 seconds, while other work shared the cores. The settings are those that are usual
for this network, and were not tuned here. A frame is a step of the environment: four of the game's. An evaluation is
four whole games, at the end alone. By parameter_server with 2 workers 800 frames and an evaluation took 33 seconds,
and the score was -21.0, the worst there is: it had learnt nothing yet.
"""

import ale_py
import gymnasium
import torch
from torch import Tensor, nn

import apportion

gymnasium.register_envs(ale_py)


class ActorCritic(nn.Module):
    """A policy over the six buttons and the value of what is seen, by one network up to its last layers.

    Screens (n, 4, 84, 84) of bytes, the last four of them -> logits (n, 6), value (n, 1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Sequential(
            nn.Conv2d(4, 16, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 9 * 9, 256),
            nn.ReLU(),
        )
        self.policy = nn.Linear(256, 6)
        self.value = nn.Linear(256, 1)

    def forward(self, screens: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.seen(screens.to(self.policy.weight.dtype) / 255)
        return self.policy(seen), self.value(seen)


workload = apportion.actor_critic(
    lambda many: gymnasium.make_vec("ALE/Pong-v5", num_envs=many),
    model=ActorCritic,
    optimizer=lambda p: torch.optim.RMSprop(p, lr=0.0007, alpha=0.99, eps=1e-5),
    frames=10_000_000,
    environments=16,
    steps=5,
    entropy=0.01,
    clip_grad_norm=0.5,
    episodes=4,
)
