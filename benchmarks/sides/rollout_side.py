"""Our side of `reinforcement.py`: one rank of an actor-critic, parked. python rollout_side.py ORDER

ORDER is JSON: the environment, the strategy, and what `workload` takes. The rank makes as many steps as each line says,
and answers with the frames that it has played in them, the seconds and the seconds of processor time; with `judge`,
also with the greedy score of the network then, for which the clocks stand still.
"""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

from cpu_clock import Stretch
from endless import STEPS
from judge import judged
from parked import serve, settle
from rollout_networks import NETWORKS

import apportion
from apportion import World, batches
from apportion.core.address import load_workload
from apportion.core.value import parse
from apportion.process import keep_what_is_freed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def pong(environments):
    """Pong by ale-py's own vector of environments, with the preprocessing of Mnih et al. 2015 inside."""
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", num_envs=environments, num_threads=1)


def workload(environment, *, environments, frames=None, lr, optimizer="RMSprop", clip=0.5, **settings):
    """The actor-critic of an order. frames=None: without end."""
    rule = {"foreach": True, "alpha": 0.99, "eps": 1e-5} if optimizer == "RMSprop" else {"eps": 1e-5}
    made = apportion.actor_critic(
        pong if environment == "pong" else environment,
        model=NETWORKS[environment],
        optimizer=lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=lr, **rule),
        frames=STEPS * environments * settings["steps"] if frames is None else frames,
        environments=environments,
        clip_grad_norm=clip,
        **settings,
    )
    return replace(made, evaluation=None)


def preset(example, seed):
    """The actor-critic of one of the examples, as it is, without its evaluation."""
    made = load_workload(f"{EXAMPLES / example}.py:workload")
    return replace(made, evaluation=None, seed=seed)


def main(order):
    settle()
    keep_what_is_freed()  # as its workers do
    order = json.loads(order)
    strategy, judge = order.pop("strategy"), order.pop("judge", False)
    environment = order["environment"]
    example = order.get("example")
    given = workload(**order) if example is None else preset(example, order.get("seed", 0))
    world = World.from_env(device="cpu")
    step = parse(strategy, "apportion.strategies").build(given, world)
    taken, network = batches(step), NETWORKS[environment]() if example is None else given.model().network

    def run(calls):
        stretch, frames = Stretch(), 0.0
        for batch in itertools.islice(taken, calls):
            step(batch)
            frames += given.count(batch.targets)
        said = stretch.said(frames)
        return f"{said} {score()}" if judge else said

    def score():
        """By rank 0; the others are asked for their part of the state."""
        state = step.state_dict().model
        if world.rank:
            return 0.0
        # Without the statistics of returns, which are no part of the network and which acting has no use for.
        weights = {name: value for name, value in state.items() if name.startswith("network.")}
        network.load_state_dict({name.removeprefix("network."): value for name, value in weights.items()})
        with torch.inference_mode():
            return judged(environment, lambda seen: network(torch.from_numpy(seen))[0].argmax(-1).numpy())

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
