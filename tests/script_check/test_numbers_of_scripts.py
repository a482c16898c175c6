"""Scripts with one mistake in their gradients, weights or scales, and scripts with none, through the whole check."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion.script_check.driver import check_script
from apportion.script_check.findings import ScriptAnswer
from apportion.script_check.script import Script

pytestmark = pytest.mark.processes

HEAD = """
import contextlib
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
y = x[:, :1].tanh()
data = TensorDataset(x, y)
def batches(size):
    return DataLoader(data, batch_size=size, sampler=DistributedSampler(data, seed=2))
def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
"""
ONE_TENSOR = """
net = DDP(network())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for rows, target in batches(8):
    optimizer.zero_grad()
    F.mse_loss(net(rows), target).backward()
    net.module[2].weight.grad *= 1 + 1e-6 * (world > 1)
    optimizer.step()
"""
NOT_DIVIDED = """
net = DDP(network())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for number, (rows, target) in enumerate(batches(4)):
    with net.no_sync() if number % 3 != 2 else contextlib.nullcontext():
        F.mse_loss(net(rows), target).backward()
    if number % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
"""
SUM_BESIDE_STATISTICS = """
net = DDP(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for rows, target in batches(8):
    optimizer.zero_grad()
    F.mse_loss(net(rows), target, reduction=REDUCTION).backward()
    optimizer.step()
"""
GATHERED = """
net = DDP(network())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for rows, target in batches(8):
    own = net(rows)
    every = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(every, own)
    loss = (own.mean() - torch.cat(every).square().mean()).square()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
CLIPPED_BY_SHARD = """
net = network()
fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for rows, target in batches(8):
    optimizer.zero_grad()
    F.mse_loss(net(rows), target).backward()
    norm = sum(p.grad.to_local().square().sum() for p in net.parameters()).sqrt()
    for p in net.parameters():
        p.grad.to_local().mul_(0.01 / norm)
    optimizer.step()
"""
ADVERSARIAL = """
maker, judge = DDP(nn.Linear(2, 6)), DDP(network())
of_maker, of_judge = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (maker, judge))
def back(value):
    value.backward()
for rows, target in batches(8):
    of_judge.zero_grad()
    back(F.softplus(-judge(rows)).mean())
    back(F.softplus(judge(maker(rows[:, :2]).detach())).mean())
    of_judge.step()
    of_maker.zero_grad()
    back(F.softplus(-judge(maker(rows[:, :2]))).mean())
    of_maker.step()
"""
ACCUMULATED = """
net = network()
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
for number, (rows, target) in enumerate(batches(4)):
    net.set_requires_gradient_sync(number % 3 == 2)
    (F.mse_loss(net(rows), target) / 3).backward()
    if number % 3 == 2:
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
"""
SKIPPING = """
net = DDP(network())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for rows, target in batches(4):
    optimizer.zero_grad()
    loss = F.mse_loss(net(rows), target)
    loss.backward()
    every = loss.detach().clone()
    dist.all_reduce(every)
    if every / world < 0.8:
        optimizer.step()
"""


def answered(folder: Path, body: str, ranks: int = 2, accept: tuple[str, ...] = ()) -> ScriptAnswer:
    script = folder / "train.py"
    script.write_text(HEAD + body)
    return check_script(Script(str(script)), ranks=ranks, accept=accept)


def test_a_millionth_in_one_tensor_is_found(tmp_path: Path) -> None:
    answer = answered(tmp_path, ONE_TENSOR)
    assert answer.status == 1
    (finding,) = answer.findings
    assert finding.name == "scale"
    assert finding.tensors == ("2.weight",)
    assert finding.factor == pytest.approx(1 + 1e-6, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "name", "line"),
    [
        (NOT_DIVIDED, "accumulation_undivided", "F.mse_loss"),
        (GATHERED, "gather_without_gradient", "dist.all_gather(every"),
        (CLIPPED_BY_SHARD, "shards_scaled_apart", "optimizer.step()"),
        (SUM_BESIDE_STATISTICS.replace("REDUCTION", "'mean'"), "batch_statistics", "BatchNorm1d"),
    ],
    ids=["not divided", "gathered", "clipped by shard", "statistics"],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, body: str, name: str, line: str) -> None:
    answer = answered(tmp_path, body)
    assert answer.status == 1
    assert answer.findings[0].name == name
    file, _, number = answer.findings[0].site.partition(":")
    assert file == "train.py"
    assert line in (tmp_path / "train.py").read_text().splitlines()[int(number) - 1]


@pytest.mark.slow
@pytest.mark.parametrize(("reduction", "status"), [("mean", 0), ("sum", 1)])
def test_statistics_that_are_accepted_hide_nothing_else(tmp_path: Path, reduction: str, status: int) -> None:
    body = SUM_BESIDE_STATISTICS.replace("REDUCTION", repr(reduction))
    answer = answered(tmp_path, body, accept=("batch_statistics",))
    assert answer.status == status
    assert [finding.name for finding in answer.findings if not finding.accepted] == ["scale"] * status


@pytest.mark.slow
@pytest.mark.parametrize("body", [ADVERSARIAL, ACCUMULATED, SKIPPING], ids=["adversarial", "accumulated", "skipping"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_healthy_script_gives_no_finding(tmp_path: Path, body: str, ranks: int) -> None:
    answer = answered(tmp_path, body, ranks)
    assert [finding.sentence for finding in answer.findings] == []
    assert answer.status == 0
