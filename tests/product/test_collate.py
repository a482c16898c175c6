"""A batch is what collate returned: other numbers of rows count as they are, mappings and sequences pass through."""

from __future__ import annotations

import math
import time
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_sequence
from torch.utils.data import TensorDataset, default_collate

import apportion

pytestmark = pytest.mark.filterwarnings("ignore:3 workers x 1 threads")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))


# Rows that are sorted


def longest_first(samples: list[Any]) -> Any:
    samples = sorted(samples, key=lambda pair: -len(pair[0]))
    inputs = pad_sequence([x for x, _ in samples], batch_first=True)
    return (inputs, torch.tensor([len(x) for x, _ in samples])), torch.tensor([label for _, label in samples])


class Packing(nn.Module):
    """Packs its rows, which have to come sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(pack_padded_sequence(x, lengths, batch_first=True))[1][-1])


def largest_first(samples: list[Any]) -> Any:
    return default_collate(sorted(samples, key=lambda pair: -float(pair[0][0])))


SORTED = {
    "sequences": (Packing, lambda: [(drawn(2 + i * 5 % 9, 5, seed=i), i % 3) for i in range(47)], longest_first),
    "hard first": (Classifier, lambda: [(x, x[:3].argmax()) for x in drawn(47, 10)], largest_first),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SORTED)
def test_rows_that_collate_sorts_train_as_on_one_device(name: str, trained: Any, furthest: Any) -> None:
    model, data, collate = SORTED[name]
    workload = apportion.Workload(
        model=model, data=data, collate=collate, loss=F.cross_entropy, optimizer=sgd, batch_size=10,
        precision="float64",
    )  # fmt: skip
    one = trained(workload)
    for workers in (2, 3):
        assert furthest(one, trained(workload, "data_parallel", workers)) < 1e-9


# Rows that are left out


def readings() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Readings of sensors, a few of which are broken. They lie where the few rows of a proof may not see them."""
    return [(x * math.nan if i % 17 == 5 else x, x[:3].argmax()) for i, x in enumerate(drawn(360, 10))]


def unbroken(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if not sample[0].isnan().any()])


def windows() -> list[torch.Tensor]:
    """Windows of a series, of which those with a gap are not to be trained on."""
    series = drawn(40 * 9, seed=2).cumsum(0).view(40, 9)
    return [w.masked_fill(w == w.max(), 99.0) if i % 7 == 3 else w for i, w in enumerate(series)]


def without_gaps(samples: list[torch.Tensor]) -> tuple[Any, Any]:
    whole = torch.stack(samples)
    kept = whole[whole.amax(1) < 50]
    return {"past": kept[:, :6]}, {"next": kept[:, 6:]}


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(1, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(past[..., None])[1][0])


def absolute(outputs: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.l1_loss(outputs, targets["next"])


BROKEN = apportion.Workload(
    model=Classifier, data=readings, collate=unbroken, loss=F.cross_entropy, optimizer=sgd, batch_size=60, epochs=2,
    precision="float64", evaluation=apportion.Evaluation(data=readings, every=None),
)  # fmt: skip
GAPS = apportion.Workload(
    model=Forecast, data=windows, collate=without_gaps, loss=absolute, optimizer=sgd, batch_size=9, epochs=2,
    precision="float64", evaluation=apportion.Evaluation(data=windows, every=None, metrics={"off": absolute}),
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["data_parallel", "data_parallel(microbatches=2)", "map_reduce"])
@pytest.mark.parametrize("workload", [BROKEN, GAPS], ids=["readings", "windows"])
def test_rows_that_collate_leaves_out_do_not_count(
    workload: apportion.Workload, strategy: str, trained: Any, furthest: Any
) -> None:
    one = trained(workload)
    for workers in (2, 3):
        assert furthest(one, trained(workload, strategy, workers)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize(("workload", "rows"), [(BROKEN, 40), (GAPS, 9)], ids=["readings", "windows"])
def test_an_average_of_replicas_weighs_the_rows_that_are_there(
    workload: apportion.Workload, rows: int, trained: Any, furthest: Any
) -> None:
    """One step of SGD on two batches, of which unlike numbers of rows are left out, is averaged to one on both."""
    few = replace(
        workload, data=lambda: workload.data()[: 2 * rows], order="sequential", epochs=1, evaluation=None,
        batch_size=rows,
    )  # fmt: skip
    one = trained(replace(few, batch_size=2 * rows))
    assert furthest(one, trained(few, "local_sgd(every=1)", 2)) < 1e-9


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mean_metric_counts_the_rows_that_are_there(workers: int, tmp_path: Any) -> None:
    ended = apportion.train(
        BROKEN,
        "single_device" if workers == 1 else "data_parallel",
        launcher=apportion.local(workers),
        run_dir=tmp_path / "run",
    )
    inputs, labels = unbroken(readings())
    right = apportion.accuracy(apportion.load(tmp_path / "run", model=Classifier)(inputs.double()), labels)
    assert abs(ended.metrics["accuracy"] - right.item()) < 1e-12


# Rows that are added


def two_views(samples: list[Any]) -> Any:
    inputs, labels = default_collate(samples)
    return torch.cat([inputs, inputs.flip(1)]), torch.cat([labels, labels])


def sentences() -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(0, 12, (3 + i * 7 % 8,), generator=draws) for i in range(60)]


def packed_tokens(samples: list[torch.Tensor]) -> Any:
    tokens = torch.cat(samples)
    return tokens, (tokens * 5 + 2) % 12


VIEWS = apportion.Workload(
    model=Classifier, data=lambda: [(x, x[:3].argmax()) for x in drawn(120, 10)], collate=two_views,
    loss=F.cross_entropy, optimizer=sgd, batch_size=25, precision="float64",
)  # fmt: skip
PACKED = apportion.Workload(
    model=lambda: nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12)), data=sentences,
    collate=packed_tokens, loss=F.cross_entropy, optimizer=sgd, batch_size=10, epochs=3, precision="float64",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("workload", [VIEWS, PACKED], ids=["views", "packed"])
def test_rows_that_collate_adds_count(workload: apportion.Workload, trained: Any, furthest: Any) -> None:
    assert furthest(trained(workload), trained(workload, "data_parallel", 2)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize("workload", [VIEWS, PACKED], ids=["views", "packed"])
@pytest.mark.parametrize("strategy", ["data_parallel(microbatches=2)", "pipeline_parallel"])
def test_rows_that_collate_adds_are_named_where_they_would_be_cut(
    workload: apportion.Workload, strategy: str, trained: Any
) -> None:
    with pytest.raises(Exception, match=r"targets has \d+ rows in place of \d+.*cannot be cut"):
        trained(workload, strategy, 2)


# What is no dict, tuple or tensor


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.head((self.embed(tokens) * weights[..., None]).sum(1))


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be written to."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def phrases() -> list[torch.Tensor]:
    return list(torch.randint(0, 12, (50, 5), generator=torch.Generator().manual_seed(3)))


def encoded(kind: Any) -> Any:
    def collate(samples: list[torch.Tensor]) -> Any:
        tokens = torch.stack(samples)
        return kind({"tokens": tokens, "weights": tokens / 12}), tokens[:, 0] % 3

    return collate


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["data_parallel(microbatches=2)", "pipeline_parallel", "tensor_parallel"])
@pytest.mark.parametrize("kind", [UserDict, Frozen])
def test_a_mapping_trains_as_a_dict(kind: Any, strategy: str, trained: Any, furthest: Any) -> None:
    def workload(kind: Any) -> apportion.Workload:
        return apportion.Workload(
            model=Bag, data=phrases, collate=encoded(kind), loss=F.cross_entropy, optimizer=sgd, batch_size=12,
            precision="float64",
        )  # fmt: skip

    one = trained(workload(dict))
    assert furthest(one, trained(workload(kind))) == 0
    assert furthest(one, trained(workload(kind), strategy, 2)) < 1e-9


@dataclass
class Graphs:
    """Several graphs as one, which an object of a class of the user's passes on."""

    values: torch.Tensor
    owners: torch.Tensor
    graphs: int


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, rows: PackedSequence) -> torch.Tensor:
        return self.head(self.layers(rows)[1][-1])


class OfGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, given: Graphs) -> torch.Tensor:
        sums = torch.zeros(given.graphs, 8, dtype=given.values.dtype)
        return self.head(sums.index_add(0, given.owners, self.first(given.values).tanh()))


class OfBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(12, 8, mode="sum"), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens, offsets))


class OfNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.stack([self.first(row).tanh().sum(0) for row in rows.unbind()]))


def lengths(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([len(x) for x in samples])


def as_graphs(samples: list[torch.Tensor]) -> Graphs:
    return Graphs(torch.cat(samples), torch.repeat_interleave(lengths(samples)), len(samples))


def as_bags(samples: list[torch.Tensor]) -> Any:
    tokens = (torch.cat(samples)[:, 0] * 100).long() % 12
    return tokens, lengths(samples).cumsum(0) - lengths(samples)


FORMS: dict[str, tuple[Any, Any, str]] = {
    "packed": (OfPacked, lambda samples: pack_sequence(samples, enforce_sorted=False), "inputs is a PackedSequence"),
    "graphs": (OfGraphs, as_graphs, r"inputs\.values has \d+ rows in place of \d+"),
    "bags": (OfBags, as_bags, r"inputs\[0\] has \d+ rows in place of \d+"),
    "nested": (
        OfNested,
        lambda samples: torch.nested.nested_tensor(samples, layout=torch.jagged),
        "inputs is a nested tensor",
    ),
}


def of_form(name: str) -> apportion.Workload:
    model, form, _ = FORMS[name]

    def collate(samples: list[torch.Tensor]) -> Any:
        return form(samples), lengths(samples) % 3

    return apportion.Workload(
        model=model, data=lambda: [drawn(2 + i * 5 % 9, 6, seed=i) for i in range(60)], collate=collate,
        loss=F.cross_entropy, optimizer=sgd, batch_size=11, precision="float64",
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMS)
def test_what_has_no_rows_passes_where_nothing_divides_it(name: str, trained: Any, furthest: Any) -> None:
    workload = of_form(name)
    one = trained(workload)
    for workers in (2, 3):
        assert furthest(one, trained(workload, "data_parallel", workers)) < 1e-9


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["data_parallel(microbatches=2)", "pipeline_parallel"])
@pytest.mark.parametrize("name", FORMS)
def test_what_has_no_rows_is_named_where_it_would_be_cut(name: str, strategy: str, trained: Any) -> None:
    with pytest.raises(Exception, match=FORMS[name][2]):
        trained(of_form(name), strategy, 2)


# What only a batch in the middle of the run shows


def rarely_doubled(samples: list[Any]) -> Any:
    """A hard example is there twice, the second time mirrored."""
    twice = [(x.flip(0), label) for x, label in samples if x[9] > 2.4]
    return default_collate([*samples, *twice])


def rarely_of_unlike_rows(samples: list[Any]) -> Any:
    """An example of which the label lies in another leaf than its inputs is there twice."""
    inputs, labels = default_collate(samples)
    extra = inputs[inputs[:, 9] > 2.4]
    return inputs, {"label": labels, "more": torch.cat([inputs, extra]) if len(extra) else inputs}


def rarely_nothing(samples: list[Any]) -> Any:
    return None if any(x[9] > 2.4 for x, _ in samples) else default_collate(samples)


def of_label(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, targets["label"] if isinstance(targets, dict) else targets)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("collate", "strategy", "message"),
    [
        (rarely_doubled, "data_parallel(microbatches=2)", "targets has .* rows that collate has added"),
        (rarely_doubled, "pipeline_parallel", "targets has .* rows that collate has added"),
        (rarely_of_unlike_rows, "pipeline_parallel", r"targets\['more'\] has"),
        (rarely_nothing, "data_parallel", "collate gave a NoneType"),
    ],
)
def test_a_batch_of_later_is_named_before_the_first_step(
    collate: Any, strategy: str, message: str, tmp_path: Any
) -> None:
    workload = apportion.Workload(
        model=Classifier, data=lambda: [(x, x[:3].argmax()) for x in drawn(600, 10, seed=3)[16:]], collate=collate,
        loss=of_label, optimizer=sgd, batch_size=20, order="sequential", precision="float64",
    )  # fmt: skip
    events = apportion.run(workload, strategy, launcher=apportion.local(workers=2), run_dir=tmp_path / "run")
    made: list[str] = []
    with pytest.raises(Exception, match=rf"the batch of step \d+ cannot be trained on: {message}"):
        made.extend(event.kind for event in events)
    assert "start" not in made
    assert "step" not in made


def shifted(batch: Any, draws: Any) -> Any:
    """An augmentation for shares of ten rows: it adds rows to those of the short batch at the end of an epoch."""
    missing = max(0, 10 - len(batch.targets))
    time.sleep(0.008)  # not all batches of an epoch can be made before the first step
    return batch.replace(inputs=F.pad(batch.inputs, (0, 0, 0, missing)), targets=F.pad(batch.targets, (0, missing)))


@pytest.mark.thorough
def test_a_short_batch_that_augment_changes_is_named_before_the_first_step(tmp_path: Any) -> None:
    inputs = drawn(610, 10, seed=3)
    workload = apportion.Workload(
        model=Classifier, data=lambda: TensorDataset(inputs, inputs[:, :3].argmax(1)), augment=shifted,
        loss=F.cross_entropy, optimizer=sgd, batch_size=20, order="sequential", precision="float64",
    )  # fmt: skip
    launcher, made = apportion.local(workers=2), list[str]()
    events = apportion.run(workload, "data_parallel(microbatches=2)", launcher=launcher, run_dir=tmp_path / "run")
    with pytest.raises(Exception, match=r"the batch of step 31 cannot be trained on: "):
        made.extend(event.kind for event in events)
    assert "step" not in made
