"""Every strategy, from a cold start and with its proof: it trains the network of a plain loop of torch, goes on from a
checkpoint under another strategy, and refuses by name what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import apportion

pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.thorough]
Trained = Callable[..., dict[str, Tensor]]
Furthest = Callable[[Any, Any], float]
STEPS, BATCH, ROWS = 12, 20, 70
"""The third epoch ends with a batch of 10 rows; the run ends in it."""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(6, 16, num_layers=2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0][:, -1])  # type: ignore[no-any-return]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.Linear(32, 3)
    )


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {dense: (6,), convolutional: (1, 8, 8), Recurrent: (5, 6)}


def rows(shape: tuple[int, ...]) -> Callable[[], TensorDataset]:
    def data() -> TensorDataset:
        inputs = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return TensorDataset(inputs, inputs.flatten(1)[:, :3].argmax(1))

    return data


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def work(model: Callable[[], nn.Module], **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": model,
        "data": rows(SHAPES[model]),
        "loss": functional.cross_entropy,
        "optimizer": momentum,
        "batch_size": BATCH,
        "steps": STEPS,
        "order": "sequential",
        "precision": "float64",
        "seed": 3,
    }
    return apportion.Workload(**{**given, **changes})


def plain_loop(workload: apportion.Workload) -> dict[str, Tensor]:
    """What a loop without this package makes of the weights that a run begins with."""
    torch.manual_seed(workload.seed)
    model = workload.model().double()
    optimizer = workload.optimizer(model.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    inputs, targets = workload.data().tensors
    for step in range(STEPS):
        at = step % -(-ROWS // BATCH) * BATCH
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[at : at + BATCH]), targets[at : at + BATCH]).backward()
        optimizer.step()
    return model.state_dict()


EXACT: list[tuple[str, Callable[[], nn.Module]]] = [
    ("single_device", dense),
    ("single_device(fused=True)", convolutional),
    ("data_parallel", convolutional),
    ("data_parallel(microbatches=2)", Recurrent),
    ("fully_sharded(min_num_params=100)", dense),
    ("layer_placement", convolutional),
    ("pipeline_parallel(microbatches=2)", dense),
    ("tensor_parallel(min_width=8)", dense),
    ("conv_parallel", convolutional),
    ('conv_parallel(split="channel")', convolutional),
    ("hybrid_parallel(min_width=8)", convolutional),
    ("wavefront_parallel", Recurrent),
    ("data_parallel(of=tensor_parallel(min_width=8), replicas=1)", dense),
]
IDS = [strategy for strategy, _ in EXACT]


@pytest.mark.parametrize(("strategy", "model"), EXACT, ids=IDS)
def test_a_run_is_proved_and_trains_the_network_of_a_plain_loop(
    strategy: str,
    model: Callable[[], nn.Module],
    trained: Trained,
    furthest: Furthest,
    tmp_path: Path,
    no_cached_proofs: Path,
) -> None:
    workload = work(model)
    found = trained(workload, strategy, 1 if strategy.startswith("single") else 2)
    assert furthest(found, plain_loop(workload)) < 1e-9
    events = [json.loads(line) for line in (tmp_path / "run0" / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events]
    assert {"start", "step", "checkpoint", "end"} <= set(kinds)
    assert [event["data"]["verdict"] for event in events if event["kind"] == "proof"] == (
        [] if strategy.startswith("single_device") else ["begun", "equal"]
    )
    assert (events[-1]["kind"], events[-1]["step"], events[-1]["data"]["reason"]) == ("end", STEPS, "finished")
    record = json.loads((tmp_path / "run0" / "run.json").read_text())
    assert record["strategy"].partition("(")[0] == strategy.partition("(")[0]


@pytest.mark.parametrize(("strategy", "model"), EXACT[2:], ids=IDS[2:])
def test_check_holds_on_three_workers(strategy: str, model: Callable[[], nn.Module]) -> None:
    workers = 2 if strategy.startswith(("layer", "pipeline", "wavefront")) else 3
    proof = apportion.check(work(model), strategy, launcher=apportion.local(workers=workers), steps=5)
    assert proof.holds
    assert proof.rounds[0].precision == "float64"
    assert all(comparison.worst.relative <= comparison.bound for comparison in proof.rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "model"),
    [
        ("data_parallel", "tensor_parallel(min_width=8)", dense),
        ("pipeline_parallel(microbatches=2)", "fully_sharded(min_num_params=100)", dense),
        ("conv_parallel", "single_device", convolutional),
        ("wavefront_parallel", "data_parallel", Recurrent),
    ],
)
def test_a_run_goes_on_under_another_strategy_and_on_another_number_of_workers(
    first: str, then: str, model: Callable[[], nn.Module], furthest: Furthest, tmp_path: Path
) -> None:
    run_dir, workload = tmp_path / "run", work(model)
    apportion.train(workload, first, launcher=apportion.local(workers=2), run_dir=run_dir, steps=5)
    launcher = apportion.local(workers=1 if then == "single_device" else 3)
    result = apportion.train(workload, then, launcher=launcher, run_dir=run_dir, resume=True)
    assert (result.step, result.reason) == (STEPS, "finished")
    assert furthest(apportion.load(run_dir, model=model).state_dict(), plain_loop(workload)) < 1e-9


def coupled(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - outputs.mean(0)) ** 2).mean() + functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("strategy", "changes", "named"),
    [
        ("conv_parallel", {"model": dense}, "conv_parallel"),
        ("hybrid_parallel", {"model": dense}, "hybrid_parallel"),
        ("wavefront_parallel", {"model": dense}, "wavefront_parallel"),
        ("tensor_parallel(min_width=0)", {"model": dense}, "min_width=0"),
        ("pipeline_parallel(stages=9)", {"model": dense}, "9"),
        ("data_parallel", {"batch_size": 1}, "batch_size=1"),
        ("data_parallel(microbatches=2)", {"loss": coupled, "count": None}, "microbatches=2"),
        ("fully_sharded", {"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS"),
        ("hogwild", {"carry": lambda outputs: outputs}, "carry"),
        ('parameter_server(rule="none")', {}, "none"),
        ("local_sgd(every=0)", {}, "every=0"),
        ("map_reduce(part=0)", {}, "part=0"),
    ],
)
def test_what_cannot_be_done_right_is_refused_by_name(
    strategy: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    model = changes.pop("model", dense)
    launcher = apportion.local(workers=2)
    with pytest.raises((ValueError, apportion.ApportionError), match=r"\w") as refused:
        apportion.train(work(model, **changes), strategy, launcher=launcher, run_dir=tmp_path / "run")
    assert named in str(refused.value)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_server_that_is_updated_in_order_is_held_to_its_own_reference(workers: int) -> None:
    launcher = apportion.local(workers=workers)
    assert apportion.check(work(dense), 'parameter_server(mode="ordered")', launcher=launcher, steps=5).holds


@pytest.mark.parametrize(
    ("strategy", "verdict"),
    [
        ("local_sgd(every=3)", "equal"),
        ("hogwild", "not proved"),
        ("parameter_server", "equal"),
        ("parameter_server(servers=1)", "equal"),
    ],
)
def test_an_approximate_strategy_says_so_and_learns(strategy: str, verdict: str, tmp_path: Path) -> None:
    evaluation = apportion.Evaluation(data=rows((6,)))
    workload = work(dense, steps=60, evaluation=evaluation)
    result = apportion.train(workload, strategy, launcher=apportion.local(workers=2), run_dir=tmp_path / "run")
    assert result.metrics["accuracy"] > 0.8
    proof = json.loads((tmp_path / "run" / "run.json").read_text())["proof"]
    assert proof["verdict"] == verdict
