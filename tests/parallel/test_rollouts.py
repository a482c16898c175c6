"""Rollouts: what actors record in each of the ways in which environments begin again, and the loss of what they did."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from apportion.core import tree
from apportion.parallel.ops.factored_linear import plain_layers, redirect
from apportion.parallel.ops.sync_batch_norm import RunningStatistics
from apportion.parallel.rollouts.acting import NumpyActing, TorchActing, fastest
from apportion.parallel.rollouts.actor import Actor, Rollout
from apportion.parallel.rollouts.environments import EnvironmentLoop, VectorOfEnvironments
from apportion.parallel.rollouts.episodes import Episodes
from apportion.parallel.rollouts.loss import ActorCriticLoss
from apportion.parallel.rollouts.policy import ActionPolicy, Categorical, Gaussian, MultiCategorical
from apportion.parallel.rollouts.rollouts import _inputs, _targets
from apportion.parallel.rollouts.unrolled import Unrolled

WIDTH, STEPS, CHOICES, NUMBERS = 3, 12, 3, 2
Discrete = type("Discrete", (SimpleNamespace,), {})
Box = type("Box", (SimpleNamespace,), {})
SPACE = Box(shape=(NUMBERS,), dtype=np.dtype(np.float32))


class Walk:
    """An episode of environment k ends after 3 + 2 k steps, and is cut short after 5; the observation says the episode,
    and the step in it."""

    observation_space = SPACE
    action_space = Discrete(n=CHOICES)

    def __init__(self, length: int = 3, limit: int = 5) -> None:
        self.length, self.limit, self.episode = length, limit, -1

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.at, self.episode = 0, self.episode + 1
        return self._seen(), {}

    def _seen(self) -> np.ndarray:
        return np.array([self.episode, self.at], dtype=np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return self._seen(), float(action + self.at), self.at >= self.length, self.at >= self.limit, {}

    def close(self) -> None:
        pass


class Vector:
    """The same environments as a vector, which begins episodes again in one of gymnasium's three ways."""

    num_envs, single_observation_space, single_action_space = WIDTH, SPACE, Walk.action_space
    observation_space = SPACE

    def __init__(self, mode: str) -> None:
        self.metadata = {"autoreset_mode": SimpleNamespace(value=mode)}
        self._mode, self._all = mode, walks()
        self._over = np.zeros(WIDTH, dtype=bool)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        if options is None:
            self._seen = np.stack([one.reset()[0] for one in self._all])
        else:
            for k in np.flatnonzero(options["reset_mask"]):
                self._seen[k] = self._all[k].reset()[0]
        return self._seen.copy(), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        rewards, told = np.zeros(WIDTH), {}
        ended, cut = np.zeros(WIDTH, dtype=bool), np.zeros(WIDTH, dtype=bool)
        last = np.full(WIDTH, None, dtype=object)
        for k, one in enumerate(self._all):
            if self._mode == "NextStep" and self._over[k]:
                self._seen[k] = one.reset()[0]
                continue
            self._seen[k], rewards[k], ended[k], cut[k], _ = one.step(int(actions[k]))
            if self._mode == "SameStep" and (ended[k] or cut[k]):
                last[k] = self._seen[k].copy()
                self._seen[k] = one.reset()[0]
        self._over = ended | cut
        if self._mode == "SameStep" and self._over.any():
            told["final_obs"] = last
        return self._seen.copy(), rewards, ended, cut, told


def walks() -> list[Walk]:
    return [Walk(3 + 2 * k) for k in range(WIDTH)]


def opened(how: str) -> Any:
    if how != "loop":
        return VectorOfEnvironments(Vector(how), WIDTH)
    made = iter(walks())
    return EnvironmentLoop(lambda: next(made), WIDTH)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = nn.Sequential(nn.Linear(NUMBERS, 8), nn.Tanh(), nn.Linear(8, CHOICES))
            self.value = nn.Sequential(nn.Linear(NUMBERS, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.policy(x), self.value(x)

    return ActorCritic().to(dtype)


def rollouts(how: str, many: int = 1) -> list[Rollout]:
    actor = Actor(opened(how), Categorical(CHOICES), seed=0, key=0, gamma=0.9)
    act = TorchActing(Unrolled(network()))
    return [actor.play(act, STEPS, number) for number in range(many)]


def step_by_step(net: nn.Module, rollout: Rollout, gamma: float, gae: float, value: float, entropy: float) -> Tensor:
    """The loss as the paper writes it: each step by itself, each episode by itself."""
    terms = []
    for k in range(WIDTH):
        policies, values = zip(
            *(net(torch.from_numpy(o[None].astype(np.float64))) for o in rollout.observations[:, k]), strict=True
        )
        for t in range(STEPS):
            if not rollout.counts[t, k]:
                continue
            gain, discount = 0.0, 1.0
            for u in range(t, STEPS):
                after = float(values[u + 1].detach())
                if rollout.last_at[u, k] >= 0:
                    seen = torch.from_numpy(rollout.last[rollout.last_at[u, k]][None].astype(np.float64))
                    after = float(net(seen)[1].detach())
                after = 0.0 if rollout.ended[u, k] else after
                gain += discount * (rollout.rewards[u, k] + gamma * after - float(values[u].detach()))
                discount *= gamma * gae
                if rollout.ended[u, k] or rollout.cut[u, k]:
                    break
            worth = gain + float(values[t].detach())
            chosen = torch.distributions.Categorical(logits=policies[t])
            action = torch.tensor(rollout.actions[t, k])
            term = -chosen.log_prob(action) * gain + value * (worth - values[t]) ** 2 - entropy * chosen.entropy()
            terms.append(term.sum())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("gae", [1.0, 0.95])
@pytest.mark.parametrize("how", ["loop", "NextStep", "SameStep", "Disabled"])
def test_the_batched_gradient_is_that_of_the_loss_step_by_step(how: str, gae: float) -> None:
    """With episodes that end, that are cut short, and that do neither."""
    rollout = rollouts(how, 2)[1]
    assert rollout.ended.any()
    assert rollout.cut.any()
    assert not (rollout.ended & rollout.cut).any()
    net = network()
    loss = ActorCriticLoss(Categorical(CHOICES), gamma=0.9, gae=gae, value=0.5, entropy=0.02)
    given = tree.cast(_inputs([rollout]), torch.device("cpu"), torch.float64)
    found = loss(Unrolled(net)(*given), _targets([rollout]))
    expected = step_by_step(net, rollout, 0.9, gae, 0.5, 0.02)
    assert abs(float((found - expected).detach())) < 1e-10
    gradients = torch.autograd.grad(found, net.parameters())
    for gradient, exact in zip(gradients, torch.autograd.grad(expected, net.parameters()), strict=True):
        assert float((gradient - exact).abs().max()) < 1e-10


@pytest.mark.parametrize("how", ["loop", "SameStep", "Disabled"])
def test_the_ways_in_which_episodes_begin_again_give_the_same_rollouts(how: str) -> None:
    for one, other in zip(rollouts(how, 3), rollouts("loop", 3), strict=True):
        for name in ("observations", "actions", "rewards", "ended", "cut", "counts", "last_at", "last"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert one.scores == other.scores


def test_the_step_that_only_resets_does_not_count() -> None:
    first, second = rollouts("NextStep", 2)
    over = first.ended | first.cut
    assert (~first.counts[1:] == over[:-1]).all()
    assert (~second.counts[0] == over[-1]).all(), "also where the rollout before it has ended the episode"
    assert (first.rewards[~first.counts] == 0.0).all()


def test_a_way_of_beginning_again_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of gymnasium's AutoresetMode"):
        VectorOfEnvironments(Vector("Sometimes"), WIDTH)


@pytest.mark.parametrize(
    ("policy", "exact"),
    [
        (Categorical(4), lambda n: torch.distributions.Categorical(logits=n)),
        (
            Gaussian(3),
            lambda n: torch.distributions.Independent(torch.distributions.Normal(n[..., :3], n[..., 3:].exp()), 1),
        ),
    ],
)
def test_probabilities_and_entropies_are_those_of_torchs_distributions(policy: ActionPolicy, exact: Any) -> None:
    numbers = torch.randn(5, policy.numbers, dtype=torch.float64)
    noise = policy.noise(np.random.default_rng(0), (5,))
    actions = torch.from_numpy(policy.act(numbers.numpy(), noise))
    chosen, entropy = policy.judge(numbers, actions)
    assert torch.allclose(chosen, exact(numbers).log_prob(actions), atol=1e-12)
    assert torch.allclose(entropy, exact(numbers).entropy(), atol=1e-12)


def test_several_choices_at_once_are_drawn_apart() -> None:
    policy, numbers = MultiCategorical((2, 3)), torch.randn(7, 5, dtype=torch.float64)
    noise = policy.noise(np.random.default_rng(0), (7,))
    actions = torch.from_numpy(policy.act(numbers.numpy(), noise))
    parts = [torch.distributions.Categorical(logits=piece) for piece in (numbers[:, :2], numbers[:, 2:])]
    found, entropy = policy.judge(numbers, actions)
    assert torch.allclose(found, sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts)), atol=1e-12)
    assert torch.allclose(entropy, sum(p.entropy() for p in parts), atol=1e-12)
    assert (policy.best(numbers.numpy()) == np.stack([p.probs.argmax(-1).numpy() for p in parts], -1)).all()


def test_actions_are_as_frequent_as_they_are_probable() -> None:
    policy, numbers = Categorical(3), np.array([0.0, 1.0, -2.0])
    noise = policy.noise(np.random.default_rng(0), (200_000,))
    found = np.bincount(policy.act(np.broadcast_to(numbers, (200_000, 3)), noise), minlength=3) / 200_000
    assert np.abs(found - np.exp(numbers) / np.exp(numbers).sum()).max() < 0.005


def test_a_perceptron_acts_by_numpy_as_it_does_by_torch() -> None:
    net = network(torch.float32)
    by_numpy, by_torch = NumpyActing(Unrolled(net)), TorchActing(Unrolled(net))
    begins = np.zeros(6, dtype=bool)
    observations = np.random.default_rng(0).standard_normal((6, NUMBERS)).astype(np.float32)
    for _ in range(2):
        by_numpy.refresh()
        found = by_numpy(observations, (), begins)[0]
        assert np.abs(found - by_torch(observations, (), begins)[0]).max() < 1e-6
        for parameter in net.parameters():  # other weights, in another place
            parameter.data = torch.randn_like(parameter)


def test_a_perceptron_whose_gradients_go_to_shared_pages_acts_by_numpy_too() -> None:
    """As under data_parallel, which exchanges the factors of the gradients of Linear layers."""
    net, given = network(torch.float32), list[Tensor]()
    for layer in plain_layers(net):
        redirect(layer, lambda inputs, gradient: given.append(gradient))
    observations = np.random.default_rng(0).standard_normal((6, NUMBERS)).astype(np.float32)
    way = fastest(Unrolled(net), observations)
    assert isinstance(way, NumpyActing)
    begins = np.zeros(6, dtype=bool)
    found, exact = way(observations, (), begins)[0], TorchActing(Unrolled(net))(observations, (), begins)[0]
    assert np.abs(found - exact).max() < 1e-6
    net(torch.from_numpy(observations))[0].sum().backward()
    assert given, "its gradients go there still"


class Doubled(nn.Linear):
    """A layer that is no nn.Linear, whatever it is made from."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_is_no_perceptron_does_not_act_by_numpy() -> None:
    with pytest.raises(ValueError, match="and not a layer of a multilayer perceptron"):
        NumpyActing(Unrolled(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    observations = np.zeros((4, 2), np.float32)
    assert isinstance(fastest(Unrolled(nn.Sequential(Doubled(2, 2), nn.Tanh())), observations), TorchActing)


def test_a_perceptron_is_found_to_act_by_numpy() -> None:
    observations = np.zeros((4, NUMBERS), np.float32)
    assert isinstance(fastest(Unrolled(network(torch.float32)), observations), NumpyActing)
    normalised = Unrolled(network(torch.float32), observations=NUMBERS)
    assert isinstance(fastest(normalised, observations), NumpyActing)
    assert isinstance(fastest(Unrolled(nn.Sequential(nn.Linear(2, 2), nn.GELU())), observations), TorchActing)


def test_running_statistics_are_those_of_all_that_was_taken_in() -> None:
    statistics, rows = RunningStatistics(3), torch.randn(50, 3, dtype=torch.float64) * 5 + 2
    assert torch.equal(statistics.mean, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(statistics.deviation, torch.ones(3, dtype=torch.float64))
    for part in rows.split(7):
        statistics.accumulate(part)
    assert torch.allclose(statistics.mean, rows.mean(0), atol=1e-12)
    assert torch.allclose(statistics.deviation, rows.std(0, correction=0), atol=1e-12)


def test_observations_are_normalised_by_what_was_seen_before() -> None:
    unrolled = Unrolled(network(), observations=NUMBERS)
    rollout = rollouts("loop", 1)[0]
    given = tree.cast(_inputs([rollout]), torch.device("cpu"), torch.float64)
    plain = Unrolled(network())(*given)
    assert torch.equal(unrolled(*given).values, plain.values), "nothing was seen before the first"
    seen = torch.from_numpy(rollout.observations[:-1].reshape(-1, NUMBERS).astype(np.float64))
    exact = (given.observations - seen.mean(0)) / seen.std(0, correction=0)
    unrolled.eval()
    again = unrolled(*given)
    last = (given.last - seen.mean(0)) / seen.std(0, correction=0)
    expected = Unrolled(network())(*given._replace(observations=exact.clamp(-10, 10), last=last.clamp(-10, 10)))
    assert torch.allclose(again.values, expected.values, atol=1e-12)
    assert torch.allclose(again.after, expected.after, atol=1e-12)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.policy, self.value = nn.GRUCell(NUMBERS, 5), nn.Linear(5, CHOICES), nn.Linear(5, 1)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.cell(x, state)
        return self.policy(state), self.value(state), state


@pytest.mark.parametrize("how", ["loop", "NextStep", "SameStep", "Disabled"])
def test_a_recurrent_network_remembers_its_own_episode_alone(how: str) -> None:
    """What the unrolled network gives is what one gives that is run through each episode by itself."""
    torch.manual_seed(0)
    net = Remembering().double()
    begin = lambda rows: torch.zeros(rows, 5, dtype=torch.float64)  # noqa: E731
    unrolled = Unrolled(net, state=begin)
    actor = Actor(opened(how), Categorical(CHOICES), seed=0, key=0, gamma=0.9, state=begin(WIDTH))
    first, second = (actor.play(TorchActing(unrolled), STEPS, number) for number in range(2))
    for rollout in (first, second):
        judged = unrolled(*tree.cast(_inputs([rollout]), torch.device("cpu"), torch.float64))
        for k in range(WIDTH):
            state = rollout.state[k : k + 1]
            for t in range(STEPS + 1):
                state = begin(1) if rollout.begins[t, k] else state
                policy, value, state = net(torch.from_numpy(rollout.observations[t, k][None].astype(np.float64)), state)
                assert torch.allclose(judged.values[0, t, k], value, atol=1e-12)
                if t < STEPS:
                    assert torch.allclose(judged.policies[0, t, k], policy[0], atol=1e-12)
                    if (at := rollout.last_at[t, k]) >= 0:
                        seen = torch.from_numpy(rollout.last[at][None].astype(np.float64))
                        assert torch.allclose(judged.after[0, t, k], net(seen, state)[1], atol=1e-12)
    assert first.begins[0].all()
    assert first.begins[1:].any()


def test_greedy_episodes_are_the_same_each_time_and_can_be_looked_at(tmp_path: Path) -> None:
    from PIL import Image

    torch.manual_seed(1)
    episodes = Episodes("CartPole-v1", 6)
    assert (len(episodes), episodes.width) == (1, 6)
    policy, value = nn.Linear(4, 2), nn.Linear(4, 1)

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.value = policy, value

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.policy(x), self.value(x)

    episodes.network = Unrolled(Linear())
    told = [episodes.act(np.array([0]), step)[1] for step in (0, 5)]
    assert torch.equal(told[0]["score"], told[1]["score"])
    assert torch.equal(told[0]["score"], told[0]["length"]), "CartPole gives 1 a step"
    path = episodes.record(tmp_path)
    assert path is not None
    with Image.open(path) as film:
        assert film.n_frames > 1
        assert film.width == 240


def test_what_cannot_be_seen_is_not_recorded(tmp_path: Path) -> None:
    episodes = Episodes(lambda: Walk(3), 2)
    episodes.network = Unrolled(network(torch.float32))
    assert episodes.record(tmp_path) is None
    assert not list(tmp_path.iterdir())
