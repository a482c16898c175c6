"""Gradients that are clipped before or after their average, and optimizers that hold or load the wrong tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apportion.script_check.comparison import accumulation, numbers, parameters
from apportion.script_check.driver import check_script
from apportion.script_check.record import RankRecord
from apportion.script_check.script import Script

RNG = np.random.default_rng(3)
SHAPES = {"net.0.weight": (4, 3), "net.0.bias": (4,), "net.1.weight": (2, 4)}
Arrays = dict[str, Any]


def network() -> dict[str, Any]:
    modules = {name.rpartition(".")[0]: "Linear" for name in SHAPES}
    return {
        "kind": "network", "step": 0, "weights": {name: np.ones(shape) for name, shape in SHAPES.items()},
        "trainable": list(SHAPES), "modules": modules, "sites": {}, "groups": {}, "placements": {}, "label": "net",
        "site": "train.py:9",
    }  # fmt: skip


def step(number: int, gradients: Arrays, **more: Any) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "number": number, "optimizer": 0, "gradients": gradients, "weights": {},
        "buffers": {}, "rates": [0.1], "placements": {}, "state": {}, "site": "train.py:20", "forwards": number,
    } | more  # fmt: skip


def clip(function: str, limit: float, norm: float | None = None, at: int = 0) -> dict[str, Any]:
    return {
        "kind": "clip", "step": at, "function": function, "limit": limit, "norm": norm, "names": list(SHAPES),
        "factor": None if norm is None else min(1.0, limit / (norm + 1e-6)), "site": "train.py:15", "time": 0.0,
    }  # fmt: skip


def record(own: Arrays, given: Arrays, *more: dict[str, Any]) -> RankRecord:
    contributions = {
        "kind": "contributions", "step": 0, "optimizer": 0, "number": 1, "own": {n: [a] for n, a in own.items()},
        "sites": {n: ["train.py:14"] for n in own},
    }  # fmt: skip
    return RankRecord(0, (network(), *more, contributions, step(1, given)))


def gradients() -> Arrays:
    return {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}


def mean(parts: list[Arrays]) -> Arrays:
    return {name: sum(part[name] for part in parts) / len(parts) for name in SHAPES}


def bounded(arrays: Arrays, limit: float) -> Arrays:
    return {name: np.clip(array, -limit, limit) for name, array in arrays.items()}


def judged(own: list[Arrays], given: Arrays, one: Arrays, *calls: dict[str, Any]) -> Any:
    (found,) = numbers.findings([record(each, given, *calls) for each in own], record(mean(own), one, *calls))
    return found


@pytest.mark.parametrize("calls", [[clip("clip_grad_value_", 0.3)], []], ids=["by torch", "by hand"])
def test_elements_that_are_clipped_before_the_average(calls: list[dict[str, Any]]) -> None:
    own = [gradients(), gradients()]
    finding = judged(own, mean([bounded(each, 0.3) for each in own]), bounded(mean(own), 0.3), *calls)
    assert finding.name == "clipped_before_average"
    assert "at most 0.3 " in finding.sentence
    assert finding.site == ("train.py:15" if calls else "train.py:20")


def test_elements_that_a_hook_clips_as_backward_runs() -> None:
    own, whole = [bounded(gradients(), 0.3) for _ in range(2)], bounded(gradients(), 0.3)
    assert judged(own, mean(own), whole).name == "clipped_before_average"
    assert judged(own, mean(own), {name: 0.9 * array for name, array in whole.items()}).name == "differs"


def test_tensors_that_are_clipped_one_by_one_before_the_average() -> None:
    own = [gradients(), gradients()]
    scaled = [
        {name: array / max(1.0, float(np.linalg.norm(array)) / 0.5) for name, array in each.items()} for each in own
    ]
    one = {name: array / max(1.0, float(np.linalg.norm(array)) / 0.5) for name, array in mean(own).items()}
    finding = judged(own, mean(scaled), one)
    assert finding.name == "clipped_before_average"
    assert "0.weight by" in finding.sentence


def test_a_factor_is_also_given_before_clipping() -> None:
    own = [gradients(), gradients()]
    total, averaged = {name: sum(each[name] for each in own) for name in SHAPES}, mean(own)
    norms = [float(np.sqrt(sum((a**2).sum() for a in arrays.values()))) for arrays in (total, averaged)]
    factors = [min(1.0, 3.0 / (norm + 1e-6)) for norm in norms]
    given, one = (
        {name: array * factor for name, array in arrays.items()}
        for arrays, factor in zip((total, averaged), factors, strict=True)
    )
    ranks = [record(each, given, clip("clip_grad_norm_", 3.0, norms[0])) for each in own]
    (finding,) = numbers.findings(ranks, record(averaged, one, clip("clip_grad_norm_", 3.0, norms[1])))
    assert finding.name == "scale"
    assert finding.factor == pytest.approx(2)
    assert f"is {2 * factors[0] / factors[1]:.10g} times that of one process" in finding.sentence
    assert "and 2 times before they are clipped (the number of ranks)" in finding.sentence
    assert "summed and not averaged" in finding.sentence


def test_micro_batches_are_not_divided_and_their_sum_is_clipped() -> None:
    events: list[dict[str, Any]] = [network()]
    for number in range(1, 5):
        own = [gradients(), gradients()]
        for _ in own:
            events.append({"kind": "batch", "step": number - 1, "loader": "train.py:3", "number": 0})
            events.append({"kind": "criterion", "step": number - 1, "value": 2.0, "reduction": "mean"})
            events.append({"kind": "backward", "step": number - 1, "value": 2.0, "site": "train.py:14"})
        total = {name: own[0][name] + own[1][name] for name in SHAPES}
        norm = float(np.sqrt(sum((array**2).sum() for array in total.values())))
        events.append(clip("clip_grad_norm_", 0.1, norm, number - 1))
        contributions = {"own": {n: [each[n] for each in own] for n in SHAPES}, "sites": {}}
        contributions["sites"] = {name: ["train.py:14"] * 2 for name in SHAPES}
        events.append({"kind": "contributions", "step": number - 1, "optimizer": 0, "number": number, **contributions})
        events.append(step(number, {name: array * 0.1 / (norm + 1e-6) for name, array in total.items()}))
    (finding,) = accumulation.findings(RankRecord(0, tuple(events)))
    assert finding.name == "accumulation_undivided"


def test_an_optimizer_that_was_made_before_parameters_were_flattened() -> None:
    record = RankRecord(0, (network(), step(1, {}, flattened=list(SHAPES), made_at="train.py:8")))
    (finding,) = parameters.stale_optimizers([record])
    assert finding.name == "stale_optimizer"
    assert finding.site == "train.py:8"
    assert finding.tensors == ("0.weight", "0.bias", "1.weight")
    assert parameters.stale_optimizers([RankRecord(0, (network(), step(1, {}, flattened=[], made_at="")))]) == []


def sharded_step(rank: int, weights: Arrays, shards: dict[str, dict[str, str]], placement: str) -> RankRecord:
    ones = {name: np.ones(shape) for name, shape in SHAPES.items()}
    made = step(1, ones, weights=weights, state_shards=shards, placements=dict.fromkeys(SHAPES, placement))
    return RankRecord(rank, (network(), {"kind": "load", "step": 0, "path": "a", "site": "train.py:11"}, made))


@pytest.mark.parametrize(("placement", "name"), [("(Shard(dim=0),)", "loaded_weights"), ("(Replicate(), Shard", "")])
def test_a_state_of_an_optimizer_that_repeats_the_shards_of_one_rank(placement: str, name: str) -> None:
    shards = {"net.0.weight": {"exp_avg": "a", "exp_avg_sq": "b"}}
    weights = gradients()
    ranks = [sharded_step(rank, weights, shards, placement) for rank in range(2)]
    (finding,) = numbers.findings(ranks, sharded_step(0, gradients(), {}, ""))
    assert finding.name == (name or "weights_differ")
    if name:
        assert finding.tensors == ("0.weight",)
        assert finding.site == "train.py:11"
        assert "exp_avg and exp_avg_sq" in finding.sentence


HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randn(48, 2))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=2))
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
"""
FLAT_AFTERWARDS = """
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
net = FSDP(net, device_id=torch.device("cpu"))
for rows, target in loader:
    net.zero_grad()
    F.mse_loss(net(rows), target).backward()
    optimizer.step()
"""
REPLACED_IN_THE_GROUP = FLAT_AFTERWARDS.replace(
    "for rows", 'optimizer.param_groups[0]["params"] = list(net.parameters())\nfor rows', 1
)
BY_VALUE = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for rows, target in loader:
    optimizer.zero_grad()
    F.mse_loss(net(rows), target).backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.02)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
"""
SHARDED_SUM = """
fully_shard(net)
net.set_force_sum_reduction_for_comms(True)
net.set_gradient_divide_factor(1.0)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for rows, target in loader:
    optimizer.zero_grad()
    F.mse_loss(net(rows), target).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.6)
    optimizer.step()
"""
BY_TENSOR = BY_VALUE.replace(
    "nn.utils.clip_grad_value_(net.parameters(), 0.02)",
    "for p in net.parameters():\n        p.grad.mul_((0.02 * p.detach().norm() / p.grad.norm()).clamp(max=1.0))",
)
ADDED_AFTERWARDS = """
fully_shard(net)
net[2] = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for rows, target in loader:
    optimizer.zero_grad()
    F.mse_loss(net(rows), target).backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "name", "words", "line"),
    [
        (FLAT_AFTERWARDS, "stale_optimizer", "before the model was wrapped", "AdamW("),
        (REPLACED_IN_THE_GROUP, "", "", ""),
        (BY_VALUE, "clipped_before_average", "at most 0.02 ", "clip_grad_value_"),
        (BY_TENSOR, "clipped_before_average", "by its own norm", "optimizer.step()"),
        (SHARDED_SUM, "scale", "2 times that before clipping", "F.mse_loss"),
        (ADDED_AFTERWARDS, "not_averaged", "after fully_shard was called", "nn.Linear(8, 2)"),
    ],
    ids=["flat", "replaced", "by value", "by tensor", "sharded", "added"],
)
def test_a_script_that_clips_or_holds_the_wrong_tensors(
    tmp_path: Path, body: str, name: str, words: str, line: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + body)
    answer = check_script(Script(str(script)))
    assert answer.status == bool(name)
    for finding in answer.findings[:1] if name else ():
        assert finding.name == name
        assert words in finding.sentence
        number = int(finding.site.removeprefix("train.py:"))
        assert line in script.read_text().splitlines()[number - 1]
