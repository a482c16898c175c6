"""Mistakes as they occur in other code bases, and healthy scripts like them, through the whole check."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion.script_check.driver import check_script
from apportion.script_check.script import Script

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :2].tanh())
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=2))
net = DDP(nn.Linear(6, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
"""
GATHERED = """
def spread(z):
    z = z - z.mean(0)
    return (z.T @ z / len(z) - torch.eye(4)).square().mean()
for rows, _ in loader:
    z = net(rows)
    loss = z.square().mean() + spread(everywhere(z))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WITHOUT_GRAPH = (
    """
@torch.no_grad()
def everywhere(z):
    parts = [torch.empty_like(z) for _ in range(world)]
    dist.all_gather(parts, z)
    return torch.cat(parts)
"""
    + GATHERED
)
WITH_BACKWARD = (
    """
class Everywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        whole = z.new_empty(world * len(z), z.size(1))
        dist.all_gather_into_tensor(whole, z.contiguous())
        return whole
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(world)[rank]
everywhere = Everywhere.apply
"""
    + GATHERED
)
FOR_THE_LOG = """
for rows, target in loader:
    z = net(rows)
    loss = F.mse_loss(z[:, :2], target)
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        losses = [torch.empty_like(loss) for _ in range(world)]
        dist.all_gather(losses, loss)
        print(torch.stack(losses).mean())
    optimizer.step()
"""
HEADS = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)
    def predicted(self, z):
        return self.out(z)
    def forward(self, z):
        return self.predicted(z)
head = DDP(Head())
optimizer.add_param_group({"params": head.parameters()})
for rows, target in loader:
    optimizer.zero_grad()
    F.mse_loss(CALL(net(rows)), target).backward()
    optimizer.step()
"""
CLOSURE = """
plain = net.module
optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
for rows, target in loader:
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(plain(rows)[:, :2], target)
        loss.backward()
        for weight in plain.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= DIVISOR
        return loss
    optimizer.step(closure)
"""
ANEW = """
for epoch in range(3):
    sampler = DistributedSampler(data, seed=2)
    sampler.set_epoch(EPOCH)
    epochs = DataLoader(data, batch_size=8, sampler=sampler)
    for rows, target in epochs:
        optimizer.zero_grad()
        F.mse_loss(net(rows)[:, :2], target).backward()
        optimizer.step()
"""
DRAWN_AT_ONCE = """
class Drawn(IterableDataset):
    epoch = 0
    def __iter__(self):
        rows = torch.randn(32, 6, generator=torch.Generator().manual_seed(self.epoch))
        for row in rows[rank::world]:
            yield row, row[:2].tanh()
drawn = Drawn()
stream = DataLoader(drawn, batch_size=4)
for drawn.epoch in range(3):
    for rows, target in stream:
        optimizer.zero_grad()
        F.mse_loss(net(rows)[:, :2], target).backward()
        optimizer.step()
"""
WITHOUT_LOADER = """
import random, numpy as np
for epoch in range(3):
    order = ORDER
    for start in range(0, 32, 16):
        rows = order[start + 8 * rank:start + 8 * rank + 8]
        optimizer.zero_grad()
        F.mse_loss(net(x[rows])[:, :2], x[rows, :2].tanh()).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "name", "line"),
    [
        (WITHOUT_LOADER.replace("ORDER", "random.Random(3).sample(range(32), 32)"), "same_order", "order = random"),
        (WITHOUT_LOADER.replace("ORDER", "np.random.default_rng(3).permutation(32)"), "same_order", "order = np"),
        (WITHOUT_GRAPH, "gather_without_gradient", "dist.all_gather(parts, z)"),
        (HEADS.replace("CALL", "head.module.predicted"), "not_averaged", "head.module.predicted(net(rows))"),
        (CLOSURE.replace("DIVISOR", "1"), "scale", "F.mse_loss(plain(rows)"),
        (ANEW.replace("EPOCH", "0"), "same_order", "epochs = DataLoader"),
    ],
    ids=[
        "sampled",
        "permuted",
        "gathered inside of no_grad",
        "a method of the wrapped module",
        "summed in a closure",
        "made anew",
    ],
)
def test_a_mistake_is_found_at_its_line(tmp_path: Path, body: str, name: str, line: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + body)
    answer = check_script(Script(str(script)))
    assert answer.status == 1
    assert answer.findings[0].name == name
    number = int(answer.findings[0].site.partition(":")[2])
    assert line in script.read_text().splitlines()[number - 1]


@pytest.mark.parametrize(
    "body",
    [
        WITH_BACKWARD,
        FOR_THE_LOG,
        HEADS.replace("CALL", "head"),
        DRAWN_AT_ONCE,
        WITHOUT_LOADER.replace("ORDER", "np.random.default_rng(3 + epoch).permutation(32)"),
        CLOSURE.replace("DIVISOR", "world"),
        ANEW.replace("EPOCH", "epoch"),
    ],
    ids=[
        "gather with a backward",
        "gathered for a log",
        "two wrappers",
        "rows drawn at once",
        "permuted by epoch",
        "averaged in a closure",
        "made anew",
    ],
)
def test_a_healthy_script_has_no_finding(tmp_path: Path, body: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + body)
    answer = check_script(Script(str(script)))
    assert [finding.sentence for finding in answer.findings if finding.severity != "note"] == []
    assert answer.status == 0
