"""Stable-Baselines3's A2C or PPO, parked. python sb3_side.py ORDER

ORDER is JSON: `algorithm`, `environment`, `environments`, `vector` (dummy or subproc), `normalize` for VecNormalize,
`settings` for the algorithm, where "lin_0.001" is a value that falls to 0 over the run as the zoo writes it, and
`frames` of the run. It makes as many rollouts with their updates as each line says, and answers as `rollout_side.py`
does.

Rollouts are driven by what the algorithm's own `learn` calls, in its order, so that the side can be parked between two
of them; there is no logging, no monitor of episodes and no checker of environments, which makes it faster. Pong has the
usual wrappers: AtariWrapper and a stack of four frames.
"""

import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from cpu_clock import Stretch
from judge import judged
from parked import serve, settle
from sessions import lead_a_session

ENDLESS = 10**12


def one_environment(name):
    """How one of them is made."""

    def make():
        if name != "pong":
            return gymnasium.make(name, disable_env_checker=True)
        import ale_py
        from stable_baselines3.common.atari_wrappers import AtariWrapper

        gymnasium.register_envs(ale_py)
        return AtariWrapper(gymnasium.make("PongNoFrameskip-v4", disable_env_checker=True))

    return make


def vector_of(order):
    """All of them."""
    ones = [one_environment(order["environment"])] * order["environments"]
    # Forked: else each of the processes imports torch for itself before it begins.
    vector = DummyVecEnv(ones) if order["vector"] == "dummy" else SubprocVecEnv(ones, start_method="fork")
    if order["environment"] == "pong":
        vector = VecFrameStack(vector, 4)
    return VecNormalize(vector, gamma=order["settings"].get("gamma", 0.99)) if order.get("normalize") else vector


def setting(value):
    """As the algorithm takes it."""
    if isinstance(value, str) and value.startswith("lin_"):
        return lambda left: left * float(value.removeprefix("lin_"))
    return value


def main(order):
    lead_a_session()
    settle()
    order = json.loads(order)
    settings = {name: setting(value) for name, value in order["settings"].items()}
    policy = "CnnPolicy" if order["environment"] == "pong" else "MlpPolicy"
    vector = vector_of(order)
    model = {"A2C": A2C, "PPO": PPO}[order["algorithm"]](
        policy, vector, seed=order.get("seed", 0), device="cpu", **settings
    )
    total, callback = model._setup_learn(order.get("frames", ENDLESS), None)
    callback.on_training_start({}, {})

    def run(rollouts):
        stretch, before = Stretch(), model.num_timesteps
        for _ in range(rollouts):
            if model.num_timesteps >= total:
                break
            model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=model.n_steps)
            model._update_current_progress_remaining(model.num_timesteps, total)
            model.train()
        said = stretch.said(model.num_timesteps - before)
        return f"{said} {score()}" if order.get("judge") else said

    def score():
        # As the network sees them in training.
        see = vector.normalize_obs if order.get("normalize") else np.asarray
        return judged(order["environment"], lambda seen: model.predict(see(seen), deterministic=True)[0])

    serve(run)
    vector.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
