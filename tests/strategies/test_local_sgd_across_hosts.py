"""local_sgd where no memory holds all replicas: one sum of the weights a round, also while the next one is computed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from commands import finish, start
from ranks import by_value, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion import Workload
from apportion.comm.network.hierarchical_group import HierarchicalGroup
from apportion.comm.network.network_group import NetworkGroup
from apportion.comm.network.rank_connection import RankConnection
from apportion.comm.network.rendezvous import meet
from apportion.comm.world import World
from apportion.core.strategy import State, batches
from apportion.errors import StateLost
from apportion.parallel.averaging.collective_average import ContributionHeader, ContributionHeaders, gather_headers
from apportion.parallel.averaging.rounds import assigned_round
from apportion.runtime.supervisor import run as supervisor
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.strategies.local_sgd import LocalSgd, LocalSgdStep

pytestmark = pytest.mark.processes

EXACT = 1e-10
OVERLAP = LocalSgd(every=3, overlap=True)


def on_hosts(world: World, hosts: list[int]) -> World:
    """The same ranks as if they were on these hosts; those of a host have memory in common."""
    flat = NetworkGroup(meet(world.rank, world.size, one_host=True, insecure=False), range(world.size))
    ranks = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    own = replace(world, channel=None, local_rank=ranks.index(world.rank), local_size=len(ranks), _groups={})
    flat.all_waits = own.all_waits
    own._groups["world"] = HierarchicalGroup.make(flat, hosts, spins=False)
    return own


def trained(
    world: World, hosts: list[int], strategy: LocalSgd, workload: Workload, first: State | None, stop: int | None = None
) -> list[State]:
    """Each average in turn, as a state. In a round there is none to be had: ranks do not take it at one point."""
    own = on_hosts(world, hosts)
    step = strategy.build(workload, own)
    assert step.lockstep
    if first is not None:
        step.load_state_dict(first)
    states, done = [], step.done
    for batch in batches(step, stop=stop):
        step(batch)
        if step.done != done:
            done = step.done
            states.append(step.state_dict())
    if step.done != done:  # this rank has had no batch in the last round
        states.append(step.state_dict())
    step.close()
    own.close()
    return states


def assert_same(found: State, expected: State, bound: float = EXACT) -> None:
    left, right = dict(found.tensors()), dict(expected.tensors())
    assert left.keys() == right.keys()
    assert found.step == expected.step
    for name, tensor in right.items():
        assert (left[name].double() - tensor.double()).abs().max() <= bound, name


STRATEGIES = [
    LocalSgd(every=3),
    LocalSgd(every=2, outer="nesterov", slots="averaged"),
    OVERLAP,
    LocalSgd(every=2, outer="nesterov", overlap=True),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(
    ("name", "hosts", "steps"),
    [("adam", [0, 1], 13), ("batch_norm_2d", [0, 0, 1], 28), ("one_cycle", [0, 1, 2], 23)],
)
def test_every_average_is_that_of_the_reference(name: str, hosts: list[int], steps: int, strategy: LocalSgd) -> None:
    """Also with 2 + 1 ranks, and where the last round has batches for some ranks alone, or more for some."""
    workload = replace(networks.cases[name](61), steps=steps, epochs=None)
    expected = {state.step: state for state in strategy.reference(workload, len(hosts)) if state.step}
    with by_value(networks):
        for states in on_ranks(trained, len(hosts), hosts, strategy, workload, None):
            assert [state.step for state in states] == list(expected)
            assert states[-1].step == steps
            for state in states:
                assert_same(state, expected[state.step])


@pytest.mark.parametrize("name", ["buffers", "tied_weights", "frozen_and_unused_parameters", "draws_in_the_data"])
def test_every_kind_of_workload_is_averaged_a_round_late(name: str) -> None:
    workload = replace(networks.cases[name](61), steps=14, epochs=None)
    expected = {state.step: state for state in OVERLAP.reference(workload, 2) if state.step}
    with by_value(networks):
        for states in on_ranks(trained, 2, [0, 1], OVERLAP, workload, None):
            assert [state.step for state in states] == list(expected)
            for state in states:
                assert_same(state, expected[state.step])


@pytest.mark.parametrize(("workers", "name"), [(1, "mlp"), (2, "adam"), (3, "batch_norm_2d")])
def test_check_compares_averages_that_come_late(workers: int, name: str) -> None:
    workload = replace(networks.cases[name](61), steps=8 * workers)
    with by_value(networks):
        proof = apportion.check(workload, OVERLAP, workers=workers, steps=8)
    assert proof.holds
    assert proof.rounds[0].worst.absolute <= EXACT


def test_a_run_goes_on_from_an_average_that_came_late_with_every_batch_that_is_not_in_it() -> None:
    workload = replace(networks.cases["one_cycle"](61), steps=24, epochs=None)
    with by_value(networks):
        first = on_ranks(trained, 2, [0, 1], OVERLAP, workload, None, 6)[0][-1]
        assert first.step == 6, "the batches from 6 to 12 were in no average yet"
        rest = on_ranks(trained, 2, [0, 1], OVERLAP, workload, first)
    assert [state.step for state in rest[0]] == [12, 24], "the last two come together"
    assert_same(rest[1][-1], rest[0][-1], 0.0)


# What travels


def wide(inputs: int = 200) -> nn.Module:
    layers = (nn.Linear(inputs, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 100), nn.Linear(100, 3))
    return nn.Sequential(*layers)


def wide_workload(steps: int) -> Workload:
    adam = lambda p: torch.optim.Adam(p, lr=0.001)  # noqa: E731
    data = lambda: TensorDataset(networks.numbers(64, 200), networks.classes(64, 3))  # noqa: E731
    return networks.workload(wide, data, 16, optimizer=adam, steps=steps, epochs=None)


def sent(world: World, hosts: list[int], strategy: LocalSgd, rounds: int) -> int:
    """The bytes that this rank sends over connections in so many rounds."""
    own = on_hosts(world, hosts)
    step = strategy.build(wide_workload((rounds + 1) * world.size * strategy.every), own)
    counted, send = [0], RankConnection.send

    def count(self: RankConnection, data: memoryview) -> int:
        counted[0] += data.nbytes
        return send(self, data)

    for batch in batches(step, stop=world.size * strategy.every):  # connections are made
        step(batch)
    RankConnection.send = count  # type: ignore[method-assign]
    for batch in batches(step):
        step(batch)
    RankConnection.send = send  # type: ignore[method-assign]
    step.close()
    own.close()
    return counted[0]


@pytest.mark.parametrize("slots", ["kept", "averaged"])
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1, 1], [0, 0, 1]])
def test_a_host_sends_the_weights_once_a_round_and_slots_where_they_are_averaged(hosts: list[int], slots: Any) -> None:
    rounds = 4
    weights = sum(t.numel() * 8 for t in wide().state_dict().values())
    with by_value(networks):
        counted = on_ranks(sent, len(hosts), hosts, LocalSgd(every=2, slots=slots), rounds)
    for host in set(hosts):
        each = sum(n for n, at in zip(counted, hosts, strict=True) if at == host) / rounds
        assert each <= 1.05 * weights * (1 if slots == "kept" else 3)
        assert each >= 0.99 * weights * (1 if slots == "kept" else 2.99)


def beside(world: World) -> list[bool]:
    """Nothing is added up until this rank has made the first step of the next round: does it get there?"""
    own = on_hosts(world, [0, 1])
    step = LocalSgd(every=2, overlap=True).build(wide_workload(12), own)
    assert isinstance(step, LocalSgdStep)
    went_on, found, add_up = threading.Event(), [], NetworkGroup.add_up

    def held_back(self: NetworkGroup, tensor: Tensor) -> None:
        if (
            threading.current_thread() is not threading.main_thread() and len(found) < 2
        ):  # the last is waited for at once
            found.append(went_on.wait(20))
            went_on.clear()
        add_up(self, tensor)

    NetworkGroup.add_up = held_back  # type: ignore[method-assign]
    for number, batch in enumerate(batches(step)):
        step(batch)
        if number in (2, 4):
            went_on.set()
    NetworkGroup.add_up = add_up  # type: ignore[method-assign]
    step.close()
    own.close()
    return found


def test_the_sum_goes_on_beside_the_steps_of_the_next_round() -> None:
    with by_value(networks):
        assert on_ranks(beside, 2) == [[True] * 2] * 2


# Runs

RUNS = """
import dataclasses

import apportion
from work import workload

for overlap in (False, True):
    strategy = apportion.local_sgd(every=2, overlap=overlap)
    often = apportion.Policy(checkpoint_every="1 steps")
    options = {"launcher": apportion.env(device="cpu"), "policy": often, "check": False}
    end = apportion.train(workload, strategy, run_dir=f"whole-{overlap}", **options)
    assert (end.reason, set(end.metrics)) == ("finished", {"accuracy"}), "on every rank"
    long = dataclasses.replace(workload, steps=100_000)
    for event in apportion.run(long, strategy, run_dir=f"cut-{overlap}", **options):
        if event.kind == "step" and event.step >= 12:  # rank 0 is told alone
            break
    assert apportion.train(workload, strategy, run_dir=f"rest-{overlap}", steps=18, **options).step == 18
    assert apportion.train(workload, strategy, run_dir=f"rest-{overlap}", resume=True, **options).step == 31
"""
WORK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def examples():
    x = torch.randn(56, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


workload = apportion.Workload(
    model=network,
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    batch_size=15,
    steps=31,
    precision="float64",
    evaluation=apportion.Evaluation(data=examples, every=1),
)
"""


@pytest.mark.slow
def test_a_run_under_torchrun_saves_evaluates_stops_and_resumes_on_all_ranks_at_one_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """31 batches are five rounds of 3 ranks, and one of a single batch."""
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "runs.py").write_text(RUNS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    finish([start([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "runs.py"])])
    from apportion.core.address import load_workload

    workload = load_workload("work.py:workload")
    for overlap in (False, True):
        *_, expected = LocalSgd(every=2, overlap=overlap).reference(workload, 3)
        found = load_file(tmp_path / f"whole-{overlap}" / "checkpoints" / "latest" / "model.safetensors")
        for name, tensor in expected.model.items():
            assert (found[name].double() - tensor.double()).abs().max() <= EXACT, name
        steps = {run: saved_steps(tmp_path / f"{run}-{overlap}") for run in ("whole", "cut", "rest")}
        assert steps["whole"][-1] == steps["rest"][-1] == 31
        assert 12 <= steps["cut"][-1] < 100_000
        assert all(step % 6 == 0 for step in steps["cut"])


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.thorough
def test_a_killed_worker_of_a_run_whose_averages_come_late_has_it_go_back_to_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[WorkerPool] = []
    monkeypatch.setattr(supervisor, "WorkerPool", lambda *made: pools.append(WorkerPool(*made)) or pools[-1])
    workload = replace(networks.cases["mlp"](61), steps=3000, epochs=None)
    launcher, causes, killed = apportion.local(workers=2, threads=1), [], False
    with by_value(networks):
        for event in apportion.run(workload, LocalSgd(every=2, overlap=True), launcher=launcher, run_dir=tmp_path):
            if event.kind == "fault":
                causes.append(event.data["cause"])
            if event.kind == "step" and event.step > 100 and not killed:
                os.kill(pools[-1].pids()[1], signal.SIGKILL)
                killed = True
    assert event.kind == "end"
    assert event.step == 3000
    assert "SIGKILL" in causes[0]


def test_what_a_dead_worker_held_is_said_to_be_lost_where_averages_come_late() -> None:
    step = OVERLAP.build(networks.cases["mlp"](61), World())
    assert isinstance(step, LocalSgdStep)
    with pytest.raises(StateLost, match="go back to the last checkpoint, or use overlap=False"):
        step.rejoin(World())


# What is told before the sum


def told(world: World, notes: list[ContributionHeader]) -> list[ContributionHeaders]:
    return [gather_headers(notes[world.rank], world.group(), world.device)]


def test_whole_numbers_go_round_as_they_are_and_a_table_only_where_somebody_has_moved_it() -> None:
    large, table = 2**62 + 1, torch.arange(5)
    notes = [
        ContributionHeader(
            examples=float(rank),
            has=torch.tensor([1, rank], dtype=torch.uint8),
            singles=[torch.tensor(7.0), torch.tensor(float(rank))],
            whole=[torch.tensor(large - 1 + rank), table + rank, torch.tensor([True, False]), table],
            before=[torch.tensor(0), table, torch.tensor([True, False]), table],
        )
        for rank in (0, 1)
    ]
    for (found,) in on_ranks(told, 2, notes):
        assert found.examples == [0.0, 1.0]
        assert [t.tolist() for t in found.largest] == [large, (table + 1).tolist(), [True, False], table.tolist()]
        assert [found.share(rank) for rank in (0, 1)] == [0.0, 1.0]
        assert [found.share(rank, 1) for rank in (0, 1)] == [0.0, 1.0]
        assert found.mean_single(0, 0) == 7.0


def test_the_mean_of_equal_counts_of_steps_is_that_count() -> None:
    counts, n = torch.full((3, 1), 1e6 + 1, dtype=torch.float64), [61.0, 61.0, 7.0]
    assert ContributionHeaders(n, torch.ones(3, 1, dtype=torch.uint8), counts, []).mean_single(0, 0) == 1e6 + 1


def test_a_slot_of_ranks_that_had_no_examples_is_averaged_among_them() -> None:
    notes = ContributionHeaders(
        [64.0, 0.0, 0.0], torch.tensor([[0], [1], [1]], dtype=torch.uint8), torch.zeros(3, 0), []
    )
    assert [notes.share(rank, 0) for rank in range(3)] == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0]])
def test_what_a_replica_without_examples_holds_spoils_no_average(hosts: list[int]) -> None:
    with by_value(networks):
        for state in on_ranks(spoilt, 2, hosts):
            assert all(torch.isfinite(t).all() for _, t in state.tensors())
            assert state.step == 5


def spoilt(world: World, hosts: list[int]) -> State:
    """Rank 1 has no batch in the last round, and has come upon a NaN since."""
    own = on_hosts(world, hosts)
    step = LocalSgd(every=2).build(replace(networks.cases["mlp"](61), steps=5, epochs=None), own)
    for number, batch in enumerate(batches(step)):
        step(batch)
        if world.rank == 1 and number == 1:
            with torch.no_grad():
                next(step.model.parameters()).fill_(torch.nan)
    state = step.state_dict()
    step.close()
    own.close()
    return state


@pytest.mark.parametrize("batches_done", [0, 12])
def test_a_schedule_is_where_all_batches_are_that_were_handed_out(batches_done: int) -> None:
    late = replace(assigned_round(18, 1, 2, 3, 60), done=batches_done, ahead=18 - batches_done)
    assert [late.place(made) for made in range(3)] == [18, 20, 22]


def test_averaged_slots_that_come_late_are_refused() -> None:
    with pytest.raises(ValueError, match=r'slots="averaged" with overlap=True.*use slots="kept", or overlap=False'):
        LocalSgd(slots="averaged", overlap=True)
