"""The judge of both sides of `reinforcement.py`: the mean score of 100 episodes in which a policy does what it thinks
best. The same episodes for whoever is judged, and as gymnasium gives them: nothing is scaled or clipped."""

from functools import cache

import gymnasium
import numpy as np

EPISODES, SEED = 100, 10_000


@cache
def opened(name):
    return [gymnasium.make(name, disable_env_checker=True) for _ in range(EPISODES)]


def judged(name, act):
    """The mean score. act: observations (n, ...) -> actions (n,)."""
    environments = opened(name)
    seen = np.stack([one.reset(seed=SEED + at)[0] for at, one in enumerate(environments)])
    scores, going = np.zeros(EPISODES), np.arange(EPISODES)
    while len(going):
        actions, over = act(seen[going]), np.zeros(len(going), dtype=bool)
        for at, number in enumerate(going):
            seen[number], reward, ended, cut, _ = environments[number].step(int(actions[at]))
            scores[number] += reward
            over[at] = ended or cut
        going = going[~over]
    return scores.mean()
