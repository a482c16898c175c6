"""The losses and the weights of a run are those of a plain loop of torch, whatever the strategy and the number of
workers; they are the same bits each time, and after a run was stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_work import BATCH, ROWS, STEPS, Recurrent, convolutional, dense, events_of, losses_of, work
from torch import Tensor, nn

import apportion

pytestmark = pytest.mark.filterwarnings("ignore:.*they take turns")
Furthest = Callable[[Any, Any], float]

EXACT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "single_device": (dense, 1),
    "single_device(fused=True)": (dense, 1),
    "data_parallel": (convolutional, 2),
    "data_parallel(microbatches=2)": (dense, 3),
    "map_reduce": (dense, 3),
    "fully_sharded(min_num_params=100)": (dense, 3),
    "layer_placement": (convolutional, 2),
    "pipeline_parallel(microbatches=2)": (dense, 2),
    "tensor_parallel(min_width=8)": (dense, 3),
    "conv_parallel": (convolutional, 3),
    'conv_parallel(split="channel")': (convolutional, 2),
    "hybrid_parallel(min_width=8)": (convolutional, 2),
    "wavefront_parallel": (Recurrent, 2),
}


def plain_loop(workload: apportion.Workload) -> tuple[list[float], dict[str, Tensor]]:
    """What a loop without this package makes of the weights that a run begins with: losses and weights."""
    torch.manual_seed(workload.seed)
    model = workload.model().double()
    optimizer = workload.optimizer(model.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    inputs, targets = workload.data().tensors
    losses = []
    for step in range(STEPS):
        at = step % (ROWS // BATCH) * BATCH
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[at : at + BATCH]), targets[at : at + BATCH])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("strategy", EXACT)
def test_a_proved_run_has_the_losses_and_the_weights_of_a_plain_loop(
    strategy: str, tmp_path: Path, furthest: Furthest, no_cached_proofs: Path
) -> None:
    model, workers = EXACT[strategy]
    workload, run_dir = work(model, order="sequential"), tmp_path / "run"
    result = apportion.train(workload, strategy, launcher=apportion.local(workers=workers), run_dir=run_dir)
    losses, weights = plain_loop(workload)
    assert (result.step, result.reason) == (STEPS, "finished")
    assert losses_of(run_dir) == pytest.approx(losses, abs=1e-11)
    assert furthest(apportion.load(run_dir, model=model).state_dict(), weights) < 1e-10
    verdicts = [event["data"]["verdict"] for event in events_of(run_dir) if event["kind"] == "proof"]
    assert verdicts == ([] if workers == 1 else ["begun", "equal"])


@pytest.mark.parametrize("strategy", ["data_parallel", "fully_sharded(min_num_params=100)", "map_reduce"])
def test_one_two_and_three_workers_have_the_same_losses(strategy: str, tmp_path: Path) -> None:
    found = []
    for workers in (1, 2, 3):
        run_dir = tmp_path / str(workers)
        launcher = apportion.local(workers=workers)
        apportion.train(work(), strategy, launcher=launcher, run_dir=run_dir, check=False)
        found.append(losses_of(run_dir))
    assert len(found[0]) == STEPS
    assert found[1] == pytest.approx(found[0], abs=1e-12)
    assert found[2] == pytest.approx(found[0], abs=1e-12)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize(
    "strategy", ["data_parallel", "fully_sharded(min_num_params=100)", "tensor_parallel(min_width=8)"]
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    strategy: str, tmp_path: Path, furthest: Furthest
) -> None:
    workload = work(optimizer=adam, steps=8)
    given: dict[str, Any] = {"launcher": apportion.local(workers=2), "check": False}
    apportion.train(workload, strategy, run_dir=tmp_path / "whole", **given)
    apportion.train(workload, strategy, run_dir=tmp_path / "parts", steps=3, **given)
    result = apportion.train(workload, strategy, run_dir=tmp_path / "parts", resume=True, **given)
    assert (result.step, result.reason) == (8, "finished")
    whole, parts = (apportion.load(tmp_path / name, model=dense).state_dict() for name in ("whole", "parts"))
    assert furthest(whole, parts) == 0
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "parts")
    starts = [event["data"] for event in events_of(tmp_path / "parts") if event["kind"] == "start"]
    assert [(start["first_step"], start["resumed"]) for start in starts] == [(0, False), (3, True)]


@pytest.mark.parametrize(
    ("first", "then", "workers"),
    [
        ("data_parallel", "data_parallel", 3),
        ("tensor_parallel(min_width=8)", "single_device", 1),
        ("single_device", "pipeline_parallel(microbatches=2)", 2),
    ],
)
def test_a_run_is_resumed_under_another_strategy_and_on_other_workers(
    first: str, then: str, workers: int, tmp_path: Path, furthest: Furthest
) -> None:
    workload, run_dir = work(order="sequential"), tmp_path / "run"
    own = apportion.local(workers=1 if first == "single_device" else 2)
    apportion.train(workload, first, launcher=own, run_dir=run_dir, steps=2, check=False)
    apportion.train(workload, then, launcher=apportion.local(workers=workers), run_dir=run_dir, resume=True)
    losses, weights = plain_loop(workload)
    assert losses_of(run_dir) == pytest.approx(losses, abs=1e-11)
    assert furthest(apportion.load(run_dir, model=dense).state_dict(), weights) < 1e-10


def test_a_seed_decides_the_run(tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((5, 5, 6, None)):
        run_dir, launcher = tmp_path / str(number), apportion.local(workers=2)
        apportion.train(work(), "data_parallel", launcher=launcher, run_dir=run_dir, seed=seed, check=False)
        found.append(losses_of(run_dir))
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert found[3] not in found[:3], "without a seed it is that of the workload"


def test_one_command_gives_the_same_bits_twice(tmp_path: Path, furthest: Furthest) -> None:
    for name in ("one", "two"):
        launcher = apportion.local(workers=3)
        apportion.train(work(), "data_parallel", launcher=launcher, run_dir=tmp_path / name)
    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "two")
    one, two = (apportion.load(tmp_path / name, model=dense).state_dict() for name in ("one", "two"))
    assert furthest(one, two) == 0


def test_a_resumed_run_that_has_no_checkpoint_yet_is_started_or_refused(tmp_path: Path) -> None:
    with pytest.raises((ValueError, apportion.CheckpointError)):
        apportion.train(work(), "single_device", run_dir=tmp_path / "none", resume=True)
    result = apportion.train(work(), "single_device", run_dir=tmp_path / "none", resume="auto")
    assert result.step == STEPS
    again = apportion.train(work(), "single_device", run_dir=tmp_path / "none", resume="auto", steps=STEPS + 2)
    assert again.step == STEPS + 2
    assert len(losses_of(tmp_path / "none")) == STEPS + 2


@pytest.mark.parametrize("strategy", ["local_sgd(every=2)", "parameter_server", "hogwild"])
def test_an_approximate_strategy_makes_all_its_steps(strategy: str, tmp_path: Path, no_cached_proofs: Path) -> None:
    run_dir = tmp_path / "run"
    result = apportion.train(work(steps=12), strategy, launcher=apportion.local(workers=2), run_dir=run_dir)
    assert (result.step, result.reason) == (12, "finished")
    proofs = [event["data"]["verdict"] for event in events_of(run_dir) if event["kind"] == "proof"]
    assert proofs[-1] == ("not proved" if strategy == "hogwild" else "equal")
    assert all(torch.isfinite(value).all() for value in apportion.load(run_dir, model=dense).state_dict().values())
