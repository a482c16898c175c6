"""Spaces of rollouts: actions are elements of theirs, observations are arrays of theirs, and both ways of acting
compute the same of them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn

import apportion
from apportion.parallel.rollouts.acting import NumpyActing, TorchActing, fastest
from apportion.parallel.rollouts.environment_contract import flags_of, rewards_of, step_values
from apportion.parallel.rollouts.environments import EnvironmentLoop, VectorOfEnvironments
from apportion.parallel.rollouts.observations import ObservationFormat
from apportion.parallel.rollouts.policy import Bernoulli, policy_of
from apportion.parallel.rollouts.rollouts import Rollouts
from apportion.parallel.rollouts.unrolled import Unrolled

F32 = np.float32
actions = [
    spaces.Discrete(2),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3], start=[-4, 7]),
    spaces.MultiDiscrete(np.array([[2, 3], [1, 4]])),
    spaces.MultiDiscrete([2, 3], dtype=np.int8),
    spaces.MultiBinary(3),
    spaces.MultiBinary((2, 2)),
    spaces.Box(-0.1, 0.1, (3,), F32),
    spaces.Box(-0.1, 0.1, (3,), np.float64),
    spaces.Box(-0.1, 0.1, (2, 2), np.float16),
    spaces.Box(-1, 1, (), F32),
    spaces.Box(np.array([-np.inf, 0], F32), np.array([0, np.inf], F32)),
    spaces.Box(-1, 33, (2,), np.int32),
    spaces.Box(0, 2**64 - 1, (1,), np.uint64),
    spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("space", actions, ids=str)
def test_every_action_is_an_element_of_its_space(space: Any, dtype: Any) -> None:
    policy, generator = policy_of(space), np.random.default_rng(0)
    numbers = (20 * generator.standard_normal((50, policy.numbers))).astype(dtype)
    drawn = policy.act(numbers, policy.noise(generator, (50,)))
    for found in (drawn, policy.best(numbers)):
        assert found.shape == (50, *policy.shape)
        for action in policy.for_environment(found):
            assert space.contains(np.asarray(action) if space.shape == () else action), action


def test_an_integer_action_is_the_nearest_one() -> None:
    drawn = np.array([[0.4, 0.6], [-0.6, 8.7]], F32)
    found = policy_of(spaces.Box(-1, 8, (2,), np.int16)).for_environment(drawn)
    assert found.tolist() == [[0, 1], [-1, 8]]


def test_a_network_that_has_diverged_gives_whole_numbers_of_the_space() -> None:
    space = spaces.Box(1, 9, (2,), np.int16)
    for number in (np.nan, np.inf, -np.inf):
        assert space.contains(policy_of(space).for_environment(np.full((1, 2), number, F32))[0])


def test_decisions_are_as_probable_as_torch_says() -> None:
    policy, numbers = Bernoulli(3), torch.randn(40, 3, dtype=torch.float64)
    exact = torch.distributions.Bernoulli(logits=numbers)
    drawn = policy.act(numbers.numpy(), policy.noise(np.random.default_rng(0), (40,)))
    chosen, entropy = policy.judge(numbers, torch.from_numpy(drawn))
    assert torch.allclose(chosen, exact.log_prob(torch.from_numpy(drawn).double()).sum(-1))
    assert torch.allclose(entropy, exact.entropy().sum(-1))
    logits = np.array([-2.0, 0.0, 2.0])
    drawn = policy.act(np.tile(logits, (200_000, 1)), policy.noise(np.random.default_rng(1), (200_000,)))
    assert np.allclose(drawn.mean(0), 1 / (1 + np.exp(-logits)), atol=0.004)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        self.value = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x)


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float64, F32])
def test_both_ways_of_acting_normalise_what_was_observed(kind: Any) -> None:
    """Large numbers that differ by a few, of which float32 and integers after normalisation would know less."""
    unrolled = Unrolled(Perceptron(), observations=2)
    assert unrolled.observation_statistics is not None
    least = 97 if kind == np.uint8 else 1_000_000
    seen = np.random.default_rng(0).integers(least, least + 7, (64, 2)).astype(kind)
    unrolled.observation_statistics.accumulate(torch.from_numpy(seen))
    begins = np.ones(64, dtype=bool)
    way = fastest(unrolled, seen)
    assert isinstance(way, NumpyActing)
    found, exact = way(seen, (), begins)[0], TorchActing(unrolled)(seen, (), begins)[0]
    assert found.dtype == exact.dtype == F32
    assert np.abs(found - exact).max() < 1e-6
    assert len(np.unique(found, axis=0)) == len(np.unique(seen, axis=0)), "what differs stays different"


nested = spaces.Dict(
    a=spaces.Box(-1, 1, (1, 2), F32), b=spaces.Tuple((spaces.Discrete(3, start=-1), spaces.MultiBinary(2)))
)


def test_nested_observations_are_one_array_and_the_same_for_the_network() -> None:
    known = ObservationFormat(nested, "Env")
    seen = [nested.sample() for _ in range(4)]
    array = known.gathered(seen)
    assert array.shape == (4,)
    assert np.array_equal(known.batched(known_batch(seen), 4), array)
    given = known.tensors(array)
    assert given["a"].shape == (4, 1, 2)
    assert given["b"][0].tolist() == [int(one["b"][0]) for one in seen]
    assert given["b"][1].dtype == torch.int8
    tried = known.tensors(known.trials(array[:1]))
    assert tried["b"][0].tolist() == [int(seen[0]["b"][0]), -1, 1]


def known_batch(seen: list[Any]) -> Any:
    """What a vector of gymnasium's gives for these."""
    return {"a": np.stack([o["a"] for o in seen]), "b": tuple(np.stack([o["b"][n] for o in seen]) for n in (0, 1))}


def test_parts_of_observations_are_normalised_by_themselves() -> None:
    unrolled = Unrolled(nn.Linear(1, 1), observations=4, parts=(True, False, True))
    assert unrolled.observation_statistics is not None
    unrolled.observation_statistics.accumulate(torch.tensor([[1.0, 10, 0, 1], [3.0, 30, 1, 1]]))
    given = {
        "a": torch.tensor([[[1.0, 30.0]]]),
        "b": (torch.tensor([2]), torch.tensor([[1, 1]], dtype=torch.int8)),
    }
    found = unrolled.normalised(given)
    assert torch.allclose(found["a"], torch.tensor([[[-1.0, 1.0]]]))
    assert found["b"][0].tolist() == [2]
    assert torch.allclose(found["b"][1], torch.tensor([[1.0, 0.0]]))


bytes_of = ObservationFormat(spaces.Box(0, 255, (2,), np.uint8), "Env")
single = ObservationFormat(spaces.Box(-1, 1, (2,), F32), "Env")


@pytest.mark.parametrize(
    ("known", "seen", "message"),
    [
        (single, [np.zeros(2), np.zeros(1)], r"Env returned an observation of shape \(1,\), where its"),
        (single, [np.zeros(1), np.zeros(1)], r"shape \(1,\)"),
        (single, [0.0, 0.0], r"shape \(\)"),
        (single, [None, None], "Env returned None"),
        (single, [{"a": 1}, {"a": 1}], r"Env returned \{'a': 1\}"),
        (single, [np.array([1e300, 0])], "1e.300.*which float32 does not hold"),
        (bytes_of, [np.array([0.5, 1.0])], "0.5.*which uint8 does not hold"),
        (bytes_of, [np.array([256, 1])], "256.*which uint8 does not hold"),
        (bytes_of, [np.array([-1, 1])], "-1.*which uint8 does not hold"),
        (ObservationFormat(nested, "Env"), [{"a": np.zeros((1, 2))}], r"without \['b'\]\[0\]"),
    ],
)
def test_an_observation_that_is_not_of_its_space_is_named(known: ObservationFormat, seen: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        known.gathered(seen)


def test_what_loses_nothing_is_taken() -> None:
    assert single.gathered([[0, 1], [1, 0]]).dtype == F32
    assert bytes_of.gathered([np.array([3.0, 255.0])]).tolist() == [[3, 255]]


def test_values_of_steps_that_mean_the_same_are_taken() -> None:
    assert rewards_of("Env", (1, np.float32(0.5)), 2).tolist() == [1, 0.5]
    assert flags_of("Env", (0, np.True_), 2, "terminated").tolist() == [False, True]
    assert len(step_values("Env", [(0, 1.0, False, False, {}), [0, 1.0, False, False, {}]])) == 5


@pytest.mark.parametrize("flag", [None, {}, 2, "yes", np.zeros(1)])
def test_an_end_that_is_no_bool_is_named(flag: Any) -> None:
    with pytest.raises(ValueError, match=r"Env\.step\(\) returned .*: terminated must be a bool"):
        flags_of("Env", (False, flag), 2, "terminated")


@pytest.mark.parametrize("reward", [None, "1", np.ones(1), [1.0], 1j])
def test_a_reward_that_is_no_number_is_named(reward: Any) -> None:
    with pytest.raises(ValueError, match=r"Env\.step\(\) returned .*: a reward must be one number"):
        rewards_of("Env", (1.0, reward), 2)


class Ends(gymnasium.Env[Any, Any]):
    """Episodes that are cut after one to nine steps; what is observed is drawn from a space, ``last`` at the end."""

    def __init__(self, observations: Any, actions: Any = None, last: Any = None, reward: float = 1.0) -> None:
        self.observation_space, self.action_space = observations, actions or spaces.Discrete(2)
        self.last, self.reward = last, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 10))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        over = self.left == 0
        seen = self.last if over and self.last is not None else self.observation_space.sample()
        return seen, self.reward, False, over, {}


class Numbers(nn.Module):
    """A policy and a value of one number, by torch alone."""

    def __init__(self, finite: bool = False) -> None:
        super().__init__()
        self.policy, self.value, self.finite = nn.Linear(1, 2), nn.Linear(1, 1), finite

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.reshape(len(x), 1).float()
        x = torch.nan_to_num(x, posinf=1.0) if self.finite else x + 0.0
        return self.policy(x), self.value(x)


def played(environment: Any, network: nn.Module, actors: int = 1) -> Any:
    made = Rollouts(environment, actors=actors, environments=2, steps=20)
    made.network = Unrolled(network).eval()
    return made.act(np.arange(actors), 0)[0]


def test_last_observations_are_of_the_space_where_actors_have_different_numbers_of_them() -> None:
    inputs = played(lambda: Ends(spaces.Discrete(4, start=5)), Numbers(), actors=2)
    assert len(set(inputs.last_at.amax((1, 2)).tolist())) == 2, "the actors have cut different numbers of episodes"
    assert inputs.last.min() >= 5


one_number = spaces.Box(-1, 1, (1,), F32)
double = spaces.Box(-1, 1, (1,), np.float64)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (lambda: Ends(one_number, last=np.full(1, math.nan, F32)), "an observation with nan"),
        (lambda: Ends(double, last=np.full(1, 1e300)), r"an observation with 1e\+300"),
        (
            lambda: Ends(spaces.Dict(a=double), last={"a": np.full(1, -math.inf)}),
            "an observation with -inf",
        ),
        (lambda: Ends(one_number, reward=1e39), r"a reward of 1e\+39 .*finite in float32"),
    ],
)
def test_a_number_that_is_not_finite_is_named_where_an_episode_is_cut(environment: Any, message: str) -> None:
    class Network(Numbers):
        def forward(self, x: Any) -> tuple[Tensor, Tensor]:
            return super().forward(x["a"] if isinstance(x, dict) else x)

    with pytest.raises(ValueError, match=f"Ends.* returned {message}"):
        played(environment, Network())


def test_the_step_of_a_last_observation_is_named() -> None:
    t, k = np.argwhere(played(lambda: Ends(one_number), Numbers()).last_at[0].numpy() == 0)[0]
    with pytest.raises(ValueError, match=rf"\(environment {k}, step {t} of a rollout\)"):
        played(lambda: Ends(one_number, last=np.full(1, math.nan, F32)), Numbers())
    assert (t, k) != (0, 0)


def test_a_last_observation_that_the_network_replaces_is_taken() -> None:
    inputs = played(lambda: Ends(one_number, last=np.full(1, math.inf, F32)), Numbers(finite=True))
    assert torch.isinf(inputs.last).all()


def test_environments_of_one_loop_are_different_objects_with_one_action_space() -> None:
    one = Ends(one_number)
    with pytest.raises(ValueError, match="returned the same Ends twice"):
        EnvironmentLoop(lambda: one, 2)
    made = iter([Ends(one_number), Ends(one_number, spaces.Discrete(3))])
    with pytest.raises(ValueError, match=r"action spaces Discrete\(2\) and Discrete\(3\)"):
        EnvironmentLoop(lambda: next(made), 2)


@pytest.mark.parametrize("every", [0, -3, "100"])
def test_an_evaluation_every_no_frames_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=r"evaluate_every=.* must be a number of frames of at least 1"):
        apportion.actor_critic(
            lambda: Ends(one_number), model=Numbers, optimizer=torch.optim.SGD, frames=100, evaluate_every=every
        )


def test_observations_that_torch_cannot_share_are_copied(recwarn: pytest.WarningsRecorder) -> None:
    unrolled, begins = Unrolled(Numbers()), np.ones(3, dtype=bool)
    seen = np.arange(3, dtype=F32)[:, None]
    fixed = seen.copy()
    fixed.flags.writeable = False
    exact = TorchActing(unrolled)(seen, (), begins)[0]
    assert np.array_equal(TorchActing(unrolled)(seen[::-1], (), begins)[0], exact[::-1])
    assert np.array_equal(TorchActing(unrolled)(fixed, (), begins)[0], exact)
    assert not recwarn.list


class OwnMemory(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Episodes of two steps; what a step returns is overwritten by the reset that follows it."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, count: int) -> None:
        self.num_envs, self.single_observation_space, self.single_action_space = count, one_number, spaces.Discrete(2)
        self.observation_space = batch_space(one_number, count)
        self.action_space = batch_space(self.single_action_space, count)
        self.seen, self.rewards = np.zeros((count, 1), F32), np.zeros(count)
        self.ended, self.cut = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        for memory in (self.seen, self.rewards, self.ended, self.cut):
            memory[...] = 0
        return self.seen, {}

    def step(self, actions: Any) -> Any:
        self.seen += 0.5
        self.rewards[:] = 1
        self.cut[:] = self.seen[:, 0] == 1
        return self.seen, self.rewards, self.ended, self.cut, {}


def test_a_reset_does_not_change_what_the_step_before_it_returned() -> None:
    vector = VectorOfEnvironments(OwnMemory(2), 2)
    vector.reset(0)
    vector.step(np.zeros(2, dtype=np.int64))
    moved = vector.step(np.zeros(2, dtype=np.int64))
    assert moved.cut.all()
    assert moved.rewards.tolist() == [1, 1]
    assert moved.last is not None
    assert moved.last.tolist() == [[1], [1]]
    assert moved.observations.tolist() == [[0], [0]]
