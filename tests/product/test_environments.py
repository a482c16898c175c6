"""Reinforcement learning in environments of every kind of space: actions are those of the space, the network is given
what the environment gave, and what cannot be trained, or breaks gymnasium's contract, is refused by name."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

import apportion

F32 = np.float32
NUMBER = spaces.Box(-1, 1, (1,), F32)


class Drawn(gymnasium.Env[Any, Any]):
    """An environment that draws its observations from its space, and raises for an action that is not in its space. An
    episode has five steps."""

    def __init__(self, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = copy.deepcopy(observations), actions  # each draws by itself

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise RuntimeError(f"{action!r} is not in {self.action_space}")
        self.steps += 1
        return self.observation_space.sample(), float(self.steps), False, self.steps == 5, {}


class Linear(nn.Module):
    """A policy and a value of all numbers of an observation in a row, whatever they are nested in."""

    def __init__(self, numbers: int, choices: int) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(numbers, choices), nn.Linear(numbers, 1)

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        x = torch.cat(rows(observation), 1).to(self.policy.weight.dtype)
        return self.policy(x), self.value(x)


def rows(observation: Any) -> list[Tensor]:
    if isinstance(observation, Mapping):
        return [row for part in observation.values() for row in rows(part)]
    if isinstance(observation, tuple):
        return [row for part in observation for row in rows(part)]
    return [observation.reshape(len(observation), -1).double() / 100]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def workload(environment: Any, numbers: int, choices: int, **changes: Any) -> apportion.Workload:
    settings: dict[str, Any] = {
        "model": lambda: Linear(numbers, choices),
        "optimizer": adam,
        "frames": 4 * 2 * 3 * 7,
        "actors": 2,
        "environments": 3,
        "steps": 7,
        "episodes": 3,
    }
    return apportion.actor_critic(environment, **(settings | changes))


def trained(given: apportion.Workload, folder: Path, strategy: str = "single_device", workers: int = 1) -> Any:
    return apportion.train(given, strategy, launcher=apportion.local(workers=workers), run_dir=folder / "run")


# Spaces

nested = spaces.Dict(
    place=spaces.Discrete(3, start=-1),
    arm=spaces.Dict(angle=spaces.Box(-1, 1, (), np.float64), on=spaces.MultiBinary(2)),
    screens=spaces.Tuple((spaces.Box(0, 255, (2, 1), np.uint8), spaces.MultiDiscrete([2, 3]))),
)
"""Eight numbers."""

trains = {  # observations and their numbers, actions and the numbers of their policy
    "nested, switches in rows": (nested, 8, spaces.MultiBinary((2, 2)), 4),
    "a scalar, a scalar": (spaces.Box(-1, 1, (), F32), 1, spaces.Box(-1, 1, (), F32), 2),
    "a cube, a matrix of float64": (
        spaces.Box(-1, 1, (2, 1, 2), F32),
        4,
        spaces.Box(-0.1, 0.3, (2, 2), np.float64),
        8,
    ),
    "a category from -2, choices that start elsewhere": (
        spaces.Discrete(4, start=-2),
        1,
        spaces.MultiDiscrete([2, 3], start=[5, -1]),
        5,
    ),
    "half precision, half precision": (
        spaces.Box(-1, 1, (2,), np.float16),
        2,
        spaces.Box(-1, 0.1, (1,), np.float16),
        2,
    ),
    "unsigned, a matrix of choices": (
        spaces.Box(0, 9, (2,), np.uint16),
        2,
        spaces.MultiDiscrete(np.array([[2, 2], [3, 1]])),
        8,
    ),
    "bytes, integers without bounds": (
        spaces.Box(0, 255, (3,), np.uint8),
        3,
        spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64),
        2,
    ),
    "big-endian, bytes": (spaces.Box(-1, 1, (2,), np.dtype(">f8")), 2, spaces.Box(0, 3, (2,), np.uint8), 4),
    "a pair, one action": (spaces.Tuple((spaces.Discrete(2), NUMBER)), 2, spaces.Discrete(1, start=9), 1),
}
cheap = ["nested, switches in rows"]


@pytest.mark.parametrize(
    "name", [name if name in cheap else pytest.param(name, marks=pytest.mark.thorough) for name in trains]
)
def test_an_unusual_space_is_trained_as_on_one_device(name: str, tmp_path: Path) -> None:
    """The proof before the run is of the same network on two workers."""
    observations, numbers, actions, choices = trains[name]
    given = workload(lambda: Drawn(observations, actions), numbers, choices)
    result = trained(given, tmp_path, "data_parallel", 2)
    assert result.metrics["length"] == 5
    assert math.isclose(result.metrics["score"], 15)


def test_a_negative_start_is_played_and_whole_numbers_are_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"

    class Valves(Drawn):
        def step(self, action: Any) -> Any:
            with log.open("a") as file:
                file.write(json.dumps([int(n) for n in np.atleast_1d(action)]) + "\n")
            return super().step(action)

    trained(workload(lambda: Valves(NUMBER, spaces.Box(-1, 33, (2,), np.int32)), 1, 4), tmp_path / "valves")
    played = {n for line in log.read_text().splitlines() for n in json.loads(line)}
    assert {-1, 0, 1} <= played
    log.unlink()
    trained(workload(lambda: Valves(NUMBER, spaces.Discrete(3, start=-1)), 1, 3), tmp_path / "heating")
    assert {line for line in log.read_text().splitlines()} == {"[-1]", "[0]", "[1]"}


refused: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "text": (lambda: Drawn(spaces.Text(4), spaces.Discrete(2)), {}, r"observation space Text\(.*FlattenObservation"),
    "a sequence in a dict": (
        lambda: Drawn(spaces.Dict(a=spaces.Sequence(spaces.Discrete(2))), spaces.Discrete(2)),
        {},
        r"observation space Sequence\(.* in Dict\(",
    ),
    "a graph": (lambda: Drawn(spaces.Graph(NUMBER, None), spaces.Discrete(2)), {}, r"observation space Graph\("),
    "one of two": (lambda: Drawn(spaces.OneOf([NUMBER]), spaces.Discrete(2)), {}, r"observation space OneOf\("),
    "an empty dict": (lambda: Drawn(spaces.Dict({}), spaces.Discrete(2)), {}, r"Dict\(\) .* because it is empty"),
    "integers that torch has not": (
        lambda: Drawn(spaces.Box(0, 2**64 - 1, (1,), np.uint64), spaces.Discrete(2)),
        {},
        "uint64.* above 2",
    ),
    "actions in a dict": (
        lambda: Drawn(NUMBER, spaces.Dict(a=spaces.Discrete(2))),
        {},
        r"action space Dict\(.* no pol",
    ),
    "actions in a tuple": (lambda: Drawn(NUMBER, spaces.Tuple([NUMBER])), {}, r"action space Tuple\(.* has no policy"),
    "the mean of a category": (
        lambda: Drawn(spaces.Discrete(9), spaces.Discrete(2)),
        {"normalise_observations": True},
        r"normalise_observations=True has no mean to take of Discrete\(9\)",
    ),
    "three logits of four": (
        lambda: Drawn(NUMBER, spaces.Discrete(4)),
        {"model": lambda: Linear(1, 3)},
        r"gives 3 numbers for its policy, and Discrete\(4\) takes 4",
    ),
    "six logits of five": (
        lambda: Drawn(NUMBER, spaces.MultiDiscrete([2, 3])),
        {"model": lambda: Linear(1, 6)},
        r"gives 6 numbers for its policy, and MultiDiscrete\(\[2 3\]\) takes 5",
    ),
    "a mean without a deviation": (
        lambda: gymnasium.make("Pendulum-v1"),
        {"model": lambda: Linear(3, 1)},
        r"gives 1 numbers for its policy, and Box\(-2.0, 2.0, \(1,\), float32\) takes 2, the means, then",
    ),
    "no value": (
        lambda: Drawn(NUMBER, spaces.Discrete(2)),
        {"model": lambda: nn.Linear(1, 2)},
        r"must return \(policy,",
    ),
    "a table that is too small": (
        lambda: Drawn(spaces.Discrete(5, start=1), spaces.Discrete(2)),
        {"model": lambda: nn.Embedding(5, 2)},
        r"cannot be called with observations of Drawn, whose space is Discrete\(5, start=1\).*subtract the",
    ),
    "a dict for a tensor": (
        lambda: Drawn(spaces.Dict(a=NUMBER), spaces.Discrete(2)),
        {"model": lambda: nn.Linear(1, 2)},
        r"whose space is Dict\(.*take the dict as one argument",
    ),
    "a network": (lambda: Drawn(NUMBER, spaces.Discrete(2)), {"model": Linear(1, 2)}, "model=.*a function that makes"),
}


@pytest.mark.parametrize("name", refused)
def test_what_does_not_fit_is_refused_when_the_workload_is_built(name: str) -> None:
    environment, changes, message = refused[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        workload(environment, 1, 2, **changes)


# What is observed


class Sign(gymnasium.Env[Any, Any]):
    """The right action is whether a number is above a middle one, from which it differs by less than 1 or, in bytes, by
    28. ``kind``: the type of its space; ``first``, ``later``: those of what ``reset`` and ``step`` return."""

    action_space = spaces.Discrete(2)

    def __init__(self, kind: Any, first: Any, later: Any) -> None:
        self.first, self.later = first, later
        low, self.middle, high = (0, 127, 255) if kind == np.uint8 else (-1, 0, 1)
        self.observation_space = spaces.Box(low, high, (1,), kind)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.x = 0, 0.0
        return np.zeros(1, self.first), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, self.steps = float(action == (self.x > self.middle)), self.steps + 1
        self.x = self.np_random.integers(100, 156) if self.middle else self.np_random.uniform(-0.9, 0.9)
        return np.array([self.x], self.later), reward, False, self.steps == 20, {}


observed = {
    "bytes, normalised": (np.uint8, np.uint8, np.uint8),
    "integers first, then float32": (F32, np.int64, F32),
    "float32 first, then float64": (np.float64, F32, np.float64),
}


@pytest.mark.parametrize(
    "name", [name if "bytes" in name else pytest.param(name, marks=pytest.mark.thorough) for name in observed]
)
@pytest.mark.parametrize("by", [pytest.param("numpy", marks=pytest.mark.thorough), "torch"])
def test_a_network_is_given_what_was_observed(name: str, by: str, tmp_path: Path) -> None:
    """Cut to integers, or made bytes again after they were normalised, observations would be all alike: a score of
    10."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.value = nn.Linear(1, 2), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x if by == "numpy" else x + 0.0
            return self.policy(x), self.value(x)

    given = apportion.actor_critic(
        lambda: Sign(*observed[name]),
        model=Plain,
        optimizer=lambda p: torch.optim.RMSprop(p, lr=0.05),
        frames=12_000,
        gamma=0.0,
        normalise_observations=True,
    )
    assert trained(given, tmp_path).metrics["score"] > 18


class Count(gymnasium.Env[Any, Any]):
    """An observation is the number of the step, and the fifth is the last; in a dict."""

    observation_space = spaces.Dict(steps=spaces.Box(0, 9, (1,), F32))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return {"steps": np.zeros(1, F32)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return {"steps": np.full(1, self.steps, F32)}, 1.0, False, self.steps == 5, {}


class CountAlone(Count):
    observation_space = spaces.Box(0, 9, (1,), F32)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset()[0]["steps"], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *others = super().step(action)
        return observation["steps"], *others  # type: ignore[return-value]


vectors = [
    (kind, mode, one)
    for one in (Count, CountAlone)
    for kind in (SyncVectorEnv, AsyncVectorEnv)
    for mode in AutoresetMode
]


@pytest.mark.parametrize(
    ("kind", "mode", "one"),
    [
        pytest.param(
            *case,
            marks=() if case == (SyncVectorEnv, AutoresetMode.DISABLED, CountAlone) else pytest.mark.thorough,
            id=f"{case[0].__name__}-{case[1].value}-{case[2].__name__}",
        )
        for case in vectors
    ],
)
def test_a_vector_that_reuses_its_memory_shows_last_observations(
    kind: Any, mode: Any, one: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    class Logged(Linear):
        def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
            if self.training and torch.is_grad_enabled():
                with log.open("a") as file:
                    file.write(f"{float(rows(observation)[0].max()) * 100:g} ")
            return super().forward(observation)

    given = workload(
        lambda n: kind([one] * n, copy=False, autoreset_mode=mode), 1, 2, model=lambda: Logged(1, 2), steps=12
    )
    result = trained(given, tmp_path)
    assert max(map(float, log.read_text().split())) == 5
    assert result.metrics == {"score": 5, "length": 5}


def test_a_vector_of_processes_is_evaluated_beside_the_run(tmp_path: Path) -> None:
    """The process that evaluates starts processes of its own."""
    given = workload(lambda n: AsyncVectorEnv([CountAlone] * n), 1, 2, actors=1, frames=84, evaluate_every=42)
    assert trained(given, tmp_path).metrics == {"score": 5, "length": 5}


# What an environment must do


class Broken(Drawn):
    """An environment that returns something else in its third step."""

    def __init__(self, instead: Callable[[Any, Any], Any]) -> None:
        super().__init__(spaces.Box(-1, 1, (2,), F32), spaces.Discrete(2))
        self.instead = instead

    def step(self, action: Any) -> Any:
        returned = super().step(action)
        return self.instead(*returned[:2]) if self.steps == 3 else returned


breaks = {
    "four values": (lambda o, r: (o, r, False, {}), r"Broken\.step\(\) returned 4 values .* must return five values"),
    "no reward": (
        lambda o, r: (o, None, False, False, {}),
        r"Broken\.step\(\) returned None: a reward must be one number",
    ),
    "a reward of nan": (lambda o, r: (o, math.nan, False, False, {}), r"Broken\.step\(\) returned a reward of nan"),
    "a reward in an array": (
        lambda o, r: (o, np.ones(1), False, False, {}),
        r"Broken\.step\(\) returned an array of shape \(1,\) and type float64: a reward must be one number",
    ),
    "no end": (lambda o, r: (o, r, None, False, {}), r"Broken\.step\(\) returned None: terminated must be a bool"),
    "an observation of one number": (
        lambda o, r: (o[:1], r, False, False, {}),
        r"returned an observation of shape \(1,\)",
    ),
    "no observation": (lambda o, r: (None, r, False, False, {}), r"Broken returned None .*observation space is Box"),
    "a number that float32 has not": (
        lambda o, r: (np.array([1e300, 0.0]), r, False, False, {}),
        r"Broken returned .*1e\+300.*, which float32 does not hold",
    ),
    "a reward that float32 has not": (
        lambda o, r: (o, 1e300, False, False, {}),
        r"Broken\.step\(\) returned a reward of 1e\+300 .*finite in float32",
    ),
    "a last observation of nan": (
        lambda o, r: (o * F32(math.nan), r, False, True, {}),
        r"Broken returned an observation with nan",
    ),
    "an infinite number": (
        lambda o, r: (o + F32(math.inf), r, False, False, {}),
        r"Broken returned an observation with inf",
    ),
}
shown = ["no reward"]


@pytest.mark.parametrize("name", [n if n in shown else pytest.param(n, marks=pytest.mark.thorough) for n in breaks])
def test_what_an_environment_returns_is_named_where_it_is_wrong(name: str, tmp_path: Path) -> None:
    instead, message = breaks[name]
    with pytest.raises(Exception, match=f"(?s){message}"):
        trained(workload(lambda: Broken(instead), 2, 2), tmp_path)


class Reset(Drawn):
    def __init__(self, returned: Any) -> None:
        super().__init__(spaces.Box(-1, 1, (2,), F32), spaces.Discrete(2))
        self.returned = returned

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.returned


class Unseeded(Drawn):
    def __init__(self) -> None:
        super().__init__(NUMBER, spaces.Discrete(2))

    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros(1, F32), {}


class Nothing:
    """No environment."""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (lambda: Reset(np.zeros(2, F32)), r"Reset\.reset\(\) returned an array of shape \(2,\).*two values"),
        (lambda: Reset((np.zeros(2, F32), None)), r"Reset\.reset\(\) returned 2 values \(ndarray, NoneType\)"),
        (
            lambda: Reset((np.zeros(3, F32), {})),
            r"Reset returned an observation of shape \(3,\).*observation space is Box",
        ),
        (Unseeded, r"Unseeded\.reset\(\) has no argument seed"),
        (Nothing, r"Nothing has no reset"),
        (lambda n: Nothing(), r"Nothing has no num_envs: a function with an argument is given the number"),
    ],
)
def test_what_is_no_environment_is_refused_when_the_workload_is_built(environment: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        workload(environment, 2, 2)


# Evaluations without an end, and rollouts without a step


class Endless(Drawn):
    def __init__(self) -> None:
        super().__init__(NUMBER, spaces.Discrete(2))

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, False, False, {}


def test_an_evaluation_without_an_end_is_cut_and_reported(tmp_path: Path) -> None:
    """Also the one that a process beside the run makes."""
    result = trained(workload(Endless, 1, 2, longest_episode=40, evaluate_every=84), tmp_path)
    assert result.metrics == {"score": 40, "length": 40}
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    causes = [event["data"]["cause"] for event in events if event["kind"] == "fault"]
    assert causes, "the cut is in the record"
    assert all("3 of 3 episodes of Endless" in cause for cause in causes)
    assert all("gymnasium.wrappers.TimeLimit" in cause for cause in causes)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_rollout_of_resets_alone_is_learnt_from_as_nothing(workers: int, tmp_path: Path) -> None:
    """CartPole's vector resets in a step of its own, of which a rollout of one step may consist on every worker."""
    given = workload(
        "CartPole-v1", 4, 2, actors=workers, environments=1, steps=1, frames=120, episodes=1, normalise_advantages=True
    )
    strategy = "single_device" if workers == 1 else "data_parallel"
    assert trained(given, tmp_path, strategy, workers).metrics["score"] > 0


# gymnasium's own, from the command line

PROGRAM = """
import math
import apportion, gymnasium, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        space = gymnasium.make({name!r}).observation_space
        numbers = sum(math.prod(part.shape) for part in getattr(space, "spaces", [space]))
        self.policy, self.value = nn.Linear(numbers, {choices}), nn.Linear(numbers, 1)

    def forward(self, seen):
        parts = seen if isinstance(seen, tuple) else (seen,)
        x = torch.cat([part.reshape(len(part), -1) for part in parts], 1).to(self.policy.weight.dtype) / 256
        return self.policy(x), self.value(x)

workload = apportion.actor_critic(
    {name!r}, model=Net, optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-4), frames=2 * 2 * 2 * 5, actors=2,
    environments=2, steps=5, episodes=1, longest_episode=20,
)
"""
toy_text = {"FrozenLake-v1": 4, "FrozenLake8x8-v1": 4, "Taxi-v4": 6, "CliffWalking-v1": 4, "Blackjack-v1": 2}
classic_control = {
    "Acrobot-v1": 3,
    "CartPole-v0": 2,
    "CartPole-v1": 2,
    "MountainCar-v0": 3,
    "MountainCarContinuous-v0": 2,
    "Pendulum-v1": 2,
}
box2d = {
    "BipedalWalker-v3": 8,
    "BipedalWalkerHardcore-v3": 8,
    "CarRacing-v3": 6,
    "LunarLander-v3": 4,
    "LunarLanderContinuous-v3": 4,
}
of_gymnasium = toy_text | {"CliffWalkingSlippery-v1": 4} | classic_control | box2d


@pytest.mark.thorough
@pytest.mark.parametrize("name", of_gymnasium)
def test_environments_of_gymnasium_are_trained(name: str, tmp_path: Path, apportion_command: Any) -> None:
    if name in box2d:
        pytest.importorskip("Box2D", reason="gymnasium[box2d] is not installed")
    (tmp_path / "mine.py").write_text(PROGRAM.format(name=name, choices=of_gymnasium[name]))
    in_two = name == "Blackjack-v1"  # others take longer than a proof may
    options = ("--strategy", "data_parallel", "--workers", "2") if in_two else ("--strategy", "single_device")
    ran = apportion_command("train", "mine.py:workload", *options, "--run-dir", "run")
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("verb", [("check", "--strategy", "data_parallel", "--workers", "2"), ("plan",)])
@pytest.mark.thorough
def test_a_network_of_a_tuple_is_checked_and_planned(
    verb: tuple[str, ...], tmp_path: Path, apportion_command: Any
) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM.format(name="Blackjack-v1", choices=2))
    ran = apportion_command(verb[0], "mine.py:workload", *verb[1:])
    assert ran.returncode == 0, ran.stderr + ran.stdout


@pytest.mark.thorough
def test_a_network_of_a_tuple_is_not_exported_from_its_run_by_name(tmp_path: Path, apportion_command: Any) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "mine.py").write_text(PROGRAM.format(name="Blackjack-v1", choices=2))
    ran = apportion_command("train", "mine.py:workload", "--strategy", "single_device", "--run-dir", "run")
    assert ran.returncode == 0, ran.stderr
    ran = apportion_command("export", "run")
    assert ran.returncode == 2, ran.stderr
    assert "takes observations of several tensors as one argument" in ran.stderr
