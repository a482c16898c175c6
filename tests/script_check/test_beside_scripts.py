"""What no comparison of gradients shows, found in scripts that run on two ranks, and healthy scripts beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion.script_check.driver import check_script
from apportion.script_check.script import Script

pytestmark = pytest.mark.processes

_HEAD = """
import random, tempfile
import torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
x = torch.randn(48, 6, generator=generator)
y = x[:, :2].sin().sum(1, keepdim=True)
held = TensorDataset(x[:13] + 1, y[:13])
sampler = DistributedSampler(TensorDataset(x, y), seed=3)
loader = DataLoader(TensorDataset(x, y), batch_size=16 // world, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(xb, yb):
    loss = nn.functional.mse_loss(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_NOISE = """
for epoch in range(3):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        train(xb + 0.1 * torch.randn_like(xb), yb)
"""
_CHECKPOINTED = (
    """
from torch.utils.checkpoint import checkpoint
torch.manual_seed(9 + rank)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def noisy(self, xb):
        hidden = self.first(xb).tanh()
        return hidden * (1 + 0.1 * torch.randn_like(hidden))

    def forward(self, xb):
        return self.second(checkpoint(self.noisy, xb, use_reentrant=False))


model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
    + _NOISE
)
_STREAM = """
class Stream(IterableDataset):
    epoch = 0

    def __iter__(self):
        order = list(range(48))
        random.Random(7 + self.epoch).shuffle(order)
        yield from ((x[row], y[row]) for row in order[rank::world])


stream = Stream()
stream_loader = DataLoader(stream, batch_size=8)
for epoch in range(2):
    for xb, yb in stream_loader:
        train(xb, yb)
"""
_UNDISTRIBUTED = """
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
for xb, yb in loader:
    train(xb, yb)
"""
_SPLIT = """
torch.manual_seed(SEED)
kept, _ = torch.utils.data.random_split(TensorDataset(x, y), [40, 8])
torch.manual_seed(0)
sampler = DistributedSampler(kept, seed=3)
for xb, yb in DataLoader(kept, batch_size=8, sampler=sampler):
    train(xb, yb)
"""
_DRAWN_BATCHES = """
torch.manual_seed(5 + rank)
micro_batches = 4 // world
for step in range(4):
    for micro in range(micro_batches):
        model.require_backward_grad_sync = micro == micro_batches - 1
        rows = torch.randint(48, (8,))
        loss = nn.functional.mse_loss(model(x[rows]), y[rows]) / micro_batches
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_EVALUATION = """
held_loader = DataLoader(held, batch_size=4, sampler=DistributedSampler(held, shuffle=False))
for xb, yb in loader:
    train(xb, yb)
total = torch.zeros(2)
with torch.no_grad():
    for xb, yb in held_loader:
        total += torch.stack([((model(xb) - yb) ** 2).sum(), torch.tensor(float(len(xb)))])
dist.all_reduce(total)
print((total[0] / total[1]).item())
"""
_RESUME = """
path = tempfile.gettempdir() + "/state.pt"


def run(first, last):
    for number, (xb, yb) in enumerate(loader):
        if SKIPPED:
            continue
        train(xb, yb)
        if number == last - 1:
            if rank == 0:
                torch.save(model.state_dict(), path)
            dist.barrier()
            return


run(0, 1)
model.load_state_dict(torch.load(path))
run(1, 99)
"""
_OTHER_RATE = """
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        train(xb, yb)
        for _ in range(STEPS):
            scheduler.step()
"""

_ONE_CYCLE = """
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9 * LENGTH)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        train(xb, yb)
        scheduler.step()
"""


def _names(tmp_path: Path, script: str) -> dict[str, str]:
    path = tmp_path / "train.py"
    path.write_text(_HEAD + script)
    answer = check_script(Script(str(path)))
    assert not answer.reason
    return {finding.name: finding.severity for finding in answer.findings}


@pytest.mark.thorough
def test_the_same_noise_on_all_ranks(tmp_path: Path) -> None:
    assert _names(tmp_path, _NOISE) == {"same_draws": "warning"}


@pytest.mark.thorough
def test_noise_that_each_rank_draws_is_given_to_one_process(tmp_path: Path) -> None:
    assert _names(tmp_path, "torch.manual_seed(9 + rank)\n" + _NOISE) == {}


@pytest.mark.slow
def test_a_checkpoint_that_computes_again_has_the_noise_that_it_had(tmp_path: Path) -> None:
    assert _names(tmp_path, _CHECKPOINTED) == {}


@pytest.mark.slow
def test_batches_that_each_rank_draws_are_given_to_one_process(tmp_path: Path) -> None:
    assert _names(tmp_path, _DRAWN_BATCHES) == {}


@pytest.mark.slow
def test_as_many_drawn_batches_in_one_process_as_on_each_rank(tmp_path: Path) -> None:
    assert _names(tmp_path, _DRAWN_BATCHES.replace("4 // world", "2")) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("added", "names"), [("", {"same_order": "warning"}), ("stream.epoch = epoch", {})])
def test_the_order_of_iterable_data(tmp_path: Path, added: str, names: dict[str, str]) -> None:
    assert _names(tmp_path, _STREAM.replace("range(2):\n", f"range(2):\n    {added}\n")) == names


@pytest.mark.slow
def test_rows_that_all_ranks_read(tmp_path: Path) -> None:
    assert _names(tmp_path, _UNDISTRIBUTED) == {"shared_rows": "warning"}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "names"), [("rank", {"shared_rows": "warning"}), ("5", {})])
def test_data_that_each_rank_divides_by_itself(tmp_path: Path, seed: str, names: dict[str, str]) -> None:
    assert _names(tmp_path, _SPLIT.replace("SEED", seed)) == names


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "names"), [(13, {"evaluation": "warning"}), (12, {})])
def test_an_evaluation_with_and_without_padding(tmp_path: Path, rows: int, names: dict[str, str]) -> None:
    script = f"held = TensorDataset(x[:{rows}] + 1, y[:{rows}])\n" + _EVALUATION
    assert _names(tmp_path, script) == names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("skipped", "names"),
    [
        ("number < first", {}),
        ("False", {"resumed_rows": "warning"}),
        ("first and number <= first", {"resumed_rows": "warning"}),
    ],
)
def test_rows_after_a_resume(tmp_path: Path, skipped: str, names: dict[str, str]) -> None:
    assert _names(tmp_path, _RESUME.replace("SKIPPED", skipped)) == names


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "names"), [("1", {}), ("world", {"schedule": "warning"})])
def test_a_schedule_that_counts_ranks(tmp_path: Path, steps: str, names: dict[str, str]) -> None:
    assert _names(tmp_path, _OTHER_RATE.replace("STEPS", steps)) == names


@pytest.mark.slow
@pytest.mark.parametrize(("length", "names"), [("1", {}), ("world", {"schedule": "warning"})])
def test_a_schedule_of_rates_and_momenta(tmp_path: Path, length: str, names: dict[str, str]) -> None:
    assert _names(tmp_path, _ONE_CYCLE.replace("LENGTH", length)) == names
