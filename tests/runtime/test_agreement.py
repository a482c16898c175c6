"""Ranks that others have started agree on what they train before the first step, and name what differs."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import finish, free_port, start
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion
from apportion.core.strategy import Strategy
from apportion.runtime.worker import agreement
from apportion.runtime.worker.agreement import (
    NUMBERS,
    RunAgreement,
    describe_code,
    describe_data,
    describe_run,
    differences,
    refuse_differences,
    unlike_code,
)
from apportion.runtime.worker.job import Job


def network(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))


def rows(count: int = 61, seed: int = 0, least: float = 0.0) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > least).long())


def sgd(parameters: Any, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def loss(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=smoothing)


def decay(optimizer: torch.optim.Optimizer, total: int, power: float = 1.0) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / (total + 1)) ** power)


def noise(batch: apportion.Batch, draws: apportion.Draws, size: float = 0.1) -> apportion.Batch:
    return batch.replace(inputs=batch.inputs + size)


WORKLOAD = apportion.Workload(
    model=network,
    data=rows,
    loss=loss,
    optimizer=sgd,
    batch_size=16,
    steps=30,
    schedule=decay,
    augment=noise,
    evaluation=apportion.Evaluation(data=rows),
)
JOB = Job(workload=WORKLOAD, strategy=apportion.data_parallel(), prove=True)


def described(job: Job) -> list[dict[str, Any]]:
    """What a rank tells before its strategy is built, and after."""
    workload = job.open()
    step = apportion.data_parallel().build(workload, apportion.World())
    try:
        at = {"host": "a", "processor": "AVX2", "code": describe_code(workload)}
        return [{**at, **describe_run(job, workload)}, {**at, **describe_data(job, workload, step)}]
    finally:
        step.close()


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return described(JOB)


def given(**changes: Any) -> Job:
    return replace(JOB, workload=replace(WORKLOAD, **changes))


CASES: dict[str, tuple[Job, int, str]] = {
    "learning rate": (given(optimizer=partial(sgd, lr=0.01)), 0, "optimizer lr=0.01"),
    "momentum": (given(optimizer=partial(sgd, momentum=0.8)), 0, "optimizer momentum=0.8"),
    "optimizer": (given(optimizer=partial(torch.optim.SparseAdam, lr=0.1)), 0, "optimizer=SparseAdam"),
    "seed": (given(seed=1), 0, "seed=1"),
    "batch size": (given(batch_size=15), 0, "batch_size=15"),
    "steps": (given(steps=29), 0, "steps=29"),
    "precision": (given(precision="bfloat16"), 0, "precision=bfloat16"),
    "gradient clipping": (given(clip_grad_norm=1.0), 0, "clip_grad_norm=1.0"),
    "parts": (given(data=lambda part: rows(), parts=2), 0, "parts=2"),
    "order": (given(order="sequential"), 0, "order=sequential"),
    "width": (given(model=partial(network, 17)), 0, "parameters=189"),
    "evaluation": (given(evaluation=apportion.Evaluation(data=rows, every=2)), 0, "evaluation every=2"),
    "no evaluation": (given(evaluation=None), 0, "evaluation=none"),
    "strategy": (replace(JOB, strategy=apportion.map_reduce()), 0, "strategy=map_reduce"),
    "resume": (replace(JOB, resume=True), 0, "resume=True"),
    "check": (replace(JOB, prove=False), 0, "check=False"),
    "policy": (replace(JOB, policy=apportion.Policy(checkpoint_every="5 steps")), 0, "checkpoint_every='5 steps'"),
    "changes": (replace(JOB, changes={"steps": 7}), 0, "steps=7"),
    "fast paths": (replace(JOB, plain=("linear",)), 0, "plain paths=linear"),
    "data": (given(data=partial(rows, seed=1)), 1, "example "),
    "labels": (given(data=partial(rows, least=100.0)), 1, "digest of example "),
    "length": (given(data=partial(rows, 62)), 1, "examples=62"),
    "schedule": (given(schedule=partial(decay, power=2.0)), 1, "rates of optimizer="),
    "loss": (given(loss=partial(loss, smoothing=0.1)), 1, "differs in loss)"),
    "augmentation": (given(augment=partial(noise, size=0.2)), 1, "differs in augment)"),
    "count": (given(count=lambda targets: 2.0 * len(targets)), 1, "loss terms of an example=2.0"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_with_host_and_values(case: str, told: list[dict[str, Any]]) -> None:
    job, when, expected = CASES[case]
    other = described(job)
    for number in range(when):
        assert differences(told[number], other[number]) == ("settings", []), "nothing differs before"
    with pytest.raises(ValueError, match="the ranks were not given the same run: rank 1 on host b has ") as error:
        refuse_differences([told[when], {**other[when], "host": "b"}])
    assert expected in str(error.value)
    assert " where rank 0 on host a has " in str(error.value)
    assert str(error.value).endswith("Start all of them with the same script, arguments, data and versions")


@pytest.mark.parametrize(
    ("name", "value"), [("apportion", "0.0.1 (00000000)"), ("Python", "3.99.0"), ("torch", "1.0.0")]
)
def test_another_version_is_named(name: str, value: str, told: list[dict[str, Any]]) -> None:
    other = {**told[0], "host": "b", "settings": {**told[0]["settings"], name: value}}
    with pytest.raises(ValueError, match=rf"host b has {name}={value.replace('(', '.').replace(')', '.')} where"):
        refuse_differences([told[0], other])


def test_the_same_run_is_not_refused_though_its_code_names_something_of_the_host(
    told: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"

    def of_this_host(width: int = 16) -> nn.Module:
        assert folder.parent.exists()
        return network(width)

    other = described(given(model=of_this_host))
    assert other[0]["code"]["model"] != told[0]["code"]["model"]
    refuse_differences([told[0], other[0]])
    refuse_differences([told[1], other[1]])


@pytest.mark.parametrize(("when", "kind"), [(0, NUMBERS[0]), (1, NUMBERS[1]), (1, NUMBERS[2])], ids=NUMBERS)
def test_numbers_that_differ_by_rounding_are_refused_on_equal_processors_alone(
    when: int, kind: str, told: list[dict[str, Any]]
) -> None:
    first = told[when]
    name, size = next(iter(first[kind].items()))
    rounded = {**first, kind: {**first[kind], name: size * (1 + 1e-7)}}
    with pytest.raises(ValueError, match=name):
        refuse_differences([first, rounded])
    refuse_differences([first, {**rounded, "processor": "AVX512"}])
    with pytest.raises(ValueError, match=name):
        refuse_differences([first, {**rounded, "processor": "AVX512", kind: {**first[kind], name: size * 1.01}}])


def test_code_that_differs_is_told_where_no_update_shows_whether_it_matters(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = described(given(loss=lambda outputs, targets: loss(outputs, targets)))[1]
    assert unlike_code([told[1], other]) is None, "the update is the same"
    monkeypatch.setattr(agreement, "MOST_PARAMETERS", 10)
    large = [described(job)[1] for job in (JOB, given(loss=partial(loss, smoothing=0.1)))]
    refuse_differences(large)
    assert str(unlike_code(large)).startswith("the code of loss differs between the ranks")
    assert unlike_code([large[0], large[0]]) is None


def test_describing_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    describe_run(JOB, WORKLOAD)
    step = apportion.data_parallel().build(WORKLOAD, apportion.World())
    before = torch.random.get_rng_state()
    describe_data(JOB, WORKLOAD, step)
    assert torch.equal(torch.random.get_rng_state(), before)
    step.close()
    torch.manual_seed(3)
    describe_run(JOB, WORKLOAD)
    assert torch.equal(torch.rand(4), expected)


def test_many_ranks_are_not_all_named() -> None:
    first = {"host": "a", "processor": "AVX2", "settings": {"seed": 0}}
    others = [{**first, "host": f"b{number}", "settings": {"seed": 1}} for number in range(1, 7)]
    with pytest.raises(ValueError, match=r"rank 3 on host b3 has seed=1 where .*; 3 more ranks differ too"):
        refuse_differences([first, *others])


def what_two_ranks_hear(world: apportion.World, strategies: list[Strategy], lengths: list[int]) -> list[str]:
    heard = []
    job = replace(JOB, strategy=strategies[world.rank])
    workload = replace(WORKLOAD, data=partial(rows, lengths[world.rank]))
    ranks = RunAgreement(job, world)
    try:
        ranks.on_workload(workload)
    except ValueError as error:
        heard.append(str(error))
    step = apportion.data_parallel().build(workload, world)
    try:
        ranks.on_data(workload, step)
    except ValueError as error:
        heard.append(str(error))
    step.close()
    return heard


@pytest.mark.processes
def test_all_ranks_hear_the_same() -> None:
    both, other = [apportion.data_parallel()] * 2, [apportion.data_parallel(), apportion.map_reduce()]
    assert on_ranks(what_two_ranks_hear, 2, both, [61, 61]) == [[], []]
    first, second = on_ranks(what_two_ranks_hear, 2, other, [61, 60])
    assert first == second
    assert "strategy=map_reduce where rank 0" in first[0]
    assert "examples=60 where rank 0" in first[1]


def in_two_parts(part: int, seeds: list[int]) -> TensorDataset:
    return rows(30 + part, seeds[part])


def what_ranks_with_parts_hear(
    world: apportion.World, hosts: list[int], others: int, seeds: list[int], changes: dict[str, Any]
) -> tuple[list[str], list[int]]:
    """On ranks as if on these hosts, of which one, of that number, has other rows, or a workload with other changes."""
    here = [rank for rank in range(world.size) if hosts[rank] == hosts[world.rank]]
    world = replace(
        apportion.World.from_env(device="cpu", insecure=True),
        local_rank=here.index(world.rank),
        local_size=len(here),
    )
    other = world.rank == others
    workload = replace(
        WORKLOAD, data=partial(in_two_parts, seeds=seeds if other else [0, 1]), parts=2, **(changes if other else {})
    )
    heard, job = list[str](), replace(JOB, workload=workload)
    ranks = RunAgreement(job, world)
    step = None
    try:
        ranks.on_workload(workload)
        step = job.strategy.build(workload, world)
        ranks.on_data(workload, step)
    except ValueError as error:
        heard.append(str(error))
    opened = [] if step is None else step.source.dataset.opened  # type: ignore[attr-defined]
    world.close()
    return heard, opened


@pytest.mark.processes
def test_ranks_compare_the_parts_that_both_of_them_have_and_no_others() -> None:
    assert on_ranks(what_ranks_with_parts_hear, 3, [0, 0, 1], -1, [0, 1], {}) == [([], [0]), ([], [0]), ([], [1])]
    assert on_ranks(what_ranks_with_parts_hear, 2, [0, 1], 1, [5, 1], {}) == [([], [0]), ([], [1])], "not its part"
    for other, seeds, said in (
        (1, [5, 1], r"rank 1 on host .* of part 0=.* where rank 0 on host"),
        (3, [0, 5], r"rank 3 on host .* of part 1=.* where rank 2 on host"),
    ):
        told = on_ranks(what_ranks_with_parts_hear, 4, [0, 0, 1, 1], other, seeds, {})
        assert len({heard for (heard,), _ in told}) == 1
        assert re.search(said, told[0][0][0]), told


@pytest.mark.processes
def test_ranks_with_parts_compute_an_update_of_rows_that_all_of_them_are_sent() -> None:
    told = on_ranks(what_ranks_with_parts_hear, 2, [0, 1], 1, [0, 1], {"loss": partial(loss, smoothing=0.1)})
    assert told[0] == (told[1][0], [0])
    assert "sum of squares after the first update=" in told[0][0][0]
    assert "(their code differs in loss)" in told[0][0][0]


SCRIPT = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion

lr = [0.1, 0.01][int(os.environ["RANK"])]
workload = apportion.Workload(
    model=lambda: nn.Linear(8, 2),
    data=lambda: TensorDataset(torch.ones(32, 8), torch.ones(32).long()),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
    batch_size=16,
)
try:
    apportion.train(workload, apportion.data_parallel(), launcher=apportion.env(device="cpu"), run_dir="run")
except ValueError as error:
    open(f"said-{os.environ['RANK']}", "w").write(str(error))
"""


@pytest.mark.processes
@pytest.mark.thorough
def test_two_learning_rates_train_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    at = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    finish([start([sys.executable, "script.py"], **at, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")])
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert "has optimizer lr=0.01 where rank 0 on host" in said[0]
    assert not (tmp_path / "run").exists()
