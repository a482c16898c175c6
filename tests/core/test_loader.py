"""Data-loading processes: the same examples, sooner; and none is left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import apportion
from apportion.core.data.batch import Batch
from apportion.core.data.loader import _Shelf
from apportion.core.data.source import BatchSource
from apportion.core.sampler import DataShard, Draws
from apportion.core.strategy import batches

LOOKED_AT = 2
"""The rows that a worker reads by itself, to see whether the data set keeps something that loaders would lose."""

pytestmark = pytest.mark.processes


class Log:
    """One line an example: who loaded it, which, from when till when."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, *words: Any) -> None:
        with open(self._path, "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self._path.read_text().splitlines()] if self._path.exists() else []


class Rows(Dataset[Any]):
    """61 examples of three numbers, some of which are drawn from every global generator."""

    def __init__(self, log: Log | None = None) -> None:
        self._log = log

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = float(torch.rand(())) + float(np.random.rand()) + random.random()
        if self._log is not None:
            self._log.write(os.getpid(), index)
        return torch.tensor([index / 61, drawn, 1.0]), index % 3


def jitter(batch: Batch, draws: Draws) -> Batch:
    noise = draws.normal(3) + torch.rand(3)
    return batch.replace(inputs=batch.inputs + 0.01 * noise)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def workload(**changed: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": network,
        "data": Rows,
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batch_size": 8,
        "steps": 12,
        "augment": jitter,
    }
    return apportion.Workload(**{**given, **changed})


def seen(source: BatchSource, numbers: Any, shard: DataShard = DataShard()) -> list[tuple[Tensor, Tensor]]:  # noqa: B008
    return [(b.inputs, b.targets) for b in (source.at(n, shard) for n in numbers)]


def same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


def losses(events: Iterator[apportion.Event]) -> list[float]:
    return [loss for event in events if event.kind == "step" for loss in event.data["values"]["loss"]]


@pytest.fixture
def loaded_ahead() -> Iterator[Any]:
    """Batches with loaders, which are ended after the test."""
    made: list[BatchSource] = []

    def make(job: apportion.Workload, loaders: int) -> BatchSource:
        made.append(BatchSource(job))
        made[-1].load_ahead(loaders)
        return made[-1]

    yield make
    for source in made:
        source.close()


# The same examples


@pytest.mark.parametrize("loaders", [1, 3])
def test_the_same_bits_with_and_without_loaders(loaded_ahead: Any, loaders: int) -> None:
    job = workload()
    for shard in (DataShard(), DataShard(1, 3), DataShard(1, 2, whole_batches=True)):
        assert same(seen(loaded_ahead(job, loaders), range(12), shard), seen(BatchSource(job), range(12), shard))


def test_a_tensor_dataset_needs_no_loaders_unless_it_is_augmented(loaded_ahead: Any) -> None:
    job = workload(data=lambda: TensorDataset(torch.arange(183.0).reshape(61, 3), torch.arange(61) % 3))
    plain = replace(job, augment=None)
    before = psutil.Process().children()
    assert same(seen(loaded_ahead(plain, 2), range(12)), seen(BatchSource(plain), range(12)))
    assert psutil.Process().children() == before
    assert same(seen(loaded_ahead(job, 2), range(12)), seen(BatchSource(job), range(12)))
    assert len(psutil.Process().children()) == len(before) + 2


def test_another_share_or_another_step_discards_what_was_loaded_ahead(loaded_ahead: Any) -> None:
    job = workload()
    source, plain = loaded_ahead(job, 2), BatchSource(job)
    first, second = DataShard(0, 2), DataShard(0, 2, shares=(3.0, 1.0))
    for numbers, shard in ((range(3), first), (range(3, 6), second), (range(3), second), (range(9, 12), first)):
        assert same(seen(source, numbers, shard), seen(plain, numbers, shard))
    assert len(psutil.Process().children()) >= 2, "the processes stay"
    source.start_over()
    assert same(seen(source, range(12), first), seen(plain, range(12), first))


def test_shares_without_rows_are_passed_over(loaded_ahead: Any) -> None:
    job = workload(batch_size=20)
    source, plain, shard = loaded_ahead(job, 2), BatchSource(job), DataShard(1, 2)
    for number in range(8):
        batch, expected = source.at(number, shard), plain.at(number, shard)
        if len(expected):
            assert torch.equal(batch.inputs, expected.inputs)
        else:
            assert len(batch) == 0
            assert torch.equal(batch.borrowed().inputs, expected.borrowed().inputs)


def test_microbatches_are_cut_from_what_was_loaded(loaded_ahead: Any) -> None:
    job = workload()
    source, plain = loaded_ahead(job, 1), BatchSource(job)
    for number in range(3):
        parts, expected = source.at(number).parts(3), plain.at(number)
        assert torch.equal(torch.cat([p.inputs for p in parts]), expected.inputs)
        assert [p.count for p in parts] == [3.0, 3.0, 2.0]


def test_tensors_come_with_their_strides_and_types() -> None:
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).T,
        torch.randn(3).to(torch.bfloat16),
        torch.tensor(5),
        torch.zeros(0, 3, dtype=torch.bool),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.arange(10)[::2],
    ]
    sent = {"tensors": tensors, "array": np.arange(6.0).reshape(2, 3), "text": "é", "class": Log}
    shelf = _Shelf(2)
    packed = shelf.pack(sent, 1)
    assert packed.spans
    came = shelf.unpack(packed)
    shelf.pack(torch.zeros(1000), 1)  # the next one in the same place
    assert all(c.dtype == s.dtype and torch.equal(c, s) for c, s in zip(came["tensors"], tensors, strict=True))
    assert [c.stride() for c in came["tensors"]] == [s.clone().stride() for s in tensors]
    assert (came["array"] == sent["array"]).all()
    assert (came["text"], came["class"]) == ("é", Log)


def test_a_batch_larger_than_its_place_comes_all_the_same(monkeypatch: pytest.MonkeyPatch, loaded_ahead: Any) -> None:
    monkeypatch.setattr("apportion.core.data.loader.PLACE_BYTES", 128)
    job = workload(batch_size=16)
    assert same(seen(loaded_ahead(job, 2), range(12)), seen(BatchSource(job), range(12)))


def test_training_gives_the_same_losses_with_loaders_on_one_and_two_workers(tmp_path: Path) -> None:
    job = workload(evaluation=apportion.Evaluation(data=Rows, every=None))
    for workers, strategy in ((1, "single_device"), (2, "data_parallel(microbatches=2)")):
        found = []
        for loaders in (0, 2):
            launcher = apportion.local(workers=workers, threads=1, loaders=loaders)
            with pytest.warns(UserWarning, match="take turns") if workers * (1 + loaders) > 2 else nullcontext():
                events = list(apportion.run(job, strategy, launcher=launcher, run_dir=tmp_path / f"{workers}{loaders}"))
            found.append((losses(iter(events)), events[-1].data["metrics"]))
        assert found[0] == found[1]
        assert len(found[0][0]) == 12


# Sooner


class Slow(Rows):
    """Takes its time, and says when."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        began = time.monotonic()
        time.sleep(0.002)
        assert self._log is not None
        self._log.write("load", os.getpid(), began, time.monotonic())
        return torch.tensor([index / 61, 0.0, 1.0]), index % 3


class Computing(nn.Module):
    """Says when it computes."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.layer, self._log = nn.Linear(3, 3), log

    def forward(self, x: Tensor) -> Any:
        began = time.monotonic()
        time.sleep(0.02)
        self._log.write("compute", os.getpid(), began, time.monotonic())
        return self.layer(x)


def test_loaders_load_while_the_worker_computes(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    job = workload(model=lambda: Computing(log), data=lambda: Slow(log), augment=None)
    launcher = apportion.local(workers=1, threads=1, loaders=1)
    apportion.train(job, "single_device", launcher=launcher, run_dir=tmp_path / "run")
    spans = {kind: [line[1:] for line in log.lines() if line[0] == kind] for kind in ("load", "compute")}
    loaders, workers = ({line[0] for line in spans[kind]} for kind in ("load", "compute"))
    assert len(loaders - workers) == len(workers) == 1, "examples are loaded in a process of their own"
    looked_at = [line for line in spans["load"] if line[0] in workers]
    assert len(looked_at) <= LOOKED_AT, "the worker itself sees what the data set keeps as a few rows are read"
    computing = [(float(a), float(b)) for _, a, b in spans["compute"]]
    overlapping = [s for s in spans["load"] if any(a < float(s[2]) and float(s[1]) < b for a, b in computing)]
    assert len(overlapping) > len(spans["load"]) / 3, "loading and computing overlap"


# Going on, stopping, failing


def test_resume_goes_on_at_its_step_with_loaders(tmp_path: Path) -> None:
    job = workload()
    launcher = apportion.local(workers=1, threads=1, loaders=1)
    whole = losses(apportion.run(job, "single_device", launcher=launcher, run_dir=tmp_path / "whole"))
    apportion.train(job, "single_device", launcher=launcher, run_dir=tmp_path / "cut", steps=5)
    rest = apportion.run(job, "single_device", launcher=launcher, run_dir=tmp_path / "cut", resume=True)
    assert losses(rest) == whole[5:]


def test_break_ends_the_loaders(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    job = workload(data=lambda: Rows(log), steps=100_000)
    launcher = apportion.local(workers=1, threads=1, loaders=1)
    for event in apportion.run(job, "single_device", launcher=launcher, run_dir=tmp_path / "run"):
        if event.kind == "step":
            break
    pids = {int(line[0]) for line in log.lines()}
    assert len(pids) == 2, "the loader, and the worker, which looks at a few rows before"
    assert not any(map(psutil.pid_exists, pids))


def test_loaders_end_with_a_worker_that_is_killed(tmp_path: Path, eventually: Any) -> None:
    log = Log(tmp_path / "log")
    job = workload(data=lambda: Rows(log), steps=100_000)
    events = apportion.run(
        job, "single_device", launcher=apportion.local(workers=1, threads=1, loaders=1), run_dir=tmp_path / "run"
    )
    next(event for event in events if event.kind == "step")
    pids = {int(line[0]) for line in log.lines()}
    os.kill(psutil.Process(next(iter(pids))).ppid(), signal.SIGKILL)
    with pytest.raises(apportion.WorkerFailed, match="killed by SIGKILL"):
        list(events)
    eventually(lambda: not any(map(psutil.pid_exists, pids)), within=5, what="the loaders are gone")


class Broken(Rows):
    """One example that cannot be read, or a crash."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 17 and self._how == "raise":
            raise ValueError("example 17 is no picture")
        if index == 17:
            os.kill(os.getpid(), getattr(signal, self._how))
        return super().__getitem__(index)


def nowhere_else(samples: list[Any]) -> Any:
    made = torch.utils.data.default_collate(samples)
    shared = [t for t in made if t.is_shared()]
    assert not shared, "it has a name, and stays behind where the loader is killed"
    return made


def test_what_a_loader_collates_is_in_no_shared_memory_of_its_own(loaded_ahead: Any) -> None:
    job = workload(collate=nowhere_else)
    assert same(seen(loaded_ahead(job, 2), range(12)), seen(BatchSource(job), range(12)))


def test_an_exception_in_a_loader_is_told_with_the_users_own_line(tmp_path: Path) -> None:
    launcher = apportion.local(workers=1, threads=1, loaders=1)
    with pytest.raises(apportion.WorkerFailed, match="example 17 is no picture") as caught:
        apportion.train(workload(data=lambda: Broken("raise")), "single_device", launcher=launcher, run_dir=tmp_path)
    assert 'raise ValueError("example 17 is no picture")' in str(caught.value.traceback)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_a_loader_that_dies_is_the_cause(tmp_path: Path, how: str) -> None:
    launcher = apportion.local(workers=1, threads=1, loaders=1)
    with pytest.raises(apportion.WorkerFailed, match=rf"data-loading process \d+ was ended by {how}"):
        apportion.train(workload(data=lambda: Broken(how)), "single_device", launcher=launcher, run_dir=tmp_path)


def test_a_loop_of_ones_own_takes_loaders() -> None:
    found = []
    for loaders in (0, 2):
        step = apportion.single_device().build(workload(), apportion.World())
        found.append([float(step(batch)["loss"]) for batch in batches(step, loaders=loaders)])
    assert found[0] == found[1]
