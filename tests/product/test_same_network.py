"""``apportion.testing``: a project's tests hold its own distributed step to the network that one process trains."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from apportion import WorkerFailed
from apportion.testing import DifferentNetwork, assert_same_network

Rows = tuple[Tensor, Tensor]
GENERATOR = torch.Generator().manual_seed(3)
ROWS = (torch.randn(64, 6, generator=GENERATOR), torch.randint(0, 4, (64,), generator=GENERATOR))
WORDS = torch.randint(0, 9, (32, 5), generator=GENERATOR)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0])
LONG_SECONDS = 30.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def trained(model: Any, optimizer: Any, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def step(model: Any, optimizer: Any, rows: Rows) -> Tensor:
    return trained(model, optimizer, F.cross_entropy(model(rows[0]), rows[1]))


def summed(model: Any, optimizer: Any, rows: Rows) -> Tensor:
    return trained(model, optimizer, F.cross_entropy(model(rows[0]), rows[1], reduction="sum"))


def weighted(model: Any, optimizer: Any, rows: Rows) -> Tensor:
    """A tensor of the module, float32 there, has to be float64 on the ranks."""
    loss = F.cross_entropy(model(rows[0]), rows[1], weight=WEIGHTS, reduction="none").mean()
    return trained(model, optimizer, loss)


def reduced(names: str, divided: bool = True) -> Callable[[Any, Any, Rows], float]:
    """A step with hand-written all-reduces of the parameters whose names begin so."""

    def run(model: nn.Module, optimizer: Any, rows: Rows) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[0]), rows[1])
        loss.backward()
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                dist.all_reduce(parameter.grad)
                assert parameter.grad is not None
                parameter.grad /= dist.get_world_size() if divided else 1
        optimizer.step()
        return loss.item()

    return run


def accumulated(model: Any, optimizer: Any, rows: Rows) -> Tensor:
    optimizer.zero_grad()
    with model.no_sync():
        (F.cross_entropy(model(rows[0][::2]), rows[1][::2]) / 2).backward()
    loss = F.cross_entropy(model(rows[0][1::2]), rows[1][1::2]) / 2
    loss.backward()
    optimizer.step()
    return loss


def sharded(model: Net) -> tuple[nn.Module, Any]:
    fully_shard(model.first)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def optimizer_before_sharding(model: Net) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return sharded(model)[0], optimizer


def head_not_sharded(model: Net) -> nn.Module:
    fully_shard(model.first)
    return model


def in_parts(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})


def rate_by_ranks(model: nn.Module) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01 * dist.get_world_size())


def sharded_twice(model: Net) -> nn.Module:
    """Tensor parallelism over pairs of ranks, and fully_shard between the pairs."""
    ranks = dist.get_world_size()
    shape = (ranks // 2, 2) if ranks > 1 else (1, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
    parallelize_module(model, mesh["model"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
    fully_shard(model.first, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


class Part(nn.Module):
    """One stage of ``Net``, under the names that its parameters have there."""

    def __init__(self, model: Net, rank: int) -> None:
        super().__init__()
        setattr(self, "last" if rank else "first", model.last if rank else model.first)
        self.stage = PipelineStage(self, rank, 2, torch.device("cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) if hasattr(self, "last") else torch.relu(self.first(x))


def pipelined(model: Part, optimizer: Any, rows: Rows) -> Tensor | None:
    schedule = ScheduleGPipe(model.__dict__["stage"], 2, loss_fn=F.cross_entropy)
    optimizer.zero_grad()
    losses = list[Tensor]()
    if dist.get_rank() == 0:
        schedule.step(rows[0])
    else:
        schedule.step(target=rows[1], losses=losses)
    optimizer.step()
    return torch.stack(losses).mean() if losses else None


def half_by_half(model: nn.Module, optimizer: Any, rows: Rows) -> float:
    """What two ranks compute whose layers take statistics of their own rows, in one process."""
    optimizer.zero_grad()
    losses = [F.cross_entropy(model(x), y) / 2 for x, y in zip(rows[0].chunk(2), rows[1].chunk(2), strict=True)]
    sum(losses, torch.zeros(())).backward()
    optimizer.step()
    return float(sum(losses))


class Tagger(nn.Module):
    """A recurrent network with dropout between its layers, and one matrix for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 6), nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(6, 9, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.embed(x))[0])


class Attention(nn.Module):
    """Dropout inside of torch's own attention, and biases whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(9, 8), nn.Linear(8, 9)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.5, batch_first=True)
        self.layers, self.norm = nn.TransformerEncoder(layer, 2), nn.GroupNorm(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(self.embed(x) + torch.arange(5.0)[:, None])
        return self.last(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


def tagged(model: Any, optimizer: Any, rows: dict[str, Tensor]) -> Tensor:
    return trained(model, optimizer, F.cross_entropy(model(rows["x"]).flatten(0, 1), rows["y"].flatten()))


def in_half_precision(model: Any, optimizer: Any, rows: Rows) -> Tensor:
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(rows[0]), rows[1])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return loss


def found(run: Any, **arguments: Any) -> DifferentNetwork:
    with pytest.raises(DifferentNetwork) as caught:
        assert_same_network(run, **{"model": Net(), "rows": ROWS, **arguments})
    return caught.value


CORRECT: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (step, {"wrap": DistributedDataParallel}),
    "reduced by hand": (reduced(""), {}),
    "a lambda with a tensor of the module": (lambda *given: weighted(*given), {"wrap": DistributedDataParallel}),
    "accumulation": (accumulated, {"wrap": DistributedDataParallel, "optimizer": torch.optim.AdamW, "ranks": 3}),
    "fully_shard": (step, {"wrap": sharded}),
    "tensor parallel": (step, {"wrap": in_parts, "shared": True, "reference": lambda *given: step(*given)}),
    "a function that makes the model": (step, {"model": lambda: Net(), "wrap": DistributedDataParallel}),
    "three steps of one row": (step, {"wrap": DistributedDataParallel, "steps": 3, "rows": (ROWS[0][:6], ROWS[1][:6])}),
    "pairs of ranks": (step, {"wrap": sharded_twice, "ranks": 4, "shared": 2}),
    "pipeline": (
        pipelined, {"wrap": lambda model: Part(model, dist.get_rank()), "shared": True, "reference": half_by_half}),
    "statistics of each rank": (
        step, {"wrap": DistributedDataParallel, "model": Normalised(), "reference": half_by_half, "buffers": False}),
    "recurrent": (tagged, {"wrap": DistributedDataParallel, "model": Tagger(), "rows": dict.fromkeys("xy", WORDS)}),
    "attention": (tagged, {
        "wrap": DistributedDataParallel, "model": Attention(), "rows": dict.fromkeys("xy", WORDS),
        "optimizer": torch.optim.Adagrad}),
    "half precision": (in_half_precision, {"wrap": DistributedDataParallel}),
    "compiled": (step, {"wrap": lambda model: DistributedDataParallel(torch.compile(model))}),
}  # fmt: skip
FAST = {"ddp", "reduced by hand"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in CORRECT]
)
def test_a_correct_step_passes(name: str) -> None:
    run, arguments = CORRECT[name]
    rows = (ROWS[0][:48], ROWS[1][:48]) if arguments.get("ranks") == 3 else ROWS
    assert_same_network(run, **{"model": Net(), "rows": rows, **arguments})


@pytest.mark.thorough
def test_weights_from_a_file_are_read_as_what_they_are(tmp_path: Path) -> None:
    """Ranks compute in float64, and the file has float32."""
    torch.save(Net().state_dict(), tmp_path / "net.pt")

    def pretrained() -> Net:
        net = Net()
        net.load_state_dict(torch.load(tmp_path / "net.pt"))
        assert all(parameter.abs().max() < 1 for parameter in net.parameters())
        return net

    assert_same_network(reduced(""), model=pretrained, rows=ROWS)
    assert found(step, model=pretrained).disagreement.cause.name == "not averaged"


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a sum that is averaged": (summed, {"wrap": DistributedDataParallel, "optimizer": torch.optim.Adam}, "divided"),
    "a forward past the wrapper": (
        lambda model, *given: step(model.module, *given), {"wrap": DistributedDataParallel}, "not averaged"),
    "tensors left out": (reduced("first"), {}, "tensors not averaged"),
    "not divided": (reduced("", divided=False), {}, "not divided"),
    "unequal parts": (step, {"wrap": DistributedDataParallel, "parts": (3, 5)}, "weights of ranks"),
    "statistics": (step, {"wrap": DistributedDataParallel, "model": Normalised()}, "batch statistics"),
    "unlike weights": (reduced(""), {"model": lambda: Net()}, "initial weights"),
    "a stale optimizer": (step, {"wrap": optimizer_before_sharding}, "not updated"),
    "a part not sharded": (step, {"wrap": head_not_sharded}, "tensors not averaged"),
    "a rate by the ranks": (step, {"wrap": rate_by_ranks}, "learning rates"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "a sum that is averaged" else pytest.mark.thorough) for name in WRONG],
)
def test_a_wrong_step_is_found_with_its_cause(name: str) -> None:
    run, arguments, cause = WRONG[name]
    error = found(run, **arguments)
    assert error.disagreement.cause.name == cause, str(error)
    assert "Cause: " in str(error)
    assert "Remedy: " in str(error)


@pytest.mark.thorough
def test_one_part_in_a_million_of_one_tensor_is_found() -> None:
    def run(model: Any, optimizer: Any, rows: Rows) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[0]), rows[1])
        loss.backward()
        if dist.get_world_size() > 1:
            model.module.last.weight.grad *= 1 + 1e-6
        optimizer.step()
        return loss

    error = found(run, wrap=DistributedDataParallel)
    assert {each.name for each in error.disagreement.differences} == {"last.weight"}
    assert "The gradient of last.weight is 1.000001 times that of one process" in str(error)


@pytest.mark.thorough
def test_a_step_that_one_rank_skips_is_found() -> None:
    def run(model: nn.Module, optimizer: Any, rows: Rows) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[0]), rows[1])
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if dist.get_rank() == 0:
            optimizer.step()
        return loss

    error = found(run)
    assert error.disagreement.cause.name == "number of steps"
    assert "one process made 1 optimizer steps, rank 0 made 1, rank 1 made 0" in " ".join(str(error).split())


def test_the_exception_of_a_rank_comes_with_its_own_traceback() -> None:
    def run(model: Any, optimizer: Any, rows: Rows) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("no such column")
        return step(model, optimizer, rows)

    with pytest.raises(WorkerFailed, match="rank 1 raised in step 1: KeyError: 'no such column'") as caught:
        assert_same_network(run, model=Net(), wrap=DistributedDataParallel, rows=ROWS)
    assert caught.value.rank == 1
    assert "in run\n    raise KeyError" in (caught.value.traceback or "")


def test_ranks_that_hang_are_reported_with_their_stacks() -> None:
    def run(model: Any, optimizer: Any, rows: Rows) -> Tensor:
        loss = step(model, optimizer, rows)
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1), src=1)
        return loss

    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="made no progress for") as caught:
        assert_same_network(run, model=Net(), rows=ROWS, steps=1, timeout=4.0)
    assert time.monotonic() - began < LONG_SECONDS
    assert "distributed_c10d.py" in str(caught.value)
    assert "test_same_network.py" in str(caught.value)
    assert "rank 1, all steps made" in str(caught.value)


@pytest.mark.thorough
def test_a_rank_that_dies_is_reported_with_its_status_and_what_it_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def run(model: Any, optimizer: Any, rows: Rows) -> Tensor:
        print("reading", len(rows[0]), "rows")
        if dist.get_rank() == 1:
            os._exit(7)
        return step(model, optimizer, rows)

    with pytest.raises(WorkerFailed, match="rank 1 ended with exit status 7, in step 1"):
        assert_same_network(run, model=Net(), wrap=DistributedDataParallel, rows=ROWS)
    assert "[rank 1] reading 4 rows" in capsys.readouterr().out


def no_loss(model: Any, optimizer: Any, rows: Rows) -> None:
    step(model, optimizer, rows)


def no_step(model: Any, optimizer: Any, rows: Rows) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no ranks": (step, {"ranks": 0}, r"ranks=0: .* at least 2 ranks; give ranks=2"),
    "no steps": (step, {"steps": 0}, r"steps=0: .* at least 1; give steps=8"),
    "unequal lengths": (
        step, {"rows": (ROWS[0], ROWS[1][:60])}, r"different numbers of .*\(64, 6\), \(60,\).*belongs into step"),
    "indivisible": (step, {"rows": ROWS[0][:60]}, r"60 examples, .* such as 48 or 64, or .*parts=\(3, 5\)"),
    "parts that do not add up": (step, {"parts": (3, 4)}, r"parts=\(3, 4\) take 56: give that many"),
    "no tensors": (step, {"rows": 5}, r"rows=5 have no tensor .*: give a tensor"),
    "numpy": (step, {"rows": ROWS[0].numpy()}, r"shape \(64, 6\): .* torch.from_numpy"),
    "no parameters": (step, {"model": nn.ReLU()}, r"model ReLU has no parameters: .* give the network"),
    "no gpu": (step, {"backend": "nccl", "ranks": 64}, r"one GPU for each of ranks=64, .* use backend='gloo'"),
    "no function": (5, {}, r"step=5: it is a function step\(model, optimizer, rows\)"),
    "one part": (step, {"parts": 4}, r"parts=4: .* here 2 positive integers"),
    "no seconds": (step, {"timeout": None}, r"timeout=None: .* seconds above 0"),
    "endless": (step, {"timeout": float("inf")}, r"timeout=inf: .* at most 604800"),
    "an optimizer": (
        step, {"optimizer": torch.optim.SGD([nn.Parameter(ROWS[0])])}, r"type SGD: .* such as torch.optim.AdamW"),
    "a wrapped model": (step, {"wrap": Net()}, r"wrap=an object of type Net: it is a function"),
    "shared by 3": (step, {"shared": 3, "ranks": 4}, r"shared=3: .* divides ranks=4"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused_with_value_rule_and_remedy(name: str) -> None:
    run, arguments, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        assert_same_network(run, **{"model": Net(), "rows": ROWS, **arguments})


USELESS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no loss": (no_loss, {}, r"step returned None on every rank: .* `return loss`"),
    "no optimizer step": (no_step, {}, r"no optimizer step on the ranks in 8 calls: it ends with optimizer.step\(\)"),
    "wrap without model": (step, {"wrap": lambda model: None}, r"wrap\(model\) returned None: .* `return model`"),
    "model without parameters": (step, {"model": nn.ReLU}, r"model ReLU has no parameters"),
    "no optimizer": (step, {"optimizer": lambda parameters: 3}, r"optimizer\(parameters\) returned .* type int"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) for name in USELESS])
def test_a_trial_that_shows_nothing_is_refused(name: str) -> None:
    run, arguments, sentence = USELESS[name]
    with pytest.raises(ValueError, match=sentence):
        assert_same_network(run, **{"model": Net(), "rows": ROWS, "wrap": DistributedDataParallel, **arguments})


SCRIPT = """
import torch
from torch import nn
from apportion.testing import assert_same_network


def step(model, optimizer, rows):
    print("called", flush=True)
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    loss.backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()
    optimizer.step()
    return loss


assert_same_network(step, model=nn.Linear(3, 2), rows=torch.randn(16, 3))
print("same")
"""


@pytest.mark.thorough
def test_a_plain_script_needs_neither_pytest_nor_a_main(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("[rank 1] called") == 8
    assert done.stdout.endswith("same\n")
