"""Rows that few others are like, and that alone show a wrong number of loss terms: the run is refused before its first
step, with the line to write, and trains as one device with that line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset

import apportion

HEAVY = torch.tensor([1.0, 1.0, 1.0, 50.0])


def inputs(many: int) -> Tensor:
    return torch.randn(many, 10, generator=torch.Generator().manual_seed(1))


def labelled(many: int, value: int, rare: tuple[int, ...]) -> TensorDataset:
    x = inputs(many)
    labels = x[:, :3].argmax(1)
    labels[list(rare)] = value
    return TensorDataset(x, labels)


class Rows(Dataset[Any]):
    """The rows of a data set, each made by itself, as those of files are."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


def weighed(many: int, rare: tuple[int, ...]) -> Dataset[Any]:
    x = inputs(many)
    weights = torch.ones(many).index_fill(0, torch.tensor(rare), 50.0)

    class Weighed(Dataset[Any]):
        def __len__(self) -> int:
            return many

        def __getitem__(self, index: int) -> Any:
            return x[index], (x[index, :3].argmax(), weights[index])

    return Weighed()


class Sentences(Dataset[Any]):
    """Sequences of four words, and one of thirty."""

    def __init__(self, many: int, long: int) -> None:
        self._many, self._long = many, long

    def __len__(self) -> int:
        return self._many

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(1, 9, (30 if index == self._long else 4,), generator=torch.Generator().manual_seed(index))
        return words, words % 4


def padded(samples: list[Any]) -> Any:
    words, tags = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad([*words], batch_first=True), pad([*tags], batch_first=True, padding_value=-100)


def masked(many: int, rare: tuple[int, ...]) -> Dataset[Any]:
    x = inputs(many)
    kept = torch.ones(many, 4, dtype=torch.bool)
    kept[list(rare), 1:] = False

    class Masked(Dataset[Any]):
        def __len__(self) -> int:
            return many

        def __getitem__(self, index: int) -> Any:
            return x[index], {"values": x[index, :4], "kept": kept[index]}

    return Masked()


def measured(many: int, kept: Tensor, rare: int) -> Dataset[Any]:
    """Rows with numbers to meet, and a mask of numbers, of which one row has another."""
    x = inputs(many)
    masks = torch.ones(many, 4)
    masks[rare] = kept

    class Measured(Dataset[Any]):
        def __len__(self) -> int:
            return many

        def __getitem__(self, index: int) -> Any:
            return x[index], {"values": x[index, :4], "kept": masks[index]}

    return Measured()


def with_gaps(many: int, rare: int) -> TensorDataset:
    x = inputs(many)
    values = x[:, :4].clone()
    values[rare, 1:] = torch.nan
    return TensorDataset(x, values)


def rated(many: int, rare: tuple[int, ...]) -> TensorDataset:
    x = inputs(many)
    return TensorDataset(x, (1.0 + 2.0 * (x[:, 0] > 0)).index_fill(0, torch.tensor(rare), 2.0))


def mean_of_kept(each: Tensor, kept: Tensor) -> Tensor:
    return (each * kept).sum() / kept.sum().clamp(min=1)


def tagged(outputs: Tensor, tags: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), tags.flatten())


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    each = functional.cross_entropy(outputs, labels, reduction="none")
    return mean_of_kept((1 - (-each).exp()) ** 2 * each, labels != -100)


def weighted_rows(outputs: Tensor, targets: Any) -> Tensor:
    labels, weights = targets
    return (functional.cross_entropy(outputs, labels, reduction="none") * weights).sum() / weights.sum()


def smooth(outputs: Tensor, targets: Any) -> Tensor:
    return mean_of_kept(functional.smooth_l1_loss(outputs, targets["values"], reduction="none"), targets["kept"])


def present(outputs: Tensor, values: Tensor) -> Tensor:
    kept = ~values.isnan()
    return mean_of_kept((outputs - values.nan_to_num(0.0)).square(), kept)


def of_ratings(outputs: Tensor, ratings: Tensor) -> Tensor:
    weights = HEAVY.to(outputs.dtype)[ratings.long() % 3 + 1]
    return ((outputs[:, 0] - ratings).square() * weights).sum() / weights.sum()


def binary(outputs: Tensor, targets: Any) -> Tensor:
    each = functional.binary_cross_entropy_with_logits(
        outputs, (targets["values"] > 0).to(outputs.dtype), pos_weight=torch.tensor(3.0), reduction="none"
    )
    return mean_of_kept(each, targets["kept"])


def heavy(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, HEAVY)


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, HEAVY, label_smoothing=0.1)


def of_logarithms(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(outputs.log_softmax(1), labels)


class Criterion:
    """A loss as an object, with the weights of its classes."""

    def __init__(self) -> None:
        self.weights = HEAVY

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels, self.weights)


def kept_labels(labels: Tensor) -> float:
    return float((labels != -100).sum())


def class_weights(labels: Tensor) -> float:
    return float(HEAVY[labels].sum())


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4))


Case = tuple[Callable[..., Tensor], Callable[[], Dataset[Any]], Callable[[Any], float], str, dict[str, Any]]
WORDS: dict[str, Any] = {"model": tagger, "collate": padded}
RARE: dict[str, Case] = {
    "one label of -100 in 1,000": (
        lambda outputs, labels: functional.cross_entropy(outputs, labels),
        lambda: labelled(1000, -100, (713,)),
        kept_labels,
        "(targets != -100).sum()",
        {},
    ),
    "the same, row by row": (of_logarithms, lambda: Rows(labelled(1000, -100, (713,))), kept_labels, "!= -100", {}),
    "focal": (focal, lambda: labelled(1000, -100, (111,)), kept_labels, "(targets != -100).sum()", {}),
    "a class that is seen twice": (heavy, lambda: labelled(1500, 3, (40, 1211)), class_weights, "weight[targets]", {}),
    "the same, smoothed": (smoothed, lambda: labelled(1500, 3, (5, 1400)), class_weights, "weight[targets]", {}),
    "the same, an object": (Criterion(), lambda: labelled(1500, 3, (5, 1400)), class_weights, "weight[targets]", {}),
    "five heavy rows in 2,000": (
        weighted_rows,
        lambda: weighed(2000, (3, 500, 501, 1203, 1900)),
        lambda targets: float(targets[1].sum()),
        "float(targets[1].sum())",
        {},
    ),
    "one long sequence in 3,000": (tagged, lambda: Sentences(3000, 2345), kept_labels, "!= -100", WORDS),
    "a mask": (
        smooth,
        lambda: masked(1000, (77,)),
        lambda targets: float(targets["kept"].sum()),
        "targets['kept'].sum()",
        {},
    ),
    "a mask of labels": (
        binary,
        lambda: masked(1000, (77,)),
        lambda targets: float(targets["kept"].sum()),
        "targets['kept'].sum()",
        {},
    ),
    "a mask of numbers": (
        smooth,
        lambda: measured(1000, torch.tensor([1.0, 0.0, 0.0, 0.0]), 77),
        lambda targets: float(targets["kept"].sum()),
        "targets['kept'].sum()",
        {},
    ),
    "missing measures": (
        present,
        lambda: with_gaps(1000, 613),
        lambda values: float((~values.isnan()).sum()),
        "(~targets.isnan()).sum()",
        {},
    ),
    "ratings that are numbers": (
        of_ratings,
        lambda: rated(1000, (77, 500)),
        lambda ratings: float(HEAVY[ratings.long() % 3 + 1].sum()),
        "weight[targets]",
        {},
    ),
    "another label ignored": (
        lambda outputs, labels: functional.cross_entropy(outputs, labels, ignore_index=3),
        lambda: labelled(1000, 3, (713,)),
        lambda labels: float((labels != 3).sum()),
        "(targets != 3).sum()",
        {},
    ),
}
"""A loss, its data, the count that is right, what the refusal says, and what else the workload has."""


def workload(case: Case, **changes: Any) -> apportion.Workload:
    loss, data, _, _, others = case
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)),
        "data": data,
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "batch_size": 50,
        "epochs": 1,
    }
    return apportion.Workload(**{**given, **others, **changes})


@pytest.mark.thorough
@pytest.mark.parametrize("name", RARE)
def test_a_wrong_count_that_a_rare_row_shows_is_refused_with_the_line_which_is_right(
    name: str, trained: Any, furthest: Any
) -> None:
    case = RARE[name]
    with pytest.raises(apportion.Disproved) as found:
        trained(workload(case), "data_parallel", 2)
    assert "count" in str(found.value)
    assert case[3] in str(found.value)
    mended = workload(case, count=case[2], precision="float64")
    assert furthest(trained(mended), trained(mended, "data_parallel", 2)) < 1e-9


IN_PARTS: dict[str, Case] = {
    "ignored labels": RARE["one label of -100 in 1,000"],
    "a class that is seen twice, row by row": (
        heavy,
        lambda: Rows(labelled(1500, 3, (40, 1211))),
        class_weights,
        "weight[targets]",
        {},
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", IN_PARTS)
def test_rare_rows_of_data_in_parts_are_found(name: str, trained: Any, furthest: Any) -> None:
    case = IN_PARTS[name]

    def part(number: int) -> Dataset[Any]:
        whole = case[1]()
        third = len(whole) // 3  # type: ignore[arg-type]
        return Subset(whole, range(number * third, (number + 1) * third))

    parted = workload(case, data=part, parts=3, batch_size=48)
    with pytest.raises(apportion.Disproved) as found:
        trained(parted, "data_parallel", 2)
    assert case[3] in str(found.value)
    mended = workload(case, data=part, parts=3, batch_size=48, count=case[2], precision="float64")
    assert furthest(trained(mended), trained(mended, "data_parallel", 2)) < 1e-9


def proof_of(of: apportion.Workload, run_dir: Any) -> str:
    events = apportion.run(of, "data_parallel", launcher=apportion.local(workers=2), run_dir=run_dir)
    return next(e.data["proof"]["sentence"] for e in events if e.kind == "start")


class SlowRows(Rows):
    """Rows that take a while, as images do that are opened and turned."""

    def __getitem__(self, index: int) -> Any:
        torch.linalg.svd(torch.ones(160, 160))
        return super().__getitem__(index)


@pytest.mark.thorough
def test_the_sentence_says_what_was_read_and_how_many_rows_a_rank_had(tmp_path: Any) -> None:
    whole = workload(RARE["a class that is seen twice"], count=class_weights, steps=2)
    said = proof_of(whole, tmp_path / "whole")
    assert "with up to 25 rows per rank" in said
    assert "rare rows were looked for among the targets of all 1,500" in said
    case = RARE["the same, row by row"]
    slow = workload(case, data=lambda: SlowRows(labelled(30_000, 3, (713,))), count=kept_labels, steps=2)
    assert " % of 30,000" in proof_of(slow, tmp_path / "slow")
