"""A3C as it is usually written after Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", ICML 2016.
python a3c_per_step.py ORDER

ORDER is JSON: `environment`, `workers`, `steps` (t_max) and `lr`. Each worker is a process with one environment. It
copies the shared network, plays up to t_max steps, one forward of one observation each, keeps what the gradient needs,
goes back over the steps for the returns, and writes to the shared weights and to shared statistics of RMSprop without a
lock. An episode's end ends the rollout, as in the paper's algorithm S3.

Every worker makes as many rollouts as each line says; the answer is as `rollout_side.py`'s.
"""

import json
import sys
from pathlib import Path

import gymnasium
import torch
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

from cpu_clock import Stretch
from parked import serve, settle
from rollout_networks import NETWORKS, rmsprop
from sessions import lead_a_session

GAMMA, VALUE, ENTROPY, CLIP = 0.99, 0.5, 0.0, 0.5


def opened(name):
    """One environment; Pong with the paper's preprocessing."""
    if name != "pong":
        return gymnasium.make(name, disable_env_checker=True)
    import ale_py

    gymnasium.register_envs(ale_py)
    made = gymnasium.make("PongNoFrameskip-v4", disable_env_checker=True)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(made), 4)


def shared_rmsprop(network, lr):
    """RMSprop whose statistics are there from the start, in memory that processes share."""
    optimizer = rmsprop(network.parameters(), lr)
    for parameter in network.parameters():
        state = optimizer.state[parameter]
        state["step"] = torch.zeros(()).share_memory_()
        state["square_avg"] = torch.zeros_like(parameter).share_memory_()
    return optimizer


class Worker:
    """One actor-learner."""

    def __init__(self, order, shared, optimizer, seed):
        torch.manual_seed(seed)
        self._environment, self._steps = opened(order["environment"]), order["steps"]
        self._shared, self._optimizer, self._own = shared, optimizer, NETWORKS[order["environment"]]()
        self._seen = torch.from_numpy(self._environment.reset(seed=seed)[0])

    def rollout(self):
        """Play up to t_max steps and update; returns the number of steps."""
        self._own.load_state_dict(self._shared.state_dict())
        values, logs, entropies, rewards = [], [], [], []
        over = False
        while len(rewards) < self._steps and not over:
            numbers, value = self._own(self._seen[None])
            log = numbers.log_softmax(-1)
            action = log.detach().exp().multinomial(1)
            seen, reward, ended, cut, _ = self._environment.step(action.item())
            values.append(value[0, 0])
            logs.append(log.gather(1, action)[0, 0])
            entropies.append(-(log.exp() * log).sum())
            rewards.append(float(reward))
            self._seen, over = torch.from_numpy(seen), ended or cut
        with torch.no_grad():
            after = 0.0 if ended else self._own(self._seen[None])[1].item()
        if over:
            self._seen = torch.from_numpy(self._environment.reset()[0])
        self._update(values, logs, entropies, rewards, after)
        return len(rewards)

    def _update(self, values, logs, entropies, rewards, after):
        loss = 0.0
        for value, log, entropy, reward in zip(*map(reversed, (values, logs, entropies, rewards)), strict=True):
            after = reward + GAMMA * after
            gain = after - value
            loss = loss + VALUE * gain.square() - log * gain.detach() - ENTROPY * entropy
        self._own.zero_grad()
        (loss / len(rewards)).backward()
        torch.nn.utils.clip_grad_norm_(self._own.parameters(), CLIP)
        for own, shared in zip(self._own.parameters(), self._shared.parameters(), strict=True):
            shared.grad = own.grad
        self._optimizer.step()


def work(order, shared, optimizer, seed, pipe):
    """Of a process: so many rollouts whenever it is told to."""
    settle()
    worker = Worker(order, shared, optimizer, seed)
    pipe.send(0)
    while True:
        pipe.send(sum(worker.rollout() for _ in range(pipe.recv())))


def main(order):
    lead_a_session()
    settle()
    order = json.loads(order)
    shared = NETWORKS[order["environment"]]().share_memory()
    optimizer, context = shared_rmsprop(shared, order["lr"]), multiprocessing.get_context("fork")
    pipes = []
    for number in range(order["workers"]):
        pipe, end = context.Pipe()
        context.Process(target=work, args=(order, shared, optimizer, number, end), daemon=True).start()
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()

    def run(rollouts):
        stretch = Stretch()
        for pipe in pipes:
            pipe.send(rollouts)
        return stretch.said(sum(pipe.recv() for pipe in pipes))

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
