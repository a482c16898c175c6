"""What trainings need besides a loop: the order of the examples, updates of several batches, an average of the weights,
and schedules by the epoch and by a metric. Each is the same on any number of workers, or refused by name."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from small_work import ROWS, dense, rows, work
from torch import Tensor, nn
from torch.utils.data import Dataset

import apportion

TESTED = apportion.Evaluation(data=rows, metrics={"loss": nn.functional.cross_entropy})
WEIGHTS = (torch.arange(ROWS) % 3 + 0.5).tolist()
FEATURES: dict[str, dict[str, Any]] = {
    "weighted": {"order": apportion.weighted(WEIGHTS)},
    "with_replacement": {"order": "with_replacement(30)"},
    "grouped": {"order": apportion.grouped(WEIGHTS)},
    "custom": {"order": apportion.custom(lambda seed, epoch: torch.arange(30) + epoch % 2)},
    "drop_last": {"drop_last": True, "batch_size": 16},
    "accumulate": {"accumulate": 3, "batch_size": 7},
    "ema": {"average": "ema(0.8)"},
    "swa": {"average": "swa(2)"},
    "by epoch": {
        "schedule": lambda optimizer, epochs: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "schedule_every": "epoch",
        "steps": 12,
    },
    "by metric": {
        "schedule": lambda optimizer, _: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        "schedule_on": "loss",
        "evaluation": apportion.Evaluation(
            data=rows, metrics={"loss": lambda outputs, targets: torch.ones(())}, every=0.4
        ),
        "steps": 12,
    },
}
STRATEGIES = ["data_parallel", "fully_sharded", "pipeline_parallel(microbatches=2)", "tensor_parallel", "local_sgd"]
NOT_BY = {"local_sgd": {"ema", "swa", "by metric"}}
"""The features that a strategy refuses."""
BY_DAY = {
    ("weighted", "data_parallel"),
    ("accumulate", "pipeline_parallel(microbatches=2)"),
    ("ema", "fully_sharded"),
    ("by metric", "data_parallel"),
}


@pytest.mark.parametrize(
    ("feature", "strategy"),
    [
        pytest.param(f, s, marks=[] if (f, s) in BY_DAY else pytest.mark.thorough)
        for f in FEATURES
        for s in STRATEGIES
        if f not in NOT_BY.get(s, ())
    ],
)
def test_a_feature_is_that_of_one_device(feature: str, strategy: str, no_cached_proofs: Path) -> None:
    proof = apportion.check(work(**FEATURES[feature]), strategy, workers=2)
    assert proof.verdict == "equal", str(proof)


def trained(tmp_path: Path, name: str, workers: int, **changes: Any) -> dict[str, Tensor]:
    strategy = "single_device" if workers == 1 else "data_parallel"
    result = apportion.train(
        work(**changes), strategy, launcher=apportion.local(workers=workers), run_dir=tmp_path / name, check=False
    )
    return apportion.load(result.run_dir, model=dense).state_dict()


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    "feature",
    [pytest.param(f, marks=[] if f in ("weighted", "by metric", "ema") else pytest.mark.thorough) for f in FEATURES],
)
@pytest.mark.filterwarnings("ignore:3 workers x 1 threads")
def test_a_whole_run_ends_where_one_worker_ends(feature: str, tmp_path: Path) -> None:
    alone = trained(tmp_path, "1", 1, **FEATURES[feature])
    for workers in (2, 3):
        assert difference(alone, trained(tmp_path, str(workers), workers, **FEATURES[feature])) < 1e-9


@pytest.mark.thorough
def test_every_feature_changes_the_training(tmp_path: Path) -> None:
    plain = trained(tmp_path, "plain", 1, steps=12)
    for feature, changes in FEATURES.items():
        changed = trained(tmp_path, feature.replace(" ", "_"), 1, **{"steps": 12, **changes})
        assert difference(plain, changed) > 1e-6, feature


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_accumulated_batches_are_one_batch_of_all_their_rows(workers: int, tmp_path: Path) -> None:
    strategy = "single_device" if workers == 1 else "data_parallel"
    states = []
    for number, (batch, accumulate) in enumerate([(21, 1), (7, 3)]):
        seen = work(batch_size=batch, accumulate=accumulate, model=dense, steps=9)
        where = apportion.local(workers=workers)
        events = list(apportion.run(seen, strategy, launcher=where, run_dir=tmp_path / str(number), check=False))
        start = next(event for event in events if event.kind == "start")
        assert (start.batch_size, start.steps, start.steps_per_epoch) == (21, 9, 3)
        states.append(apportion.load(tmp_path / str(number), model=dense).state_dict())
    assert difference(*states) < 1e-12


def test_a_forward_pass_of_an_accumulated_update_has_the_rows_of_one_batch(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.most = dense(), 0

        def forward(self, x: Tensor) -> Tensor:
            assert not self.training or len(x) <= 7, f"{len(x)} rows at once"
            return self.net(x)  # type: ignore[no-any-return]

    for strategy, workers in (("single_device", 1), ("data_parallel", 2)):
        apportion.train(
            work(model=Rows, data=rows, batch_size=7, accumulate=3),
            strategy,
            launcher=apportion.local(workers=workers),
            run_dir=tmp_path / strategy,
            check=False,
        )


class Noted(Dataset[Any]):
    """Writes down which of its rows are read in training, in which epoch it is."""

    def __init__(self, folder: Path) -> None:
        self.rows, self.folder, self.epoch = rows(), folder, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        with open(self.folder / str(os.getpid()), "a") as file:
            file.write(f"{self.epoch} {number}\n")
        return self.rows[number]


def read_rows(folder: Path) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            epoch, number = map(int, line.split())
            found.setdefault(epoch, Counter())[number] += 1
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_data_set_is_told_the_epoch_and_read_in_the_order_of_the_workload(workers: int, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    order = apportion.custom(lambda seed, epoch: torch.arange(24) + 10 * epoch)
    noted = work(data=lambda: Noted(tmp_path / "rows"), order=order, steps=6)
    strategy = "single_device" if workers == 1 else "data_parallel"
    launcher = apportion.local(workers=workers)
    apportion.train(noted, strategy, launcher=launcher, run_dir=tmp_path / "run", check=False)
    found = read_rows(tmp_path / "rows")
    assert found.keys() >= {0, 1, 2}
    for epoch in (1, 2):  # rows of the first epoch are looked at besides
        assert found[epoch] == Counter(range(10 * epoch, 10 * epoch + 24))


def test_weights_say_how_often_examples_are_drawn() -> None:
    order = apportion.weighted([1.0, 0.0, 3.0], draws=40_000)
    drawn = torch.from_numpy(order.epoch(3, 4, seed=1, epoch=0)).bincount(minlength=3) / 40_000
    assert drawn.tolist() == pytest.approx([0.25, 0.0, 0.75], abs=0.01)
    again = order.epoch(3, 4, seed=1, epoch=0)
    assert (again == order.epoch(3, 4, seed=1, epoch=0)).all()
    assert (again != order.epoch(3, 4, seed=1, epoch=1)).any()
    assert (again != order.epoch(3, 4, seed=2, epoch=0)).any()


def test_grouped_batches_have_examples_of_like_lengths_each_once_an_epoch() -> None:
    lengths = torch.randint(1, 100, (1000,), generator=torch.Generator().manual_seed(0))
    taken = torch.from_numpy(apportion.grouped(lengths).epoch(1000, 20, seed=1, epoch=0))
    assert taken.sort().values.tolist() == list(range(1000))
    spread = (lengths[taken].view(50, 20).max(1).values - lengths[taken].view(50, 20).min(1).values).float().mean()
    assert spread < 5
    assert (taken[:20] != taken.sort().values[:20]).any()


def test_lengths_are_read_from_the_data_set_where_none_are_given(tmp_path: Path) -> None:
    def sentences() -> Any:
        return [(torch.full((length,), 1.0, dtype=torch.float64), 0) for length in (3, 1, 2, 3, 1, 2)]

    sizes = []

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        sizes.append({len(x) for x, _ in samples})
        longest = max(len(x) for x, _ in samples)
        padded = torch.stack([nn.functional.pad(x, (0, 6 - len(x))) for x, _ in samples])
        assert longest <= 6
        return padded, torch.tensor([y for _, y in samples])

    grouped = work(data=sentences, collate=collate, order="grouped", batch_size=2, steps=3)
    result = apportion.train(grouped, "single_device", run_dir=tmp_path / "run")
    assert result.step == 3


def by_hand(steps: int, decay: float) -> tuple[nn.Module, list[Tensor]]:
    """The plain loop on the rows in their order, and the average of its weights."""
    torch.manual_seed(3)
    net, data = dense().double(), rows()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    averages: list[Tensor] = []
    for step in range(steps):
        at = slice(step % 5 * 12, step % 5 * 12 + 12)
        nn.functional.cross_entropy(net(data.tensors[0][at]), data.tensors[1][at]).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = [p.detach().clone() for p in net.parameters()]
        averages = (
            weights if not averages else [decay * a + (1 - decay) * w for a, w in zip(averages, weights, strict=True)]
        )
    return net, averages


@pytest.mark.parametrize("workers", [1, 2])
def test_the_average_of_the_weights_is_evaluated_loaded_and_saved(workers: int, tmp_path: Path) -> None:
    net, averages = by_hand(12, 0.8)
    averaged = work(average="ema(0.8)", order="sequential", steps=12, evaluation=TESTED)
    strategy = "single_device" if workers == 1 else "data_parallel"
    launcher = apportion.local(workers=workers)
    result = apportion.train(averaged, strategy, launcher=launcher, run_dir=tmp_path / "run", check=False)
    loaded = apportion.load(result.run_dir, model=dense)
    raw = apportion.load(result.run_dir, model=dense, average=False)
    for average, weights, a, w in zip(averages, net.parameters(), loaded.parameters(), raw.parameters(), strict=True):
        assert (a - average).abs().max() < 1e-10
        assert (w - weights).abs().max() < 1e-10
    data = rows()
    expected = nn.functional.cross_entropy(loaded(data.tensors[0]), data.tensors[1]).item()
    assert result.metrics["loss"] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("feature", "strategy"),
    [
        ("ema", "data_parallel"),
        pytest.param("weighted", "data_parallel", marks=pytest.mark.thorough),
        pytest.param("by metric", "data_parallel", marks=pytest.mark.thorough),
        pytest.param("by epoch", "data_parallel", marks=pytest.mark.thorough),
        pytest.param("accumulate", "fully_sharded", marks=pytest.mark.thorough),
        pytest.param("swa", "tensor_parallel", marks=pytest.mark.thorough),
    ],
)
def test_a_run_that_is_resumed_has_the_same_bits(feature: str, strategy: str, tmp_path: Path) -> None:
    changes = {**FEATURES[feature], "steps": 12}
    launcher = apportion.local(workers=2)
    whole = apportion.train(work(**changes), strategy, launcher=launcher, run_dir=tmp_path / "whole", check=False)
    for event in apportion.run(
        work(**changes),
        strategy,
        launcher=launcher,
        run_dir=tmp_path / "cut",
        check=False,
        policy=apportion.Policy(checkpoint_every="5 steps"),
    ):
        if event.step >= 5:
            break
    resumed = apportion.train(
        work(**changes), strategy, launcher=launcher, run_dir=tmp_path / "cut", check=False, resume=True
    )
    assert resumed.step == whole.step == 12
    one, other = (apportion.load(result.run_dir, model=dense).state_dict() for result in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


class Slow(nn.Module):
    """Notes the process of each rank, and takes a while for each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net, self.folder = dense(), folder

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            import time

            note = self.folder / os.environ.get("RANK", "0")
            note.with_suffix(".new").write_text(str(os.getpid()))
            note.with_suffix(".new").replace(note)  # never half a number under its name
            time.sleep(0.05)
        return self.net(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "feature",
    [
        "by metric",
        *(pytest.param(f, marks=pytest.mark.thorough) for f in ("ema", "weighted", "accumulate", "by epoch")),
    ],
)
def test_a_killed_worker_changes_no_bit(feature: str, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    changes = {**FEATURES[feature], "steps": 24, "data": rows, "model": lambda: Slow(tmp_path / "pids")}
    launcher, killed = apportion.local(workers=2), False
    whole = apportion.train(
        work(**changes), "data_parallel", launcher=launcher, run_dir=tmp_path / "whole", check=False
    )
    faults = 0
    for event in apportion.run(
        work(**changes), "data_parallel", launcher=launcher, run_dir=tmp_path / "killed", check=False
    ):
        if event.kind == "step" and event.step >= 8 and not killed:
            os.kill(int((tmp_path / "pids" / "1").read_text()), signal.SIGKILL)
            killed = True
        faults += event.kind == "fault"
    assert killed
    assert faults
    make = lambda: Slow(tmp_path)  # noqa: E731
    one = apportion.load(whole.run_dir, model=make).state_dict()
    other = apportion.load(tmp_path / "killed", model=make).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("strategy", "changes", "named"),
    [
        ("hogwild", {"average": "ema(0.9)"}, "average=ema"),
        ("parameter_server", {"accumulate": 2}, "accumulate=2"),
        ("local_sgd", {"average": "ema(0.9)"}, "average="),
        ("local_sgd", {**FEATURES["by metric"]}, "schedule_on='loss'"),
        ("parameter_server", {**FEATURES["by metric"]}, "schedule_on='loss'"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused_by_name(
    strategy: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        apportion.train(work(**changes), strategy, launcher=apportion.local(workers=2), run_dir=tmp_path / "run")


def test_a_batch_normalisation_is_refused_with_accumulated_batches(tmp_path: Path) -> None:
    normalised = work(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), data=rows, accumulate=2
    )
    with pytest.raises(ValueError, match=r"accumulate=2 would give 1 \(BatchNorm1d\)"):
        apportion.train(normalised, "single_device", run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"order": apportion.weighted([1.0, 2.0])}, "2 weights"),
        ({"order": apportion.grouped([1.0, 2.0])}, "2 lengths"),
        ({"order": apportion.custom(lambda seed, epoch: [0, 60])}, "the index 60"),
        ({"order": apportion.custom(lambda seed, epoch: range(10 + epoch)), "steps": 40}, "10"),
        ({"drop_last": True, "batch_size": 61}, "drop_last=True leaves no batch"),
    ],
)
def test_an_order_that_does_not_fit_the_data_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, apportion.WorkerFailed), match=named):
        apportion.train(work(**changes), "single_device", run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"order": "weighted"}, "weights"),
        ({"order": "randomly"}, "randomly"),
        ({"order": 3}, "order=3"),
        ({"average": "ema(1.5)"}, "decay=1.5"),
        ({"average": "mean"}, "mean"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"drop_last": "yes"}, "drop_last='yes'"),
        ({"schedule_every": "epoch"}, "needs a schedule"),
        ({"schedule": lambda o, t: None, "schedule_on": "loss"}, "schedule_on='loss' must be a metric"),
        ({"accumulate": 2, "count": None}, "count=None"),
        ({"order": apportion.with_replacement(), "parts": 2, "data": lambda part: rows()}, "parts=2"),
        ({"arguments": {"f": print}}, "arguments="),
    ],
)
def test_a_field_with_a_wrong_value_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        work(**changes)
