"""Sample Factory's asynchronous PPO, parked. python sample_factory_side.py ORDER

ORDER is JSON: `environment`, `environments` of a worker, `steps`, `workers`, and `serial`, which has everything in one
process. Else there are a learner, a process for inference and the workers, each with one thread; a worker plays one
half of its environments while the other half waits for actions. One epoch a batch, the same network, no normalisation.

It trains on as many batches of environments times steps as each line says, and answers as `rollout_side.py` does. While
it is parked its processes are stopped by a signal, since they would play on.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from cpu_clock import Stretch, descendants
from parked import settle
from sessions import lead_a_session

NEVER = 10**6
"""Seconds between two signs of life that it asks of its processes: they are parked in between."""


def make(name, config=None, env_config=None, render_mode=None):
    return gymnasium.make(name, disable_env_checker=True)


def arguments(order, folder):
    """(its command line, the frames of a batch)"""
    batch = order["environments"] * order["steps"]
    found = {
        "algo": "APPO",
        "env": order["environment"],
        "train_dir": folder,
        "device": "cpu",
        "serial_mode": order["serial"],
        "async_rl": not order["serial"],
        "num_workers": order["workers"],
        "num_envs_per_worker": order["environments"],
        "worker_num_splits": 1 if order["serial"] else 2,
        "rollout": order["steps"],
        "batch_size": batch,
        "num_batches_per_epoch": 1,
        "num_epochs": 1,
        "encoder_mlp_layers": [64, 64],
        "nonlinearity": "tanh",
        "actor_critic_share_weights": False,
        "use_rnn": False,
        "normalize_input": False,
        "normalize_returns": False,
        "train_for_env_steps": 10**12,
        "save_every_sec": NEVER,
        "heartbeat_interval": NEVER,
        "heartbeat_reporting_interval": NEVER,
        "set_workers_cpu_affinity": False,
        "log_to_file": False,
    }
    given = []
    for name, value in found.items():
        given += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return given, batch


class Parked(AlgoObserver):
    """Counts what has been trained on; stops it all where that is what the line said, and waits for the next line."""

    def __init__(self, batch, answers):
        self._batch, self._answers, self._stretch, self._target = batch, answers, None, 0

    def on_training_step(self, runner, training_iteration_since_resume):
        frames = runner.env_steps.get(0, 0)
        if self._stretch is not None and frames < self._target:
            return
        said = "ready" if self._stretch is None else self._stretch.said(frames - self._began)
        signal_all(signal.SIGSTOP)
        print(said, file=self._answers, flush=True)
        line = sys.stdin.readline()
        signal_all(signal.SIGCONT)
        if not line:
            signal_all(signal.SIGKILL)
            os._exit(0)
        self._began, self._target = frames, frames + int(line) * self._batch
        self._stretch = Stretch()


def signal_all(number):
    for pid in descendants(os.getpid()):
        os.kill(pid, number)


def main(order):
    lead_a_session()
    settle()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no answer
    order = json.loads(order)
    register_env(order["environment"], make)
    with tempfile.TemporaryDirectory(prefix="sample-factory-", ignore_cleanup_errors=True) as folder:
        given, batch = arguments(order, folder)
        config = parse_full_cfg(parse_sf_args(given)[0], given)
        _, runner = make_runner(config)
        runner.register_observer(Parked(batch, answers))
        runner.init()
        runner.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
