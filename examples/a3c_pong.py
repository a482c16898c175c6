"""Pong from its pixels by an actor-critic: a small network of convolutions, on the vector of ale-py.

    apportion train examples/a3c_pong.py:workload --strategy parameter_server --workers 2

A frame is a step of the environment, four of the game's. Trained once, with seed 0, on two slow cores, of which each
worker had one and the process that evaluates a share: 2,650 frames a second. The ten games of an evaluation, in which
the network does what it thinks best, had a mean score of -21.0 after 1.0 million frames, -18.5 after 2.0, -15.8 after
3.0, -6.7 after 4.0, 20.5 after 5.0, and 21.0 after 6.0, of at most 21. The 5.0 million took 32 minutes and the 6.0
million 38, with the evaluations; it was stopped then. In ten games with other seeds the network that was kept had 20.9,
and 14.1 where the environment holds a button for a step by chance (`repeat_action_probability` of 0.25, gymnasium's
default), which it had never met.

Stable-Baselines3's A2C beside it, with the settings of its zoo (16 games in its process, 84 pixels a side) and two
threads for torch, its fastest of four ways here, made 600 frames a second on the same two cores. After 32 minutes, in
which ours had come to 20.5, it had made 1.2 million frames. After 54 minutes and 2.0 million its ten games had a mean
score of -21.0; it was stopped after 64 minutes, twice our time, and 2.4 million.

On one of those cores the environment takes 330 us a frame, acting 70 and learning 120. The network of Mnih et al. 2016
on the usual 84 pixels a side took 160 and 420 for the latter two.
"""

import math

import ale_py
import gymnasium
import torch
from torch import Tensor, nn

import apportion

SCREEN = 42
"""Pixels a side: half of what is usual, so a screen has a quarter of the pixels, and the ball is still seen."""

HIDDEN, POLICY, VALUE = math.sqrt(2), 0.01, 1.0
"""The gains of the orthogonal matrices that hidden layers, the policy's last layer and the value's begin with."""


def orthogonal(layer: nn.Conv2d | nn.Linear, gain: float) -> nn.Module:
    """The same layer, as it begins."""
    nn.init.orthogonal_(layer.weight, gain=gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """A policy over the six buttons and the value of what is seen, by one network up to its last layers.

    Screens (n, 4, 42, 42) of bytes, the last four of them -> logits (n, 6), value (n, 1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Sequential(
            orthogonal(nn.Conv2d(4, 16, 5, stride=3), HIDDEN),
            nn.ReLU(),
            orthogonal(nn.Conv2d(16, 32, 3, stride=2), HIDDEN),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(32 * 6 * 6, 256), HIDDEN),
            nn.ReLU(),
        )
        self.policy = orthogonal(nn.Linear(256, 6), POLICY)
        self.value = orthogonal(nn.Linear(256, 1), VALUE)

    def forward(self, screens: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.seen(screens.to(self.policy.weight.dtype) / 255)
        return self.policy(seen), self.value(seen)


def games(many: int) -> gymnasium.vector.VectorEnv:
    """So many games in one vector, played by the thread of their worker; a button is not held by chance."""
    gymnasium.register_envs(ale_py)
    return gymnasium.make_vec(
        "ALE/Pong-v5",
        num_envs=many,
        num_threads=1,
        repeat_action_probability=0.0,
        img_height=SCREEN,
        img_width=SCREEN,
    )


workload = apportion.actor_critic(
    games,
    model=ActorCritic,
    optimizer=lambda p: torch.optim.RMSprop(p, lr=0.0007, alpha=0.99, eps=1e-5),
    frames=10_000_000,
    environments=8,
    steps=10,
    gae=0.95,
    entropy=0.01,
    clip_grad_norm=0.5,
    episodes=10,
    evaluate_every=500_000,
)
