"""TorchRL's A2C with an asynchronous collector, parked. python torchrl_side.py ORDER

ORDER is JSON: `environment`, `environments` of a collector, `steps`, `collectors` (processes that play beside the one
that learns) and `lr`. Each collector has a vector of environments and plays with the weights that it was last sent; the
learner takes a batch of whichever is ready, estimates advantages, makes one update of A2CLoss, and sends the weights.
It learns from as many batches as each line says, and answers as `rollout_side.py` does. A collector blocks once its
next batch is ready, so it does not disturb what runs while the side is parked.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import gymnasium
import torch
from torch import nn

warnings.filterwarnings("ignore")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

from cpu_clock import Stretch  # noqa: E402
from parked import serve, settle  # noqa: E402
from rollout_networks import NETWORKS, rmsprop  # noqa: E402
from sessions import lead_a_session  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torchrl.collectors import MultiAsyncCollector  # noqa: E402
from torchrl.envs import GymWrapper  # noqa: E402
from torchrl.modules import ProbabilisticActor, ValueOperator  # noqa: E402
from torchrl.objectives import A2CLoss  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402

GAMMA, GAE_LAMBDA, VALUE, ENTROPY, CLIP = 0.99, 1.0, 0.5, 0.0, 0.5


def environments(name, many):
    """As one vector of gymnasium's: faster than TorchRL's SerialEnv, which stacks a TensorDict of each."""
    settle()
    ones = [partial(gymnasium.make, name, disable_env_checker=True)] * many
    vector = gymnasium.vector.SyncVectorEnv(ones, autoreset_mode="SameStep")
    return GymWrapper(vector, categorical_action_encoding=True)


def modules(order):
    """(the actor, the critic)"""
    network = NETWORKS[order["environment"]]()
    policy = TensorDictModule(network.policy, in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        policy,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return actor, ValueOperator(network.value, in_keys=["observation"])


def main(order):
    lead_a_session()
    settle()
    answers = os.dup(1)
    os.dup2(2, 1)  # what it logs while it starts is no answer
    order = json.loads(order)
    actor, critic = modules(order)
    frames = order["environments"] * order["steps"]
    collector = MultiAsyncCollector(
        [partial(environments, order["environment"], order["environments"])] * order["collectors"],
        actor,
        frames_per_batch=frames,
        total_frames=-1,
        device="cpu",
        num_threads=1,
    )
    advantage = GAE(gamma=GAMMA, lmbda=GAE_LAMBDA, value_network=critic, average_gae=False)
    loss = A2CLoss(actor, critic, entropy_coeff=ENTROPY, critic_coeff=VALUE, loss_critic_type="l2")
    optimizer, taken = rmsprop(loss.parameters(), order["lr"]), iter(collector)

    def update():
        batch = next(taken)
        with torch.no_grad():
            batch = advantage(batch)
        found = loss(batch.reshape(-1))
        optimizer.zero_grad()
        sum(value for name, value in found.items() if name.startswith("loss_")).backward()
        nn.utils.clip_grad_norm_(loss.parameters(), CLIP)
        optimizer.step()
        collector.update_policy_weights_()
        return batch.numel()

    def run(batches):
        stretch = Stretch()
        return stretch.said(sum(update() for _ in range(batches)))

    os.dup2(answers, 1)
    serve(run)
    collector.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
