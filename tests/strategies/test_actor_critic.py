"""Actor-critics under every strategy that can train them: the same network as one process, or the same as logged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import played
import pytest
import torch
from ranks import by_value, on_ranks

import apportion
from apportion import State, Workload
from apportion.comm.world import World
from apportion.core.data.acted import ActedDataset
from apportion.core.rng import mix
from apportion.core.strategy import batches
from apportion.core.value import parse
from apportion.runtime.proof.proof_workload import few_rows

pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]
EXACT = 1e-10


def checked(name: str, strategy: str, workers: int) -> Any:
    with by_value(played):
        return apportion.check(played.workload(**played.cases[name]), strategy, workers=workers, steps=8)


@pytest.mark.parametrize("name", played.cases)
@pytest.mark.parametrize("strategy", ["data_parallel", 'parameter_server(mode="ordered")', "map_reduce"])
def test_two_workers_train_the_network_of_one_process(name: str, strategy: str) -> None:
    if strategy == "map_reduce" and "normalised" in name:
        with pytest.raises(ValueError, match="takes in what the rows of a batch give"):
            checked(name, strategy, 2)
        return
    proof = checked(name, strategy, 2)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


@pytest.mark.parametrize("strategy", ["single_device", "data_parallel", 'parameter_server(mode="ordered")', "hogwild"])
def test_one_worker_trains_the_network_of_one_process(strategy: str) -> None:
    proof = checked("plain", strategy, 1)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


@pytest.mark.parametrize("name", ["plain", "normalised", "recurrent"])
def test_a_logged_asynchronous_run_is_replayed_to_the_bit(name: str) -> None:
    proof = checked(name, "parameter_server", 2)
    assert proof.holds
    assert all(one.worst.absolute == 0.0 for one in proof.rounds)


@pytest.mark.parametrize("strategy", ["fully_sharded", "pipeline_parallel", "tensor_parallel", "layer_placement"])
def test_a_strategy_without_a_whole_network_on_a_worker_refuses_to_act(strategy: str) -> None:
    with by_value(played), pytest.raises(ValueError, match="cannot train on what its network does"):
        apportion.check(played.workload(), strategy, workers=2, steps=2)


def trained(world: World, strategy: Any, workload: Workload) -> State:
    step = strategy.build(workload, world)
    for batch in batches(step):
        step(batch)
    world.group().barrier()
    return step.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["data_parallel", 'parameter_server(mode="ordered")'])
def test_it_gives_the_same_bits_twice(strategy: str) -> None:
    value = parse(strategy, "apportion.strategies")
    with by_value(played):
        one, other = (on_ranks(trained, 2, value, played.workload(normalise_observations=True))[0] for _ in range(2))
    assert one.step == 20
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.tensors(), other.tensors(), strict=True))


def test_hogwild_makes_every_update_once() -> None:
    with by_value(played):
        states = on_ranks(trained, 2, parse("hogwild", "apportion.strategies"), played.workload())
    assert {state.step for state in states} == {20}
    assert all(t.isfinite().all() for state in states for t in state.model.values())


def test_loaders_are_refused() -> None:
    step = apportion.single_device().build(played.workload(), World())
    with pytest.raises(ValueError, match="loaders=2: the network makes these examples"):
        next(batches(step, loaders=2))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"frames": 0}, "frames=0 must be a whole number of at least 1"),
        ({"gamma": 1.5}, "gamma=1.5 must be from 0 to 1"),
        ({"compile": True}, "compile=True compiles one shape of a call"),
        ({"environment": "NoSuchGame-v7"}, "environment='NoSuchGame-v7': gymnasium has none of that id"),
        ({"environment": 7}, "environment=7 must be the id of an environment, or a function that makes it"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        played.workload(**changes)


@pytest.mark.thorough
def test_it_learns() -> None:
    """The score of greedy episodes rises from that of a network that knows nothing."""
    workload = played.workload(frames=60_000, environments=16, actors=1, entropy=0.0)
    step = apportion.single_device().build(replace(workload, seed=1), World())
    told = []
    for batch in batches(step):
        step(batch)
        if step.done in (5, step.source.total - 100, step.source.total):
            told.append(step.source.dataset.rollout_facts()["score"])  # type: ignore[attr-defined]
    assert told[-1] > told[0] + 0.5


def plain_a2c(updates: int) -> dict[str, torch.Tensor]:
    """A2C as it is written by hand: environments in a list, a rollout as lists, torch's optimizer and clipping."""
    torch.manual_seed(3)
    net = played.Normed()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=0.01, alpha=0.99, eps=1e-5)
    games = [played.Drift() for _ in range(4)]
    begun, gamma = [0] * 4, 0.9

    def begin(k: int) -> np.ndarray:
        number = np.random.SeedSequence((mix(3, 0, 0, 0xE27) & 0x7FFFFFFF, k, begun[k])).generate_state(1)[0]
        begun[k] += 1
        return games[k].reset(seed=int(number))[0]

    seen = np.stack([begin(k) for k in range(4)])
    for update in range(updates):
        draws = np.random.Generator(np.random.Philox(key=mix(3, 0, update, 0xAC7))).random((6, 4))
        observations, actions, rewards, ended, cut, last = [seen], [], [], [], [], []
        for t in range(6):
            with torch.no_grad():
                weights = np.exp(
                    (logits := net(torch.from_numpy(seen))[0].numpy()) - logits.max(1, keepdims=True), dtype=np.float64
                )
            actions.append(
                [int((w.cumsum() <= d * w.cumsum()[-1]).sum()) for w, d in zip(weights, draws[t], strict=True)]
            )
            moved = [game.step(action) for game, action in zip(games, actions[-1], strict=True)]
            rewards.append([m[1] for m in moved])
            ended.append([m[2] for m in moved])
            cut.append([m[3] and not m[2] for m in moved])
            last += [m[0] for m, c in zip(moved, cut[-1], strict=True) if c]
            seen = np.stack([begin(k) if m[2] or m[3] else m[0] for k, m in enumerate(moved)])
            observations.append(seen)
        flat = torch.from_numpy(np.concatenate([*observations, *(x[None] for x in last)]))
        logits, values = net(flat)
        of_last = iter(values[28:, 0].tolist())
        values = values[:28].view(7, 4)
        known = values.detach()
        gain, later = torch.zeros(6, 4), torch.zeros(4)
        after = known[1:].clone()
        for t in range(6):
            for k in range(4):
                if cut[t][k]:
                    after[t, k] = next(of_last)
        for t in reversed(range(6)):
            going = torch.tensor([not (e or c) for e, c in zip(ended[t], cut[t], strict=True)]).float()
            alive = torch.tensor([not e for e in ended[t]]).float()
            later = torch.tensor(rewards[t]) + gamma * after[t] * alive - known[t] + gamma * going * later
            gain[t] = later
        logs = logits[:24].view(6, 4, 2).log_softmax(-1)
        chosen = logs.gather(-1, torch.tensor(actions)[..., None]).squeeze(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        loss = (0.5 * (gain + known[:-1] - values[:-1]).square() - chosen * gain - 0.01 * entropy).sum() / 24
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return {f"network.{name}": p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize("strategy", ["single_device", 'parameter_server(mode="ordered")'])
@pytest.mark.thorough
def test_one_worker_is_the_loop_that_is_written_by_hand_to_the_bit(strategy: str) -> None:
    workload = played.workload(model=played.Normed, actors=1, frames=200 * 4 * 6, anneal=False, clip_grad_norm=0.5)
    value = parse(strategy, "apportion.strategies")
    with by_value(played):
        (state,) = on_ranks(trained, 1, value, workload)
    by_hand = plain_a2c(200)
    assert by_hand.keys() == state.model.keys()
    assert all(torch.equal(state.model[name], weights) for name, weights in by_hand.items())


def test_shares_that_would_move_actors_are_refused() -> None:
    with pytest.raises(ValueError, match="would move actors between workers"), by_value(played):
        apportion.check(played.workload(), 'data_parallel(shares="measured")', workers=2, steps=2)


@pytest.mark.parametrize("strategy", ["local_sgd(every=2)", "local_sgd(every=4, overlap=True)"])
def test_averaged_replicas_play_as_their_reference_does(strategy: str) -> None:
    with by_value(played):
        proof = apportion.check(played.workload(actors=4), strategy, workers=2, steps=12)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


@pytest.mark.parametrize("strategy", ["data_parallel(microbatches=2)", "map_reduce(part=1)"])
def test_parts_of_a_batch_add_up(strategy: str) -> None:
    with by_value(played):
        proof = apportion.check(played.workload(actors=4), strategy, workers=2, steps=6)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


@pytest.mark.thorough
def test_what_was_trained_is_loaded_and_exported_as_what_acts(tmp_path: Path) -> None:
    """Called on observations: policy and value."""
    from apportion.api.export import export_run

    run = tmp_path / "run"
    apportion.train(f"{played.__file__}:normed", "single_device", run_dir=run, check=False)
    policy, value = apportion.load(run, trust=True)(torch.zeros(5, played.NUMBERS))
    assert (policy.shape, value.shape) == ((5, played.CHOICES), (5, 1))
    exported = export_run(run, path=tmp_path / "net.onnx", trust=True)
    assert exported.verification.difference <= exported.verification.limit
    assert [given["shape"] for given in exported.about["inputs"]] == [[None, played.NUMBERS]]


@pytest.mark.parametrize("strategy", ['parameter_server(mode="ordered")', "data_parallel"])
@pytest.mark.thorough
def test_a_proof_of_many_actors_has_them_play(strategy: str) -> None:
    """A proof takes few rows of large batches; of these it takes few actors, and no rollouts that nobody has played."""
    workload = played.workload(actors=48, environments=1, steps=3)
    few = few_rows(workload, 8, 6, 2)
    assert few.batch_size == 8
    assert isinstance(few.open_data(), ActedDataset)
    with by_value(played):
        proof = apportion.check(workload, strategy, workers=2, steps=4)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["a3c_cartpole", "a3c_acrobot"])
def test_the_examples_are_proved(name: str) -> None:
    proof = apportion.check(f"{EXAMPLES / name}.py:workload", 'parameter_server(mode="ordered")', workers=2, steps=4)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


def played_greedily(net: torch.nn.Module, episodes: int) -> float:
    """The mean return of the first episode of each of several CartPoles, with the more probable action at each step."""
    games = gymnasium.make_vec("CartPole-v1", num_envs=episodes, vectorization_mode="vector_entry_point")
    observations, _ = games.reset(seed=0)
    returned, under_way = np.zeros(episodes), np.ones(episodes, bool)
    while under_way.any():
        with torch.no_grad():
            logits, _ = net(torch.from_numpy(observations))
        observations, rewards, terminated, truncated, _ = games.step(logits.argmax(1).numpy())
        returned += np.where(under_way, rewards, 0.0)
        under_way &= ~(terminated | truncated)
    games.close()
    return float(returned.mean())


@pytest.mark.thorough
def test_the_best_checkpoint_of_an_asynchronous_run_solves_cartpole(tmp_path: Path) -> None:
    """The order of updates is that of the machine, and a policy that has solved it may be lost again: what such a run
    gives is the checkpoint that it calls the best, which is what ``load`` takes."""
    run_dir = apportion.train(
        f"{EXAMPLES}/a3c_cartpole.py:workload", "parameter_server", launcher=apportion.local(2, threads=1),
        run_dir=tmp_path / "run", check=False,
    ).run_dir  # fmt: skip
    assert played_greedily(apportion.load(run_dir), episodes=100) >= 475
