"""``apportion.check_script`` compares one process also with itself on the same rows in other micro-batches: rows that
have weights by their micro-batch are found, and what many scripts mean to train with is a note.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import apportion

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SCRIPT = """
import contextlib
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
count = {count}
inputs = torch.randn(count, 6)
values = inputs[:, :1].tanh()
words = torch.randint(1, 11, (count, 8))
lengths = torch.randint(2, 9, (count,))
following = words.roll(-1, 1).masked_fill(torch.arange(8) >= lengths[:, None], -100)
data = TensorDataset({data})
sampler = DistributedSampler(data, seed=2)
loader = DataLoader(data, batch_size={batch} // world, sampler=sampler)
micro_batches = 4


def loss_of(net, batch, number):
    rows, targets = batch
{loss}


net = {net}
net = DistributedDataParallel(net)
torch.manual_seed(rank)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, batch in enumerate(loader):
        last = number % micro_batches == micro_batches - 1 or number == len(loader) - 1
        with contextlib.nullcontext() if last else net.no_sync():
            loss_of(net, batch, number).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
"""
DENSE = "nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))"
NORMALISED = (
    "nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))"
)
LANGUAGE = "nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))"
MEAN = "return F.mse_loss(net(rows), targets) / micro_batches"
BY_POSITION = "return F.mse_loss(net(rows), targets) / (number % micro_batches + 1)"
OWN_TOKENS = """
tokens = (targets != -100).sum()
dist.all_reduce(tokens)
total = F.cross_entropy(net(rows).flatten(0, 1), targets.flatten(), reduction="sum")
return total * world / tokens / micro_batches
"""
FIXED_TOKENS = OWN_TOKENS.replace("return total * world / tokens / micro_batches", "return total * world / 160")
NOISY = "return F.mse_loss(net(rows + torch.randn(rows.shape)), targets) / micro_batches"
CONTRASTIVE = """
keys = torch.cat(collectives.all_gather(net(rows))) if world > 1 else net(rows)
return F.cross_entropy(keys @ keys.T, (torch.arange(len(keys)) + 1) % len(keys)) / micro_batches
"""


def script(
    folder: Path, loss: str, *, net: str = DENSE, data: str = "inputs, values", count: int = 64, batch: int = 8
) -> str:
    path = folder / "train.py"
    body = textwrap.indent(loss.strip(), " " * 4)
    path.write_text(SCRIPT.format(loss=body, net=net, data=data, count=count, batch=batch))
    return str(path)


def test_a_loss_divided_by_its_position_in_the_step_is_found(tmp_path: Path) -> None:
    answer = apportion.check_script(script(tmp_path, BY_POSITION))
    assert (answer.status, answer.verdict) == (1, "another network"), answer
    finding = answer.findings[0]
    assert finding.name == "micro_batches_unequal"
    assert "4, 2, 1.33333, 1" in finding.sentence
    assert finding.factor == pytest.approx(4.0)
    line = int(finding.site.partition(":")[2])
    assert ".backward()" in (tmp_path / "train.py").read_text().splitlines()[line - 1], finding.site


def test_it_is_found_beside_batch_statistics_as_well(tmp_path: Path) -> None:
    answer = apportion.check_script(script(tmp_path, BY_POSITION, net=NORMALISED))
    assert [finding.name for finding in answer.findings] == ["micro_batches_unequal"], answer


def test_the_same_script_divided_by_the_number_of_micro_batches_is_right(tmp_path: Path) -> None:
    answer = apportion.check_script(script(tmp_path, MEAN))
    assert (answer.status, answer.findings) == (0, ()), answer
    assert any("distributed differently over the micro-batches" in sentence for sentence in answer.about), answer.about


@pytest.mark.parametrize("accept", [[], ["micro_batches_weighted_alike"]], ids=["found", "accepted"])
def test_micro_batches_that_count_their_own_tokens_are_found_and_accepted_by_name(
    tmp_path: Path, accept: list[str]
) -> None:
    path = script(tmp_path, OWN_TOKENS, net=LANGUAGE, data="words, following")
    answer = apportion.check_script(path, accept=accept)
    assert (answer.status, answer.verdict) == ((0, "the same network") if accept else (1, "the same network, but"))
    assert answer.findings[0].name == "micro_batches_weighted_alike"


def test_micro_batches_that_are_divided_by_one_count_are_right(tmp_path: Path) -> None:
    answer = apportion.check_script(script(tmp_path, FIXED_TOKENS, net=LANGUAGE, data="words, following"))
    assert (answer.status, answer.findings) == (0, ()), answer


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("micro_batch_statistics", {"loss": MEAN, "net": NORMALISED}),
        ("micro_batch_statistics", {"loss": CONTRASTIVE}),
        ("uneven_micro_batches", {"loss": MEAN, "count": 60}),
        ("short_window", {"loss": MEAN, "count": 56}),
    ],
    ids=["batch_normalisation", "contrastive", "last_batch", "last_window"],
)
def test_what_many_scripts_mean_to_train_with_is_a_note(tmp_path: Path, named: str, arguments: dict[str, str]) -> None:
    answer = apportion.check_script(script(tmp_path, **arguments))  # type: ignore[arg-type]
    assert answer.status == 0, answer
    assert [(finding.name, finding.severity) for finding in answer.findings] == [(named, "note")], answer
    if arguments.get("net") == NORMALISED:
        assert "Layer 1 (SyncBatchNorm)" in answer.findings[0].sentence


def test_noise_of_each_micro_batch_is_nothing_to_report(tmp_path: Path) -> None:
    answer = apportion.check_script(script(tmp_path, NOISY))
    assert (answer.status, answer.findings) == (0, ()), answer


SHARDED = """
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(64, 6)
data = TensorDataset(inputs, inputs[:, :1].tanh())
loader = DataLoader(data, batch_size=8 // world, sampler=DistributedSampler(data, seed=2))
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for number, (rows, targets) in enumerate(loader):
    net.set_requires_gradient_sync(number % 2 == {synchronised})
    (F.mse_loss(net(rows), targets) / 2).backward()
    if number % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_gradients_that_are_synchronised_at_the_wrong_micro_batch_are_found(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SHARDED.format(synchronised=0))
    answer = apportion.check_script(path)
    assert answer.status == 1, answer
    assert answer.findings[0].name == "dropped_micro_batches"
    assert "comes into that of the next step" in answer.findings[0].sentence


def test_gradients_that_are_synchronised_at_the_last_micro_batch_are_right(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SHARDED.format(synchronised=1))
    answer = apportion.check_script(path)
    assert (answer.status, answer.findings) == (0, ()), answer
