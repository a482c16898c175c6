"""Replicas of networks in parts: data parallel over groups that each hold the whole network."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from killed import faults_of
from proofs import EXACT, assert_equal
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import apportion
from apportion import Evaluation, Policy, Workload, accuracy
from apportion.comm.world import World
from apportion.core.sampler import DataShard
from apportion.core.strategy import State, Strategy
from apportion.core.value import parse
from apportion.parallel.partition.replica_groups import how_many, how_many_are_left
from apportion.runtime.launch.local import Local
from apportion.strategies.conv_parallel import ConvParallel
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.parameter_server import ParameterServer
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.single_device import SingleDevice
from apportion.strategies.tensor_parallel import TensorParallel
from apportion.strategies.wavefront_parallel import WavefrontParallel

pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]


def prove(workload: Workload, strategy: Strategy, workers: int, steps: int = 5) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, strategy, workers=workers, steps=steps)
    assert_equal(proof)


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))


def mlp(batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(stack, networks.tabular(batch_size, 10), batch_size, **options)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 8), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip


def normalised(batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(images, networks.tabular(batch_size, 2, 4, 4), batch_size, **options)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=3, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


def recurrent(batch_size: int = 7, **options: Any) -> Workload:
    return networks.workload(Recurrent, networks.tabular(batch_size, 6, 3), batch_size, **options)


CASES: dict[str, tuple[Strategy, Any]] = {
    "layers": (LayerPlacement(), mlp),
    "layers_normalised": (LayerPlacement(), normalised),
    "pipeline": (PipelineParallel(microbatches=3), mlp),
    "tensor": (TensorParallel(), mlp),
    "tensor_normalised": (TensorParallel(), normalised),
    "conv": (ConvParallel(), normalised),
    "conv_channels": (ConvParallel(split="channel"), normalised),
    "wavefront": (WavefrontParallel(chunk=2), recurrent),
    "hybrid": (HybridParallel(), normalised),
}


@pytest.mark.parametrize("name", CASES)
def test_two_replicas_of_two_are_one_device(name: str) -> None:
    """Batches of 7, and a last one of 1: shares are uneven, and then one replica has none."""
    of, made = CASES[name]
    clipped = {"clip_grad_norm": 0.05} if name != "hybrid" else {}
    prove(made(**clipped), DataParallel(of=of, replicas=2), 4)


SEVERAL = ("layers_normalised", "pipeline", "tensor_normalised", "conv", "wavefront", "hybrid")
SOME = ("layers_normalised", "tensor_normalised", "conv", "hybrid")
"""Those that three groups of one are not the same code for."""


@pytest.mark.parametrize(
    ("name", "replicas", "workers"),
    [
        *((name, replicas, 2) for name in SEVERAL for replicas in (2, 1)),
        *(pytest.param(name, 3, 3, marks=pytest.mark.slow if name != SOME[0] else ()) for name in SOME),
    ],
)
def test_groups_of_one_and_a_single_group_are_one_device(name: str, replicas: int, workers: int) -> None:
    of, made = CASES[name]
    prove(made(), DataParallel(of=of, replicas=replicas), workers)


# What a workload may have


def tokens(batch_size: int) -> Workload:
    """Rows of 4 targets, of which some are ignored; all of the first rows' are."""
    n = networks.rows(batch_size)

    def data() -> TensorDataset:
        targets = networks.classes(n, 3, 4)
        targets[networks.classes(n, 2, 4, seed=5) == 0] = -100
        targets[: n // 2] = -100
        targets[0, 0] = 1
        return TensorDataset(networks.numbers(n, 4, 6), targets)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
        seen = (targets.flatten() != -100).to(each.dtype)
        return (each * seen).sum() / seen.sum()  # of no terms a NaN, and so is its gradient

    return networks.workload(
        model, data, batch_size, loss=loss, count=lambda y: float((y != -100).sum()), order="sequential"
    )


@pytest.mark.parametrize("of", [TensorParallel(), LayerPlacement(), PipelineParallel(microbatches=2)])
def test_replicas_are_weighted_by_their_terms_and_one_may_have_none(of: Strategy) -> None:
    prove(tokens(6), DataParallel(of=of, replicas=2), 4)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("coupled_examples", LayerPlacement()), ("coupled_examples", TensorParallel()),
        ("tied_weights", LayerPlacement()), ("tied_weights", TensorParallel()),
        ("class_weights", TensorParallel()), ("sparse_embeddings", LayerPlacement()),
        ("frozen_and_unused_parameters", TensorParallel()), ("parameter_groups", TensorParallel()),
        ("carried_state", TensorParallel()), ("draws_in_the_data", LayerPlacement()), ("augmented", TensorParallel()),
    ],
)  # fmt: skip
def test_what_a_workload_may_have(name: str, of: Strategy) -> None:
    prove(networks.cases[name](7), DataParallel(of=of, replicas=2), 4, 6)


def test_a_carried_state_goes_on_over_more_layers_than_workers() -> None:
    prove(networks.cases["carried_state"](7), DataParallel(of=WavefrontParallel(), replicas=2), 2, 6)


@pytest.mark.parametrize("of", [PipelineParallel(microbatches=2), TensorParallel()])
def test_adam_with_a_schedule(of: Strategy) -> None:
    options: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        "schedule": lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, steps),
        "clip_grad_norm": 0.5,
    }
    prove(mlp(**options), DataParallel(of=of, replicas=2), 4)


# The state


def go_on(world: World, strategy: Strategy, workload: Workload, state: State | None, steps: int) -> tuple[Any, ...]:
    step = strategy.build(workload, world)
    if state is not None:
        step.load_state_dict(state)
    losses = []
    for n in range(step.done, step.done + steps):
        assert step.data_shard is not None
        losses.append(step(step.source.at(n, step.data_shard))["loss"].item())
    outputs = step.predict(step.source.at(0, DataShard())), step.predict(step.source.at(3, DataShard()))
    return step.state_dict(), losses, outputs, step.parameters


@pytest.mark.parametrize("case", ["mlp", "carried_state"])
def test_a_state_goes_on_among_other_groups_and_everyone_is_told_the_loss(case: str) -> None:
    """And rank 0 or the last stage answers for a whole batch of 7, and for one of 1."""
    workload = mlp() if case == "mlp" else networks.cases[case](7)
    halves: Strategy = LayerPlacement() if case == "mlp" else TensorParallel()
    journey: list[tuple[Strategy, int, int]] = [
        (DataParallel(of=TensorParallel(), replicas=2), 4, 2), (DataParallel(of=halves, replicas=2), 4, 2),
        (DataParallel(of=halves, replicas=3), 3, 1), (SingleDevice(), 1, 1),
        (DataParallel(of=TensorParallel(), replicas=1), 2, 2),
    ]  # fmt: skip
    with by_value(networks):
        ((whole, told, _, parameters),) = on_ranks(go_on, 1, SingleDevice(), workload, None, 8)
        state, at = None, 0
        for strategy, workers, steps in journey:
            found = on_ranks(go_on, workers, strategy, workload, state, steps)
            state = found[-1][0]
            for other, losses, _, many in found:
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(other.tensors(), state.tensors(), strict=True))
                assert other.settings == state.settings
                assert losses == pytest.approx(told[at : at + steps], rel=1e-12)
                assert many == parameters
            answers = [outputs for _, _, outputs, _ in found if outputs[0] is not None]
            assert [len(out) for out in answers[0]] == [7, 1]
            assert len(answers) == 1
            at += steps
            if at == 4:
                ((_, _, expected, _),) = on_ranks(go_on, 1, SingleDevice(), workload, state, 0)
                for a, b in zip(answers[0], expected, strict=True):
                    assert (a - b).abs().max() <= 1e-12
    found_state, expected_state = dict(state.tensors()), dict(whole.tensors())
    assert found_state.keys() == expected_state.keys()
    assert all((found_state[key].double() - t.double()).abs().max() <= 1e-12 for key, t in expected_state.items())
    assert state.settings == whole.settings


def test_a_run_resumes_as_another_composite_and_is_measured_as_one_device_is(tmp_path: Path) -> None:
    held_out = TensorDataset(networks.numbers(9, 10, seed=8), networks.classes(9, 3, seed=9))
    evaluation = Evaluation(data=lambda: held_out, metrics={"accuracy": accuracy}, batch_size=4)
    workload = mlp(evaluation=evaluation, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))

    def trained(name: str, strategy: Strategy | str, workers: int, **options: Any) -> apportion.Event:
        launcher = Local(workers=workers, threads=1)
        return apportion.train(workload, strategy, launcher=launcher, run_dir=tmp_path / name, **options)

    written = "data_parallel(of=pipeline_parallel(microbatches=2), replicas=2)"
    with by_value(networks), by_value(sys.modules[__name__]):
        expected = trained("whole", SingleDevice(), 1)
        trained("run", written, 4, steps=4)
        assert json.loads((tmp_path / "run" / "run.json").read_text())["strategy"] == written
        found = trained("run", DataParallel(of=TensorParallel(), replicas=2), 4, resume=True)
    for left, right in zip(saved(tmp_path / "run"), saved(tmp_path / "whole"), strict=True):
        assert left.keys() == right.keys()
        assert all((left[key].double() - right[key].double()).abs().max() <= EXACT for key in right)
    assert found.data["metrics"] == pytest.approx(expected.data["metrics"], rel=1e-12)


def saved(run_dir: Path) -> list[dict[str, Tensor]]:
    folder = run_dir / "checkpoints" / "latest"
    return [load_file(folder / f"{part}.safetensors") for part in ("model", "optimizer")]


# A death


class Slow(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = networks.numbers(25, 10), networks.classes(25, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.0005)
        return self.x[i], self.y[i]


def slow() -> Workload:
    adam = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
    return networks.workload(stack, Slow, 8, optimizer=adam, clip_grad_norm=1.0, steps=120)


def run(
    workload: Workload, strategy: Strategy, workers: int, run_dir: Path, doomed: Sequence[int] = (), **options: Any
) -> list[apportion.Event]:
    with by_value(sys.modules[__name__]):
        return faults_of(workload, strategy, workers, run_dir, doomed, **options)


@pytest.mark.parametrize("of", [TensorParallel(), PipelineParallel(microbatches=2)], ids=["tensor", "pipeline"])
@pytest.mark.thorough
def test_any_rank_may_be_killed_and_nothing_is_lost(of: Strategy, tmp_path: Path) -> None:
    strategy = DataParallel(of=of, replicas=2)
    assert run(slow(), strategy, 4, tmp_path / "whole") == []
    faults = run(slow(), strategy, 4, tmp_path / "run", [0, 1, 3])
    assert [fault.data["rank"] for fault in faults] == [0, 1, 3]
    assert all(fault.data["action"].startswith("replaced in ") for fault in faults), faults
    for left, right in zip(saved(tmp_path / "run"), saved(tmp_path / "whole"), strict=True):
        assert left.keys() == right.keys()
        bound = 0.0 if isinstance(of, TensorParallel) else EXACT  # cuts are by measured times
        assert all((left[key].double() - right[key].double()).abs().max() <= bound for key in right)


@pytest.mark.thorough
def test_fewer_workers_make_fewer_and_larger_groups(tmp_path: Path) -> None:
    strategy, policy = DataParallel(of=TensorParallel(), replicas=2), Policy(on_loss="shrink")
    run(slow(), strategy, 4, tmp_path / "whole")
    faults = run(slow(), strategy, 4, tmp_path / "run", [1, 2], policy=policy)
    assert [fault.data["action"] for fault in faults] == ["goes on with 3 workers", "goes on with 2 workers"]
    for left, right in zip(saved(tmp_path / "run"), saved(tmp_path / "whole"), strict=True):
        assert all((left[key].double() - right[key].double()).abs().max() <= EXACT for key in right)


# Decisions, and what is refused


def test_how_many_replicas_there_are() -> None:
    tensor, staged = TensorParallel(), PipelineParallel(stages=2)
    assert [how_many(tensor, None, n) for n in (1, 2, 3, 4, 6, 9)] == [1, 2, 3, 2, 2, 3]
    assert [how_many(staged, None, n) for n in (2, 4, 6)] == [1, 2, 3]
    assert how_many(LayerPlacement(cuts=("2", "4")), None, 6) == 2
    assert [how_many(tensor, n, 6) for n in (1, 2, 3, 6)] == [1, 2, 3, 6]
    with pytest.raises(ValueError, match=r"replicas=2 of tensor_parallel cannot share 5 workers evenly: use workers=6"):
        how_many(tensor, 2, 5)
    with pytest.raises(ValueError, match=r"takes 2 workers each time, and there are 3: use a multiple of 2"):
        how_many(staged, None, 3)
    with pytest.raises(ValueError, match=r"replicas=4 .* cannot share 2 workers evenly: use workers=4"):
        how_many(tensor, 4, 2)
    assert [how_many_are_left(tensor, 2, n) for n in (4, 3, 2, 1)] == [2, 1, 2, 1]


def refused(workload: Workload, strategy: Strategy | str, rule: str, workers: int = 4) -> None:
    with pytest.raises(ValueError, match=rule), by_value(networks), by_value(sys.modules[__name__]):
        apportion.check(workload, strategy, workers=workers, steps=1)


def test_what_makes_no_replicas_is_refused_with_the_rule_and_the_cure() -> None:
    for other in ("data_parallel", "fully_sharded", "map_reduce", "single_device", "hogwild"):
        with pytest.raises(ValueError, match=rf"of={other} does not split a network: .* layer_placement, pipeline"):
            parse(f"data_parallel(of={other})", "apportion.strategies")
    with pytest.raises(ValueError, match=r"of='tensor_parallel' must be a strategy, as of=pipeline_parallel"):
        DataParallel(of="tensor_parallel")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"replicas=2 goes with of=.*: leave it out"):
        DataParallel(replicas=2)
    with pytest.raises(ValueError, match=r"replicas=0 must be a whole number of at least 1, or None"):
        DataParallel(of=TensorParallel(), replicas=0)
    with pytest.raises(ValueError, match=r"shares= and compress= are of replicas of one worker.*tensor_parallel"):
        DataParallel(of=TensorParallel(), microbatches=2)
    refused(mlp(), DataParallel(of=TensorParallel(), replicas=3), "cannot share 4 workers evenly: use workers=6")
    refused(mlp(1), DataParallel(of=TensorParallel(), replicas=2), "batch_size=1 cannot feed 2 replicas.*replicas<=1")
    refused(networks.cases["two_optimizers"](7), DataParallel(of=TensorParallel()), "update=.*use data_parallel")


def test_a_composite_is_written_as_it_is_read() -> None:
    for text in (
        "data_parallel(of=pipeline_parallel(microbatches=4), replicas=2)",
        "data_parallel(of=pipeline_parallel(stages=2, cuts=('2',)))",
        "data_parallel(of=tensor_parallel)",
    ):
        value = parse(text, "apportion.strategies")
        assert str(value) == text
        assert eval(repr(value), {"data_parallel": DataParallel, "pipeline_parallel": PipelineParallel,
                                  "tensor_parallel": TensorParallel()}) == value  # fmt: skip


# Downpour whose workers are groups


@pytest.mark.parametrize("name", [n if n in SEVERAL else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_groups_that_push_in_order_compute_what_is_said_of_them(name: str) -> None:
    of, made = CASES[name]
    clipped = {"clip_grad_norm": 0.05} if name != "hybrid" else {}
    prove_ordered(made(**clipped), ParameterServer(of=of, replicas=2, mode="ordered"), 4)


def prove_ordered(workload: Workload, strategy: Strategy, workers: int, steps: int = 8) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        proof = apportion.check(workload, strategy, workers=workers, steps=steps)
    assert_equal(proof, by_design=True)


@pytest.mark.parametrize(("replicas", "workers"), [(2, 2), (1, 2), (3, 3)])
def test_ordered_groups_of_one_and_a_single_one(replicas: int, workers: int) -> None:
    of: Strategy = TensorParallel()
    prove_ordered(normalised(), ParameterServer(of=of, replicas=replicas, mode="ordered"), workers)


@pytest.mark.parametrize("of", [TensorParallel(), PipelineParallel(microbatches=2)])
@pytest.mark.parametrize("mode", ["sharded", "hogwild"])
def test_one_group_is_one_device(of: Strategy, mode: Any) -> None:
    options: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "schedule": lambda o, steps: torch.optim.lr_scheduler.LinearLR(o, 0.3, 1.0, steps),
        "clip_grad_norm": 0.5,
    }
    prove_ordered(mlp(**options), ParameterServer(of=of, replicas=1, mode=mode), 2)


def test_schedules_and_clipping_are_those_of_each_gradient() -> None:
    options: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "schedule": lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, steps),
        "clip_grad_norm": 0.1,
    }
    prove_ordered(mlp(**options), ParameterServer(of=TensorParallel(), replicas=2, mode="ordered"), 4)


def downpour(world: World, workload: Workload, strategy: Strategy, steps: int) -> tuple[Any, ...]:
    step: Any = strategy.build(workload, world)
    seen = []
    for _ in range(steps):
        batch = step.take()
        if batch is None:
            break
        seen.append((batch.step, len(batch), batch.size))
        step(batch)
    return step.state_dict(), seen, step._store.done, step.done


def test_batches_are_dealt_in_turn_and_each_push_gets_into_every_place_once() -> None:
    """7 batches for 2 groups: in the last round the second one has none."""
    workload = mlp(steps=7)
    strategy = ParameterServer(of=TensorParallel(), replicas=2)
    with by_value(networks):
        found = on_ranks(downpour, 4, workload, strategy, 9)
    for rank, (state, seen, pushed, done) in enumerate(found):
        own = list(range(rank // 2, 7, 2))
        assert [step for step, many, _ in seen if many] == own
        assert [size for _, _, size in seen] == [14, 8, 14, 7]
        assert pushed == done == state.step == 7
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state.tensors(), found[0][0].tensors(), strict=True))


def test_downpour_of_groups_learns_and_resumes_as_something_else(tmp_path: Path) -> None:
    def data() -> TensorDataset:
        x = networks.numbers(96, 10)
        return TensorDataset(x, (x[:, :3].sum(1) > 0).long())

    evaluation = Evaluation(data=data, metrics={"accuracy": accuracy}, batch_size=32)
    workload = networks.workload(stack, data, 8, steps=60, evaluation=evaluation)
    text = "parameter_server(rule='adagrad(lr=0.05)', of=tensor_parallel, replicas=2)"
    launcher = Local(workers=4, threads=1)
    with by_value(networks), by_value(sys.modules[__name__]):
        first = apportion.train(workload, text, launcher=launcher, run_dir=tmp_path, steps=24)
        assert first.data["metrics"]["accuracy"] > 0.6
        found = apportion.train(workload, text, launcher=launcher, run_dir=tmp_path, resume=True)
        assert found.step == 60
    assert found.data["metrics"]["accuracy"] > 0.85


@pytest.mark.thorough
def test_a_killed_rank_sends_downpour_of_groups_back_to_its_checkpoint(tmp_path: Path) -> None:
    strategy = ParameterServer(of=TensorParallel(), replicas=2)
    faults = run(slow(), strategy, 4, tmp_path, [2], policy=Policy(checkpoint_every="2 steps"))
    assert faults[0].data["rank"] == 2
    assert any("started again" in fault.data["action"] for fault in faults), faults
    assert json.loads((tmp_path / "checkpoints" / "latest" / "state.json").read_text())["step"] == 120


def test_what_downpour_of_groups_cannot_do_is_refused() -> None:
    tensor = TensorParallel()
    for options, rule in (
        ({"servers": 1}, "servers=1 is of workers that are one process each.*leave it out"),
        ({"push_every": 2}, "push_every=2 is of workers.*leave it out"),
        ({"pull_every": 2}, "pull_every=2 is of workers.*leave it out"),
        ({"max_staleness": 1}, "max_staleness=1 is of workers.*leave it out"),
        ({"replicas": 0}, "replicas=0 must be a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=rule):
            ParameterServer(of=tensor, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of=parameter_server does not split a network"):
        ParameterServer(of=ParameterServer())
    with pytest.raises(ValueError, match="replicas=2 goes with of="):
        ParameterServer(replicas=2)
    refused(
        mlp(), ParameterServer(of=tensor, replicas=2), 'each run, .* no log to replay: check it with mode="ordered"'
    )
    refused(mlp(), ParameterServer(of=tensor, replicas=3), "cannot share 4 workers evenly")
    refused(networks.cases["carried_state"](7), ParameterServer(of=tensor, mode="ordered"), "carry= does not go with")
