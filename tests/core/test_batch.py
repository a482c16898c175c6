"""Batches: the rows of every rank together are the global batch; nothing is loaded that nobody touches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import apportion.core.data.source
from apportion import Workload
from apportion.core.data.source import BatchSource
from apportion.core.sampler import DataShard


def source(
    data: Any, batch_size: int = 8, *, dtype: torch.dtype | None = None, rank: int = 0, **options: Any
) -> BatchSource:
    workload = Workload(
        model=lambda: nn.Linear(1, 1), data=data if callable(data) else lambda: data, batch_size=batch_size,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=nn.functional.mse_loss, **options,
    )  # fmt: skip
    return BatchSource(workload, dtype=dtype, rank=rank)


def tensors(n: int, width: int = 3) -> TensorDataset:
    return TensorDataset(torch.arange(n * width, dtype=torch.float32).view(n, width), torch.arange(n))


class Recorded(Dataset[Any]):
    """Says which examples were fetched."""

    def __init__(self, n: int) -> None:
        self.n, self.fetched = n, list[int]()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        self.fetched.append(i)
        return torch.tensor([float(i)]), i


class AtOnce(Recorded):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[i] for i in indices]


def whole(made: BatchSource, step: int, workers: int) -> tuple[Tensor, Tensor]:
    batches = [made.at(step, DataShard(rank, workers)) for rank in range(workers)]
    taken = [b for b in batches if len(b)]
    assert sum(len(b) for b in batches) == batches[0].size
    return torch.cat([b.inputs for b in taken]), torch.cat([b.targets for b in taken])


@given(n=st.integers(1, 90), batch=st.integers(1, 30), workers=st.integers(1, 6), step=st.integers(0, 30))
def test_the_shards_of_a_batch_are_the_batch(n: int, batch: int, workers: int, step: int) -> None:
    made = source(tensors(n), batch, epochs=9)
    inputs, targets = whole(made, step, workers)
    index = made.deal.index(step)
    assert targets.tolist() == index.tolist()
    assert torch.equal(inputs[:, 0], torch.from_numpy(index).float() * 3)


@given(
    n=st.integers(2, 60),
    batch=st.integers(1, 20),
    block=st.sampled_from([0, 1, 200, 1000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_gathered_blocks_give_what_indexing_gives(n: int, batch: int, block: int, seed: int) -> None:
    data = tensors(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apportion.core.data.source, "BLOCK_BYTES", block)
        made = source(data, batch, epochs=3, seed=seed)
        order = random.Random(seed).choices(range(made.total), k=6)
        for step in [*range(made.total), *order]:
            for rank in range(2):
                found = made.at(step, DataShard(rank, 2))
                if len(found):
                    expected = data[torch.from_numpy(found.index.copy())]
                    assert torch.equal(found.inputs, expected[0])
                    assert torch.equal(found.targets, expected[1])


@pytest.mark.parametrize("kind", [Recorded, AtOnce])
def test_a_batch_that_nobody_touches_is_not_loaded(kind: type[Recorded]) -> None:
    data = kind(20)
    batch = source(data).at(0, DataShard(1, 2))
    assert (len(batch), batch.size, batch.rows) == (4, 8, slice(4, 8))
    assert batch.count == 4
    assert repr(batch) == "Batch(step=0, rows=4:8 of 8)"
    assert len(batch.parts(2)) == 2
    assert data.fetched == []
    assert batch.inputs.flatten().tolist() == batch.index.tolist()
    assert batch.targets.tolist() == batch.index.tolist()
    assert data.fetched == batch.index.tolist(), "once, and these rows alone"


@given(n=st.integers(1, 40), parts=st.integers(1, 9), touch=st.booleans())
def test_parts_are_the_batch_in_order(n: int, parts: int, touch: bool) -> None:
    batch = source(tensors(50), n).at(0)
    if touch:
        assert len(batch.inputs) == n
    pieces = batch.parts(parts)
    assert len(pieces) == min(n, parts)
    assert torch.equal(torch.cat([p.inputs for p in pieces]), batch.inputs)
    assert torch.equal(torch.cat([p.targets for p in pieces]), batch.targets)
    assert np.array_equal(np.concatenate([p.index for p in pieces]), batch.index)
    assert sum(p.count for p in pieces) == batch.count
    assert [p.rows.start for p in pieces] == [0, *(p.rows.stop for p in pieces[:-1])]


def test_a_rank_without_rows_borrows_a_real_one_that_does_not_count() -> None:
    made = source(Recorded(9))
    empty = made.at(1, DataShard(1, 2))
    assert len(empty) == 0
    assert empty.count == 0
    with pytest.raises(ValueError, match="has no rows"):
        assert empty.inputs
    borrowed = empty.borrowed()
    assert len(borrowed) == 1
    assert borrowed.count == 0
    assert borrowed.index.tolist() == made.deal.index(1).tolist()
    assert borrowed.inputs.item() == made.deal.index(1).item()
    assert borrowed.parts(3) == [borrowed]


class Random(Dataset[Any]):
    """Draws from every global generator as it is fetched."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return torch.rand(1) + float(np.random.rand()) + random.random(), i


@pytest.mark.parametrize("workers", [2, 3])
def test_what_an_example_draws_does_not_depend_on_who_fetches_it(workers: int) -> None:
    alone, _ = whole(source(Random), 1, 1)
    ranks = [source(Random, rank=rank).at(1, DataShard(rank, workers)) for rank in range(workers)]
    assert torch.equal(torch.cat([b.inputs for b in ranks]), alone)
    assert len(alone.unique()) == 8
    again, _ = whole(source(Random, epochs=2), 4, 1)
    assert not torch.equal(again.sort(0)[0], alone.sort(0)[0]), "another epoch, other draws"


def test_loading_leaves_the_generators_as_they_were() -> None:
    batch = source(Random).at(0)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = torch.rand(1).item(), float(np.random.rand()), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert len(batch.inputs) == 8
    assert (torch.rand(1).item(), float(np.random.rand()), random.random()) == expected


def shifted(batch: Any, draws: Any) -> Any:
    return batch.replace(inputs=batch.inputs + draws.uniform(3))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("make", [lambda: tensors(21), lambda: [(torch.zeros(3), i) for i in range(21)]])
def test_augmentation_does_not_depend_on_the_split(make: Callable[[], Any], workers: int) -> None:
    alone = source(make, augment=shifted)
    split = source(make, augment=shifted)
    for step in range(3):
        assert torch.equal(whole(alone, step, 1)[0], whole(split, step, workers)[0])
    parts = split.at(0).parts(3)
    assert torch.equal(torch.cat([p.inputs for p in parts]), whole(alone, 0, 1)[0])


def test_dicts_tuples_and_trees_are_batched_and_cut() -> None:
    def item(i: int) -> Any:
        return (
            {"a": torch.full((2,), float(i)), "b": (torch.tensor(i), 2 * i)},
            [torch.tensor([i]), {"c": float(i)}],
        )

    made = source([item(i) for i in range(10)], 6, dtype=torch.float64)
    batch = made.at(0)
    assert batch.inputs["a"].dtype == torch.float64
    assert batch.inputs["b"][0].dtype == torch.int64
    assert batch.targets[1]["c"].dtype == torch.float64
    assert batch.count == 6
    for part, rows in zip(batch.parts(4), ((0, 2), (2, 4), (4, 5), (5, 6)), strict=True):
        assert torch.equal(part.inputs["a"], batch.inputs["a"][slice(*rows)])
        assert torch.equal(part.inputs["b"][1], batch.inputs["b"][1][slice(*rows)])
        assert torch.equal(part.targets[0], batch.targets[0][slice(*rows)])


def test_count_weighs_the_rows() -> None:
    made = source(tensors(20), count=lambda targets: (targets % 2).sum())
    batch = made.at(0)
    assert batch.count == float((batch.targets % 2).sum())
    assert sum(p.count for p in batch.parts(3)) == batch.count


def test_a_replacement_keeps_what_it_was_not_given() -> None:
    batch = source(tensors(20)).at(0)
    new = batch.replace(targets=batch.targets * 2)
    assert torch.equal(new.inputs, batch.inputs)
    assert torch.equal(new.targets, batch.targets * 2)
    assert (new.step, new.epoch, new.size, new.start) == (0, 0, 8, True)
    assert torch.equal(new.draws().uniform(2), batch.draws().uniform(2))


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (torch.zeros(2), "gave a Tensor"),
        ((torch.zeros(2), 1, 2), "of 3"),
        ({"x": torch.zeros(2), "y": 1}, "dict of 2"),
    ],
)
def test_samples_that_are_no_pairs_are_refused_with_the_cure(item: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"{told}.*inputs, targets"):
        assert source([item] * 9).at(0).inputs is not None


class WithoutThird(Recorded):
    def __getitem__(self, i: int) -> Any:
        if i == 3:
            raise OSError("truncated")
        return super().__getitem__(i)


def test_an_example_that_cannot_be_read_is_named_by_its_index() -> None:
    with pytest.raises(OSError, match="truncated") as caught:
        assert source(WithoutThird(8)).at(0).inputs is not None
    assert "for example 3, in epoch 0" in caught.value.__notes__[0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "told"), [(Stream, "IterableDataset"), (lambda: 3, "needs __len__"), (list, "empty dataset")]
)
def test_data_that_cannot_be_dealt_is_refused(data: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        source(data)


def test_the_last_batch_of_an_epoch_is_short_and_the_next_one_starts_anew() -> None:
    made = source(tensors(17), epochs=2.5)
    assert made.total == round(2.5 * 3)
    assert [made.at(step).size for step in range(6)] == [8, 8, 1, 8, 8, 1]
    assert [made.at(step).start for step in range(6)] == [True, False, False] * 2
    assert [made.at(step).epoch for step in range(6)] == [0, 0, 0, 1, 1, 1]
