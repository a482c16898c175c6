"""What a forward pass changes, or draws, is the same on several workers, after a death and after a resume."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import moving
import numpy as np
import pytest
import torch
from moving import Everything, Plain, Teacher, workload
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

import apportion
from apportion import Evaluation, Policy, Workload
from apportion.api import run_proof
from apportion.comm.world import World
from apportion.core.strategy import State, Strategy, batches
from apportion.errors import StateLost, WorkerFailed
from apportion.parallel.replica.forward_state import ForwardState
from apportion.parallel.replica.step import OneDeviceStep, reference
from apportion.parallel.tracing.network import undisturbed
from apportion.parallel.tracing.tracer import Unfollowed, follow
from apportion.runtime.launch.local import Local
from apportion.runtime.supervisor import run as supervisor
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.strategies.conv_parallel import ConvParallel
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.fully_sharded import FullySharded
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.local_sgd import LocalSgd
from apportion.strategies.map_reduce import MapReduce
from apportion.strategies.parameter_server import ParameterServer
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.single_device import SingleDevice
from apportion.strategies.tensor_parallel import TensorParallel
from apportion.strategies.wavefront_parallel import WavefrontParallel

EXACT = 1e-10
pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]
Found = dict[str, "State | str"]

# On two workers


def trained(world: World, workloads: dict[str, Workload], strategy: Strategy) -> Found:
    """The last state of each, or why it is refused."""
    found: Found = {}
    for name, given in workloads.items():
        try:
            step = strategy.build(given, world)
            for batch in batches(step):
                step(batch)
            world.group().barrier()
            found[name] = step.state_dict()
            step.close()
        except ValueError as error:
            found[name] = str(error)
    return found


def on_two(strategy: Strategy, nets: Sequence[type[Plain]], **changes: Any) -> None:
    workloads = {net.__name__: workload(net, **changes) for net in nets}
    with by_value(moving):
        answers = on_ranks(trained, 2, workloads, strategy)
    for name, given in workloads.items():
        *_, last = strategy.reference(given, 2)
        expected = dict(last.tensors())
        for answer in answers if strategy.exact else answers[:1]:
            assert isinstance(answer[name], State), f"{name}: {answer[name]}"
            found = dict(answer[name].tensors())
            assert found.keys() == expected.keys(), name
            for key, tensor in expected.items():
                assert (found[key].double() - tensor.double()).abs().max() <= EXACT, f"{name}: {key}"


SOON = [net for net in moving.NETS if net is not moving.LateTeacher]


def test_what_a_forward_changes_is_what_one_device_changes() -> None:
    on_two(DataParallel(), moving.NETS)


def test_where_every_rank_has_a_copy_too() -> None:
    on_two(DataParallel(), moving.NETS, optimizer=moving.nadam)


@pytest.mark.parametrize("strategy", [DataParallel(microbatches=2), MapReduce(part=2)], ids=str)
def test_parts_of_a_batch_change_it_once_a_step(strategy: Strategy) -> None:
    on_two(strategy, SOON)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_shards_leave_what_a_forward_moves_whole(microbatches: int) -> None:
    on_two(FullySharded(microbatches=microbatches), SOON)


@pytest.mark.parametrize("strategy", [TensorParallel(), LocalSgd(every=2), ParameterServer(mode="ordered")], ids=str)
def test_so_it_is_where_weights_are_sliced_averaged_or_stored(strategy: Strategy) -> None:
    on_two(strategy, SOON)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (MapReduce(part=2), {"LateTeacher": "teacher.weight"}),
        (FullySharded(), {"LateTeacher": "teacher.weight"}),
        (LayerPlacement(), {"Teacher": "teacher.weight", "TeacherByData": "teacher.weight", "Reassigned": "seen"}),
        (PipelineParallel(microbatches=2), {"Teacher": "teacher.weight", "TeacherByData": "teacher.weight"}),
    ],
    ids=lambda value: str(value) if isinstance(value, Strategy) else "",
)
def test_what_cannot_be_kept_is_refused_by_name(strategy: Strategy, names: dict[str, str]) -> None:
    workloads = {net.__name__: workload(net) for net in moving.NETS if net.__name__ in names}
    with by_value(moving):
        answers = on_ranks(trained, 2, workloads, strategy)
    for name, told in names.items():
        assert all(isinstance(answer[name], str) and told in answer[name] for answer in answers), answers


# Killed, and resumed


@contextmanager
def pools() -> Iterator[list[WorkerPool]]:
    made: list[WorkerPool] = []
    with pytest.MonkeyPatch.context() as patch, by_value(moving):
        patch.setattr(supervisor, "WorkerPool", lambda *given: made.append(WorkerPool(*given)) or made[-1])
        yield made


def left(run_dir: Path) -> dict[str, Tensor]:
    folder = run_dir / "checkpoints" / "latest"
    return {f"{path.stem}/{k}": t for path in sorted(folder.glob("*.safetensors")) for k, t in load_file(path).items()}


def ran(given: Workload, strategy: Strategy, run_dir: Path, kills: Sequence[int] = (), **options: Any) -> int:
    """Ranks are killed in turn, after these steps, each when the one before has been replaced; the faults."""
    faults = killed = 0
    launcher = Local(workers=1 if strategy.one_process else 2, threads=1)
    with pools() as made:
        for event in apportion.run(given, strategy, launcher=launcher, run_dir=run_dir, **options):
            faults += event.kind == "fault"
            if killed < len(kills) and killed == faults and event.kind == "step" and event.step >= kills[killed]:
                os.kill(made[-1].pids()[killed % 2], signal.SIGKILL)
                killed += 1
    assert killed == len(kills)
    return faults


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert {n: found[n] - t for n, t in expected.items() if not torch.equal(found[n], t)} == {}


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [(DataParallel(), moving.sgd), (DataParallel(), moving.nadam), (MapReduce(part=6), moving.sgd)],
    ids=["shared pages", "copies", "map_reduce"],
)
@pytest.mark.thorough
def test_two_deaths_change_no_bit(strategy: Strategy, optimizer: Any, tmp_path: Path) -> None:
    given = workload(Everything, steps=100, pause=0.006, optimizer=optimizer, precision="float32")
    assert ran(replace(given, model=lambda: Everything()), strategy, tmp_path / "undisturbed") == 0
    assert ran(given, strategy, tmp_path / "killed", (1, 40)) == 2
    expected = left(tmp_path / "undisturbed")
    assert expected["model/parts.0.seen"] == 100
    assert "buffers/parts.1.seen" in expected
    same(left(tmp_path / "killed"), expected)


@pytest.mark.parametrize("strategy", [SingleDevice(), DataParallel(), FullySharded()], ids=str)
def test_a_resume_changes_no_bit(strategy: Strategy, tmp_path: Path) -> None:
    whole = workload(Everything, steps=9)
    ran(whole, strategy, tmp_path / "whole")
    ran(replace(whole, steps=5), strategy, tmp_path / "cut")
    ran(whole, strategy, tmp_path / "cut", resume=True)
    same(left(tmp_path / "cut"), left(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("net", [*SOON, Everything], ids=lambda net: net.__name__)
@pytest.mark.parametrize("strategy", [DataParallel(), MapReduce(part=6), TensorParallel()], ids=str)
def test_twenty_deaths_change_no_bit(strategy: Strategy, net: type[Plain], tmp_path: Path) -> None:
    given = workload(net, steps=2000, pause=0.005, precision="float32")
    ran(replace(given, model=net), strategy, tmp_path / "undisturbed")
    kills = [1 + 85 * number for number in range(20)]
    assert ran(given, strategy, tmp_path / "killed", kills, policy=Policy(max_restarts=25)) == 20
    same(left(tmp_path / "killed"), left(tmp_path / "undisturbed"))


IN_PARTS: list[tuple[Strategy, type[Plain]]] = [
    (TensorParallel(), moving.Gates),
    (LayerPlacement(), moving.Gates),
    (PipelineParallel(microbatches=1), moving.Gates),
    (PipelineParallel(microbatches=2), moving.Draws),
    (PipelineParallel(microbatches=2, recompute=True), moving.Draws),
    (ConvParallel(), moving.ImageGates),
    (WavefrontParallel(), moving.SequenceGates),
]
parts = pytest.mark.parametrize(("strategy", "net"), IN_PARTS, ids=[f"{s}-{net.__name__}" for s, net in IN_PARTS])


@parts
def test_layers_that_move_or_draw_are_one_devices_in_every_part(strategy: Strategy, net: type[Plain]) -> None:
    on_two(strategy, [net])


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (LayerPlacement(cuts=("inner.layers",)), "no stage can begin with 'inner.layers', since last.scales, which"),
        (PipelineParallel(microbatches=1, cuts=("inner.layers",)), "since last.scales, which changes, would be used"),
        (WavefrontParallel(), "first.scales, which the forward changes, is used before inner.layers and after it"),
    ],
    ids=lambda value: str(value) if isinstance(value, Strategy) else "",
)
def test_who_moves_a_memory_and_who_looks_at_it_are_not_parted(strategy: Strategy, told: str) -> None:
    with by_value(moving):
        for answer in on_ranks(trained, 2, {"net": workload(moving.OneMemory)}, strategy):
            assert told in str(answer["net"])


@pytest.mark.parametrize("strategy", [LayerPlacement(), PipelineParallel(microbatches=1), DataParallel()], ids=str)
def test_elsewhere_they_are_one_devices(strategy: Strategy) -> None:
    on_two(strategy, [moving.OneMemory, moving.TwoNames], steps=8)


@pytest.mark.thorough
def test_a_run_is_proved_with_its_stages_cut_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are cut is a matter of times, which are others for the few rows of a proof."""
    asked: list[Any] = []
    prove = run_proof.prove
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(run_proof, "prove", lambda request, *ranks: asked.append(request) or prove(request, *ranks))
    with pools():
        given, run_dir = workload(moving.Gates), tmp_path / "run"
        launcher = Local(workers=2, threads=1)
        events = list(apportion.run(given, LayerPlacement(), launcher=launcher, run_dir=run_dir, check=True))
    assert [e.data["proof"]["verdict"] for e in events if e.kind == "start"] == ["equal"]
    assert asked
    assert all(len(request.chosen.strategy.cuts) == 1 for request in asked)


def test_hybrid_refuses_them_by_name() -> None:
    with by_value(moving):
        for answer in on_ranks(trained, 2, {"gates": workload(moving.ImageGates)}, HybridParallel()):
            assert "gated.0 cannot be followed: it changes its own net.seen" in str(answer["gates"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@parts
def test_twenty_deaths_change_no_bit_of_a_network_in_parts(
    strategy: Strategy, net: type[Plain], tmp_path: Path
) -> None:
    given = workload(net, steps=2000, pause=0.01, precision="float32")
    ran(replace(given, model=net), strategy, tmp_path / "undisturbed")
    kills = [1 + 85 * number for number in range(20)]
    assert ran(given, strategy, tmp_path / "killed", kills, policy=Policy(max_restarts=25)) == 20
    same(left(tmp_path / "killed"), left(tmp_path / "undisturbed"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", [SingleDevice(), FullySharded(), *(s for s, _ in IN_PARTS)], ids=str)
def test_stopped_and_resumed_four_times_it_has_the_same_bits(strategy: Strategy, tmp_path: Path) -> None:
    net = dict(IN_PARTS[::-1]).get(strategy, Everything)
    whole = workload(net, steps=25)
    ran(whole, strategy, tmp_path / "whole")
    for steps in (4, 9, 15, 22, 25):
        ran(replace(whole, steps=steps), strategy, tmp_path / "cut", resume=steps > 4)
    same(left(tmp_path / "cut"), left(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", [SingleDevice(), FullySharded()], ids=str)
def test_twenty_deaths_of_a_run_that_stops_and_is_resumed_change_no_bit(strategy: Strategy, tmp_path: Path) -> None:
    given = workload(Everything, steps=400, pause=0.005, precision="float32")
    ran(replace(given, model=Everything), strategy, tmp_path / "undisturbed")
    policy = Policy(checkpoint_every="5 steps", max_restarts=0)
    deaths = 0
    while True:
        at = 18 * (deaths + 1) if deaths < 20 else 0
        try:
            ran(given, strategy, tmp_path / "killed", (at,) if at else (), policy=policy, resume=deaths > 0)
            break
        except WorkerFailed:
            deaths += 1
    assert deaths == 20
    same(left(tmp_path / "killed"), left(tmp_path / "undisturbed"))


# Generators


def drawn(world: World, seed: int) -> list[tuple[float, float, float]]:
    step = OneDeviceStep(replace(workload(Plain), seed=seed), world.device, rank=world.rank)
    found = []
    for number in (0, 1, 0):
        step.replica.reseed(number)
        found.append((random.random(), float(np.random.random()), float(torch.rand(()))))
    return found


def test_every_generator_is_a_function_of_the_seed_and_the_step() -> None:
    with by_value(moving):
        first, second = on_ranks(drawn, 2, 5)
    for found in (first, second):
        assert found[0] == found[2] != found[1]
    assert [draws[:2] for draws in first] == [draws[:2] for draws in second]
    assert first[0][2] != second[0][2], "torch's draws are a rank's own"


# To look


class EvaluatedToo(moving.InPlace):
    """Counts every pass, those of an evaluation too."""

    def moved(self) -> Any:
        self.seen.add_(1)
        return 1 / (1 + 0.01 * self.seen)


@pytest.mark.parametrize("strategy", [DataParallel(), MapReduce(part=6)], ids=str)
def test_an_evaluation_leaves_no_trace(strategy: Strategy, tmp_path: Path) -> None:
    plain = workload(Plain, steps=8)
    plain = replace(plain, model=EvaluatedToo)
    held_out = Evaluation(data=plain.data, metrics={"loss": nn.functional.cross_entropy}, every=0.5)
    with by_value(sys.modules[__name__]):
        ran(plain, strategy, tmp_path / "without")
        ran(replace(plain, evaluation=held_out), strategy, tmp_path / "with")
    found = left(tmp_path / "with")
    assert found["model/seen"] == 8
    same(found, left(tmp_path / "without"))


@pytest.mark.parametrize("net", [moving.Teacher, moving.TeacherByData])
def test_a_trace_and_a_look_leave_a_teacher_alone(net: type[Teacher]) -> None:
    model, x = net(), torch.randn(4, 5)
    with torch.no_grad():
        model.inner.weight.add_(1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(Unfollowed, match=r"changes its own teacher\.bias, teacher\.weight"):
        follow(model, x)
    with undisturbed(model) as changed:
        model(x)
        assert changed() == ["teacher.weight", "teacher.bias"]
    same(dict(model.state_dict()), before)


# The account itself


def test_a_roll_back_is_by_name_and_leaves_other_tensors_alone() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(2))
            self.register_buffer("table", torch.zeros(3, 2), persistent=False)
            self.register_buffer("row", self.table[1])

        def forward(self, x: Tensor) -> None:
            self.last = x
            self.row.add_(1)

    model = Keeps()
    state = ForwardState(model, ())
    x, y = torch.ones(2), torch.full((2,), 5.0)
    model(x)
    state.commit()
    model(y)
    state.roll_back()
    assert (x == 1).all()
    assert (y == 5).all(), "what the forward put there is somebody else's"
    assert (model.last == 1).all()
    assert model.table.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert model.row.data_ptr() == model.table[1].data_ptr()
    assert set(state.extra_buffers()) == {"table"}


def test_what_is_frozen_is_not_copied_until_it_moves() -> None:
    model = moving.Plain()
    model.inner.requires_grad_(False)
    state = ForwardState(model, model.outer.parameters())
    for _ in range(5):
        state.commit()
    assert not state.copies()
    model.inner.weight.data.mul_(2)
    with pytest.raises(StateLost):
        state.roll_back()
    for _ in range(4):
        state.commit()
    assert set(state.copies()) == {"inner.weight"}
    kept = model.inner.weight.clone()
    model.inner.weight.data.mul_(2)
    state.roll_back()
    assert torch.equal(model.inner.weight, kept)


def test_a_loaded_network_has_the_buffers_beside_its_state(tmp_path: Path) -> None:
    ran(workload(moving.Hidden, steps=7), DataParallel(), tmp_path / "run")
    loaded: Any = apportion.load(tmp_path / "run", model=moving.Hidden)
    assert loaded.seen == 7
    *_, last = reference(workload(moving.Hidden, steps=7))
    assert last.buffers["seen"] == 7
