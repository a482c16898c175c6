"""CartPole-v1 by an actor-critic (Mnih et al. 2016): two small networks learn to balance a pole from what they do.

    apportion train examples/a3c_cartpole.py:workload --strategy single_device
    apportion train examples/a3c_cartpole.py:workload --strategy parameter_server --workers 2

It is solved when the mean over 100 episodes, played greedily, is at least 475. By single_device 6 of 6 seeds got there
after 10,000 to 30,000 frames, 0.7 to 1.9 seconds of one slow core without the evaluations, and all of them scored
500.0, the most there is, at the end. By parameter_server with 2 workers the updates have the order of the machine, and
a policy that has solved the game may be lost again: of 54 runs of seed 0, 52 ended at 440 or more, and the two others,
which had scored 491 and more on the way, ended at 117 and 382. What such a run gives is its checkpoint `best`, which
`apportion.load` takes. A whole run, with its evaluations, took 11 to 15 seconds on two busy cores.
"""

import torch
from torch import Tensor, nn

import apportion


class ActorCritic(nn.Module):
    """A policy over the two pushes, and the value of where the cart and the pole are."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        with torch.no_grad():
            self.policy[-1].weight.mul_(0.1)  # at first either push is as probable as the other

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), 20.0 * self.value(x)  # values are tens: the last layer need not grow to them


workload = apportion.actor_critic(
    "CartPole-v1",
    model=ActorCritic,
    optimizer=lambda p: torch.optim.RMSprop(p, lr=0.003, alpha=0.99, eps=1e-5),
    frames=60_000,
    environments=8,
    steps=16,
    gae=0.95,
    entropy=0.0,
    clip_grad_norm=0.5,
    episodes=100,
    evaluate_every=10_000,
)
