"""State that is no tensor of the network survives a killed worker and a resume, with the bits of an undisturbed run, or
is named and refused."""

from __future__ import annotations

import io
import os
import queue
import random
import shutil
import signal
import time
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import apportion

STEPS = 40
WARM = [0]


class Numbered(nn.Linear):
    """A number on the class that becomes one of the instance."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) / (1 + 0.05 * self.calls)


class Moded(nn.Linear):
    """A text that says in which phase a layer is."""

    mode, seen = "warm", 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        self.mode = "cold" if self.seen % 7 > 3 else "warm"
        return super().forward(x) * (1.0 if self.mode == "warm" else 0.6)


class Remembering(nn.Linear):
    """A history in a list and in a deque, and a dict of counts, which are changed in place."""

    def __init__(self, *sizes: int, kind: str) -> None:
        super().__init__(*sizes)
        self.kind = kind
        self.list: list[float] = []
        self.deque: deque[float] = deque([0.0], maxlen=5)
        self.dict: dict[str, Any] = {"calls": 0, "norms": {}}

    def forward(self, x: Tensor) -> Tensor:
        norm = self.weight.detach().norm().item()
        if self.kind == "list":
            self.list.append(norm)
            factor = sum(self.list[-9:]) / 9
        elif self.kind == "deque":
            self.deque.append(norm)
            factor = sum(self.deque) / 5
        else:
            self.dict["calls"] += 1
            self.dict["norms"][self.dict["calls"] % 4] = norm
            factor = sum(self.dict["norms"].values()) / 4 + 0.01 * self.dict["calls"]
        return super().forward(x) / (1 + factor)


class Logging(nn.Linear):
    """A log of calls in bytes or text that change in place, whose length the forward uses."""

    def __init__(self, *sizes: int, kind: str) -> None:
        super().__init__(*sizes)
        self.bytes, self.shorts, self.file = bytearray(), array("h"), io.BytesIO()
        self.text, self.queue = io.StringIO(), queue.Queue[int]()
        self.log: Any = getattr(self, kind)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.log, queue.Queue):
            self.log.put(self.log.qsize())
            length = self.log.qsize()
        elif isinstance(self.log, io.IOBase):
            length = self.log.write("." if isinstance(self.log, io.StringIO) else b".") * self.log.tell()
        else:
            self.log.append(7)
            length = len(self.log)
        return super().forward(x) / (1 + 0.05 * length)


class Smoothed(nn.Linear):
    """Tensors that are attributes: one is made anew, one is changed in place."""

    mean = torch.zeros((), dtype=torch.float64)

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.total = torch.zeros(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.detach().abs().mean()
        self.mean = 0.95 * self.mean + 0.05 * size
        self.total += size
        return super().forward(x) / (0.1 + self.mean + 0.01 * self.total)


class Drawing(nn.Linear):
    """Private generators, one of which is made at the first call."""

    def __init__(self, *sizes: int, kind: str) -> None:
        super().__init__(*sizes)
        self.kind = kind
        self.legacy, self.plain = np.random.RandomState(3), random.Random(3)
        self.numpy = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "torch":
            self.draws = getattr(self, "draws", torch.Generator().manual_seed(3))
            drawn = torch.rand((), generator=self.draws).item()
        else:
            drawn = {"numpy": self.numpy, "legacy": self.legacy, "python": self.plain}[self.kind].random()
        return super().forward(x) * (0.6 + 0.4 * drawn)


class Extra(nn.Linear):
    """What only ``get_extra_state`` can tell: it is held by an object of a class without a dict."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.held = iter(range(10**9))
        self.last = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.last)

    def set_extra_state(self, state: Tensor) -> None:
        self.last = int(state)

    def forward(self, x: Tensor) -> Tensor:
        self.last += 1
        return super().forward(x) / (1 + 0.05 * self.last)


class OnClass(nn.Linear):
    """A number that all instances have in common."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        OnClass.calls += 1
        return super().forward(x) / (1 + 0.05 * OnClass.calls)


class GlobalCount(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        WARM[0] += 1
        return super().forward(x) / (1 + 0.05 * WARM[0])


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) / (1 + 0.05 * self.calls)


def counting_closure() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(outputs, targets) / (1 + 0.05 * calls)

    return loss


class Decaying(torch.optim.SGD):
    """An optimizer that counts beside its state."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.5 / (1 + 0.1 * self.calls)
        return super().step(closure)


class Stepped(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that counts by itself."""

    asked = 0

    def get_lr(self) -> list[float]:
        self.asked += 1
        return [base / (1 + 0.1 * self.asked) for base in self.base_lrs]


class Curriculum(TensorDataset):
    """Rows that grow harder with the number of those that were fetched."""

    given = 0

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return self.tensors[0][index] / (1 + 0.002 * self.given), self.tensors[1][index]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "number": lambda: Numbered(10, 3),
    "text": lambda: Moded(10, 3),
    "list": lambda: Remembering(10, 3, kind="list"),
    "deque": lambda: Remembering(10, 3, kind="deque"),
    "dict": lambda: Remembering(10, 3, kind="dict"),
    "bytearray": lambda: Logging(10, 3, kind="bytes"),
    "array of the standard library": lambda: Logging(10, 3, kind="shorts"),
    "file in memory": lambda: Logging(10, 3, kind="file"),
    "text in memory": lambda: Logging(10, 3, kind="text"),
    "queue": lambda: Logging(10, 3, kind="queue"),
    "tensor": lambda: Smoothed(10, 3),
    "torch generator": lambda: Drawing(10, 3, kind="torch"),
    "numpy generator": lambda: Drawing(10, 3, kind="numpy"),
    "legacy numpy generator": lambda: Drawing(10, 3, kind="legacy"),
    "random.Random": lambda: Drawing(10, 3, kind="python"),
    "class attribute": lambda: OnClass(10, 3),
    "global": lambda: GlobalCount(10, 3),
}
KINDS = [*MODELS, "closure of the loss", "loss module", "optimizer", "schedule"]


def workload(kind: str, **changes: Any) -> apportion.Workload:
    inputs = torch.randn(200, 10, generator=torch.Generator().manual_seed(1))
    closure = counting_closure() if kind == "closure of the loss" else nn.functional.cross_entropy
    inner = CountingLoss() if kind == "loss module" else closure
    optimizer = Decaying if kind == "optimizer" else torch.optim.SGD

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        Path(os.environ["PIDS"], f"{os.environ.get('RANK')}.{os.getpid()}").touch()
        time.sleep(0.005)  # so that a worker can be killed, and a run left, before its end
        return inner(outputs, targets)

    given: dict[str, Any] = {
        "model": MODELS.get(kind, lambda: nn.Linear(10, 3)),
        "data": lambda: TensorDataset(inputs, inputs[:, :3].argmax(1)),
        "loss": loss,
        "optimizer": lambda parameters: optimizer(parameters, lr=0.5),
        "schedule": (lambda optimizer, steps: Stepped(optimizer)) if kind == "schedule" else None,
        "batch_size": 20,
        "steps": STEPS,
        "precision": "float64",
    }
    return apportion.Workload(**{**given, **changes})


@pytest.fixture(autouse=True)
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    return tmp_path / "pids"


def process_of(rank: int) -> int:
    """The process that has this rank now."""
    files = Path(os.environ["PIDS"]).glob(f"{rank}.*")
    return int(max(files, key=lambda file: file.stat().st_mtime_ns).suffix[1:])


OFTEN = apportion.Policy(checkpoint_every="10 steps")


def trained(  # noqa: PLR0913 (what is done to a run)
    work: apportion.Workload,
    run_dir: Path,
    strategy: str = "data_parallel",
    workers: int = 2,
    *,
    kill: bool = False,
    leave: bool = False,
    resume: bool = False,
    heard: list[str] | None = None,
) -> dict[str, Tensor]:
    """The weights at the end, or where the run was left at a checkpoint. ``heard``: takes the causes of faults."""
    options: dict[str, Any] = {"policy": OFTEN, "check": False, "resume": resume}
    launcher = apportion.local(workers)
    for event in apportion.run(work, strategy, launcher=launcher, run_dir=run_dir, **options):
        if kill and event.kind == "step" and event.step >= 12:
            os.kill(process_of(1), signal.SIGKILL)
            kill = False
        if leave and event.kind == "checkpoint":
            break
        if heard is not None and event.kind == "fault":
            heard.append(event.data["cause"])
    assert not kill, "no worker was killed"
    return apportion.load(run_dir, model=work.model).state_dict()


@pytest.mark.parametrize("kind", ["number", *(pytest.param(k, marks=pytest.mark.thorough) for k in KINDS[1:])])
def test_a_killed_worker_leaves_the_bits_of_the_undisturbed_run(kind: str, tmp_path: Path, furthest: Any) -> None:
    calm = trained(workload(kind), tmp_path / "calm")
    killed = trained(workload(kind), tmp_path / "killed", kill=True)
    assert furthest(calm, killed) == 0.0


DIVIDED = ["map_reduce", "tensor_parallel", "layer_placement", "pipeline_parallel", "fully_sharded"]
APART = ["local_sgd(every=2)", "parameter_server", "hogwild"]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", DIVIDED)
def test_other_strategies_resume_with_the_same_bits(strategy: str, tmp_path: Path, furthest: Any) -> None:
    work = workload("loss module", model=lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)))
    calm = trained(work, tmp_path / "calm", strategy)
    trained(work, tmp_path / "left", strategy, leave=True)
    assert furthest(calm, trained(work, tmp_path / "left", strategy, resume=True)) == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", DIVIDED[:-1])
def test_other_strategies_replace_a_worker_with_the_same_bits(strategy: str, tmp_path: Path, furthest: Any) -> None:
    work = workload("closure of the loss", model=lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)))
    calm = trained(work, tmp_path / "calm", strategy)
    assert furthest(calm, trained(work, tmp_path / "killed", strategy, kill=True)) == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", APART)
def test_what_each_worker_keeps_for_itself_is_named_and_a_resume_refused(strategy: str, tmp_path: Path) -> None:
    heard: list[str] = []
    trained(workload("number"), tmp_path / "left", strategy, leave=True, heard=heard)
    assert any("model.calls" in cause and "caches=" in cause for cause in heard)
    with pytest.raises(ValueError, match=r"model.calls .*start a new run"):
        trained(workload("number"), tmp_path / "left", strategy, resume=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(kind: str, tmp_path: Path, furthest: Any) -> None:
    calm = trained(workload(kind), tmp_path / "calm")
    trained(workload(kind), tmp_path / "left", leave=True)
    assert furthest(calm, trained(workload(kind), tmp_path / "left", resume=True)) == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_on_other_workers_ends_as_one_device(kind: str, tmp_path: Path, furthest: Any) -> None:
    calm = trained(workload(kind), tmp_path / "calm", "single_device", 1)
    trained(workload(kind), tmp_path / "left", "single_device", 1, leave=True)
    assert furthest(calm, trained(workload(kind), tmp_path / "left", resume=True)) < 1e-9


PREVIOUS = Path(__file__).parent / "previous_version"


def previous(name: str, tmp_path: Path) -> Path:
    """A run directory that the version before state in Python was kept has left in its middle."""
    return Path(shutil.copytree(PREVIOUS / name, tmp_path / name, symlinks=True))


@pytest.mark.thorough
def test_a_run_of_the_previous_version_resumes_where_python_keeps_nothing(tmp_path: Path, furthest: Any) -> None:
    calm = trained(workload("plain"), tmp_path / "calm", "single_device", 1)
    found = trained(workload("plain"), previous("plain", tmp_path), "single_device", 1, resume=True)
    assert furthest(calm, found) == 0.0


@pytest.mark.thorough
def test_a_run_of_the_previous_version_is_refused_by_the_name_of_what_it_did_not_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step \d+ was written by an earlier apportion.*model.calls.*caches="):
        trained(workload("number"), previous("counted", tmp_path), "single_device", 1, resume=True)


class Inverse(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any, rate: Callable[[int], float]) -> None:
        self.rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * self.rate(self.last_epoch) for base in self.base_lrs]


class Keeping(torch.optim.SGD):
    """An optimizer whose slots are of a kind that no checkpoint holds."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = {"gradients": deque([1], maxlen=3)}
        return super().step(closure)


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "workers"), [("single_device", 1), ("data_parallel", 2)])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schedule": lambda optimizer, steps: Inverse(optimizer, lambda step: 1 / (1 + step))}, "schedule.*rate"),
        ({"optimizer": lambda parameters: Keeping(parameters, lr=0.1)}, "Keeping keeps seen"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(
    changes: Any, named: str, strategy: str, workers: int, tmp_path: Path
) -> None:
    work, launcher, seen = workload("plain", **changes), apportion.local(workers=workers), list[str]()
    with pytest.raises(ValueError, match=named):
        seen += (
            e.kind for e in apportion.run(work, strategy, launcher=launcher, run_dir=tmp_path / "run", check=False)
        )
    assert "step" not in seen


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["single_device", "data_parallel"])
def test_a_learning_rate_that_is_a_tensor_resumes_as_one(strategy: str, tmp_path: Path, furthest: Any) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=torch.tensor(0.01))

    work, workers = workload("plain", optimizer=adam, precision="float32"), 1 if strategy == "single_device" else 2
    calm = trained(work, tmp_path / "calm", strategy, workers)
    trained(work, tmp_path / "left", strategy, workers, leave=True)
    assert furthest(calm, trained(work, tmp_path / "left", strategy, workers, resume=True)) == 0.0


INPUTS = torch.randn(200, 10, generator=torch.Generator().manual_seed(1))


def curriculum() -> Curriculum:
    return Curriculum(INPUTS, INPUTS[:, :3].argmax(1))


@pytest.mark.thorough
def test_a_curriculum_goes_on_after_a_loss_and_on_as_many_workers(tmp_path: Path, furthest: Any) -> None:
    work = workload("plain", data=curriculum)
    calm = trained(work, tmp_path / "calm")
    assert furthest(calm, trained(work, tmp_path / "killed", kill=True)) == 0.0
    trained(work, tmp_path / "left", leave=True)
    assert furthest(calm, trained(work, tmp_path / "left", resume=True)) == 0.0


@pytest.mark.thorough
def test_a_curriculum_is_refused_on_another_number_of_workers(tmp_path: Path) -> None:
    work = workload("plain", data=curriculum)
    trained(work, tmp_path / "left", leave=True)
    with pytest.raises(ValueError, match=r"data.given .*fetched by 2 workers.*workers=2"):
        trained(work, tmp_path / "left", "single_device", 1, resume=True)


class Noting(nn.Linear):
    """A number that each rank takes from its own rows."""

    first = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.first = x.detach()[0, 0].item()
        return super().forward(x)


class Iterating(nn.Linear):
    """An iterator, whose position cannot be read."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rates = iter([1 / (1 + 0.05 * i) for i in range(1000)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.rates)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "workers", "name"),
    [(lambda: Noting(10, 3), 2, "model.first"), (lambda: Iterating(10, 3), 1, "model.rates")],
)
def test_what_cannot_be_carried_is_named_and_a_resume_refused(
    model: Any, workers: int, name: str, tmp_path: Path
) -> None:
    heard: list[str] = []
    strategy = "data_parallel" if workers > 1 else "single_device"
    trained(workload("plain", model=model), tmp_path / "left", strategy, workers, leave=True, heard=heard)
    assert any(cause.startswith(name) and "caches=" in cause for cause in heard), heard
    with pytest.raises(ValueError, match=name):
        trained(workload("plain", model=model), tmp_path / "left", strategy, workers, resume=True)


@pytest.mark.thorough
def test_a_killed_worker_never_loses_silently_what_ranks_have_of_their_own(tmp_path: Path, furthest: Any) -> None:
    work, heard = workload("plain", model=lambda: Noting(10, 3)), list[str]()
    calm = trained(work, tmp_path / "calm")
    found: dict[str, Tensor] | None = None
    with suppress(apportion.errors.ApportionError, ValueError):  # or it goes back to the beginning
        found = trained(work, tmp_path / "killed", kill=True, heard=heard)
    assert found is None or furthest(calm, found) == 0.0
    assert any("model.first" in cause for cause in heard)


class Queueing(nn.Linear):
    """A large tensor that is changed in place at every step."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.queue = torch.zeros(4_000_000, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.queue[:3] += self.weight.detach()[:, 0]
        return super().forward(x) / (1 + self.queue[:3].abs())


@pytest.mark.thorough
def test_what_is_too_large_to_copy_at_every_step_is_named(tmp_path: Path) -> None:
    work, heard = workload("plain", model=lambda: Queueing(10, 3)), list[str]()
    trained(work, tmp_path / "left", "single_device", 1, leave=True, heard=heard)
    assert any("model.queue is of 32 MB" in cause for cause in heard)
    with pytest.raises(ValueError, match=r"model.queue"):
        trained(work, tmp_path / "left", "single_device", 1, resume=True)


@pytest.mark.thorough
def test_what_training_does_not_depend_on_can_be_named(tmp_path: Path) -> None:
    work, heard = workload("plain", model=lambda: Noting(10, 3), caches=("Noting.first",)), list[str]()
    trained(work, tmp_path / "left", leave=True, heard=heard)
    assert not heard
    trained(work, tmp_path / "left", resume=True)


@pytest.mark.thorough
def test_state_in_loading_processes_is_named_before_the_first_step(tmp_path: Path) -> None:
    work, launcher = workload("plain", data=curriculum), apportion.local(workers=1, loaders=1)
    events = [*apportion.run(work, "single_device", launcher=launcher, run_dir=tmp_path / "run", check=False)]
    (named,) = (e for e in events if e.kind == "fault")
    assert "data.given is changed by the processes that load the rows" in named.data["cause"]
    assert named.step == 0


class Described(Numbered):
    """Extra state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "names": ("a", "b")}

    def set_extra_state(self, state: Any) -> None:
        assert state["names"] == ("a", "b")
        self.calls = state["calls"]


@pytest.mark.thorough
@pytest.mark.parametrize("model", [lambda: Numbered(10, 3), lambda: Described(10, 3), lambda: Extra(10, 3)])
def test_a_loaded_network_computes_what_the_trained_one_does(model: Any, tmp_path: Path) -> None:
    work = workload("plain", model=model, data=lambda: TensorDataset(INPUTS, INPUTS[:, :3].argmax(1)))
    trained(work, tmp_path / "run", "single_device", 1)
    loaded = apportion.load(tmp_path / "run", model=model)
    assert getattr(loaded, "calls", None) == STEPS or loaded.last >= STEPS
