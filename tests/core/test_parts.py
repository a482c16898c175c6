"""A data set in parts: every row is dealt once an epoch, in an order of the seed and the parts alone, to a rank that
has the part; and what is not dealt is not opened."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import apportion
from apportion.core.data.sent_rows import decode, encode
from apportion.core.data.source import BatchSource
from apportion.core.fingerprint import check_fingerprint, fingerprint
from apportion.core.parts import PartedDataset, are_in_order, deal_parts
from apportion.core.sampler import DataShard, PartSampler, Sampler, rows_of_parts
from apportion.core.workload import checked
from apportion.errors import ApportionError

lengths = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 90)), min_size=1, max_size=9)
batches = st.integers(1, 70)
orders = st.sampled_from(["shuffled", "sequential"])
seeds = st.integers(0, 2**40)


def layouts(parts: int) -> st.SearchStrategy[list[int]]:
    """The host of each rank, of at most as many hosts as parts, in any order."""
    return st.lists(st.integers(0, min(parts, 4) - 1), min_size=1, max_size=7)


# The order


@given(lengths=lengths, rows=st.integers(0, 800))
def test_the_rows_of_parts_add_up_only_grow_and_are_in_proportion(lengths: list[int], rows: int) -> None:
    total = sum(lengths)
    rows = min(rows, total)
    counts = rows_of_parts(lengths, rows)
    assert sum(counts) == rows
    assert all(0 <= count <= length for count, length in zip(counts, lengths, strict=True))
    if rows < total:
        assert all(a <= b for a, b in zip(counts, rows_of_parts(lengths, rows + 1), strict=True))
    bound = 1 + len(lengths) / 2
    assert all(abs(c - rows * n / total) <= bound for c, n in zip(counts, lengths, strict=True))


@given(lengths=lengths, rows=st.integers(0, 800))
def test_the_rows_of_parts_are_those_that_come_first(lengths: list[int], rows: int) -> None:
    """By the definition: the places of all rows, sorted."""
    places = sorted(((2 * k + 1) / n, part) for part, n in enumerate(lengths) for k in range(n))
    first = [part for _, part in places[:rows]]
    assert rows_of_parts(lengths, min(rows, sum(lengths))) == [first.count(part) for part in range(len(lengths))]


def test_parts_of_very_unlike_lengths_are_counted_exactly() -> None:
    unlike = [1, 10**12, 7, 10**9 + 7]
    total = sum(unlike)
    assert rows_of_parts(unlike, total) == unlike
    half = rows_of_parts(unlike, total // 2)
    assert sum(half) == total // 2
    assert all(abs(c - n / 2) <= 2 for c, n in zip(half, unlike, strict=True))


@given(data=st.data(), lengths=lengths, batch=batches, order=orders, seed=seeds, epoch=st.integers(0, 5))
def test_every_row_is_dealt_once_an_epoch_to_a_rank_that_has_its_part(
    data: st.DataObject, lengths: list[int], batch: int, order: Any, seed: int, epoch: int
) -> None:
    shares = deal_parts(len(lengths), data.draw(layouts(len(lengths))))
    whole = PartSampler(lengths, batch, order=order, seed=seed)
    ranks = [PartSampler(lengths, batch, order=order, seed=seed) for _ in shares]
    ends = np.cumsum(lengths)
    dealt: list[int] = []
    for step in range(epoch * whole.batches, (epoch + 1) * whole.batches):
        expected = whole.index(step)
        assert len(expected) == whole.size(step)
        found = np.full(len(expected), -1)
        for sampler, share in zip(ranks, shares, strict=True):
            at, index, rows, lender = sampler.take(step, share)
            assert at == step
            assert share.parts is not None
            assert (found[rows] == -1).all(), "no row is dealt twice"
            found[rows] = index
            own = range(*share.parts)
            assert set(np.searchsorted(ends, [*index, lender], side="right").tolist()) <= set(own)
        assert np.array_equal(found, expected), "the order is the same whoever has the parts"
        dealt += expected.tolist()
    assert sorted(dealt) == list(range(sum(lengths)))


@given(lengths=lengths, batch=batches, seed=seeds)
def test_a_batch_has_rows_of_all_parts_in_proportion(lengths: list[int], batch: int, seed: int) -> None:
    sampler, total = PartSampler(lengths, batch, seed=seed), sum(lengths)
    ends = np.cumsum(lengths)
    for step in range(sampler.batches):
        parts = np.searchsorted(ends, sampler.index(step), side="right")
        assert (np.diff(parts) >= 0).all(), "the rows of a part lie together"
        for part, length in enumerate(lengths):
            bound = 2 * (1 + len(lengths) / 2)
            assert abs((parts == part).sum() - sampler.size(step) * length / total) <= bound


def test_the_order_is_a_function_of_seed_step_and_parts() -> None:
    straight, jumping = PartSampler([400, 350, 250], 64, seed=7), PartSampler([400, 350, 250], 64, seed=7)
    expected = [straight.index(step).tolist() for step in range(48)]
    for step in (47, 3, 17, 16, 15, 31, 0, 32):
        assert jumping.index(step).tolist() == expected[step]
    assert PartSampler([400, 350, 250], 64, seed=8).index(0).tolist() != expected[0]
    assert PartSampler([400, 600], 64, seed=7).index(0).tolist() != expected[0]
    assert expected[16] != expected[0], "every epoch has an order of its own"


def test_parts_of_one_length_are_shuffled_differently() -> None:
    rows = PartSampler([60, 60], 120, seed=3).index(0)
    assert rows[:60].tolist() != (rows[60:] - 60).tolist()


# Who has which


@given(data=st.data(), parts=st.integers(1, 12))
def test_parts_are_dealt_in_turn_and_no_host_has_anothers(data: st.DataObject, parts: int) -> None:
    hosts = data.draw(layouts(parts))
    shares = deal_parts(parts, hosts)
    owner: dict[int, int] = {}
    weight = dict.fromkeys(range(parts), 0.0)
    for rank, share in enumerate(shares):
        assert share.parts is not None
        for part in range(*share.parts):
            assert owner.setdefault(part, hosts[rank]) == hosts[rank]
            weight[part] += 1 / share.of
    assert weight == pytest.approx(dict.fromkeys(range(parts), 1.0)), "every part is somebody's, and nobody's twice"
    assert {*owner.values()} == {*hosts}, "every host has a part"


@pytest.mark.parametrize(
    ("parts", "hosts", "expected"),
    [
        (3, [0, 1, 2], [(0, 1, 0, 1), (1, 2, 0, 1), (2, 3, 0, 1)]),
        (3, [0, 1], [(0, 2, 0, 1), (2, 3, 0, 1)]),
        (3, [0, 0], [(0, 2, 0, 1), (2, 3, 0, 1)]),
        (2, [0, 0, 1, 1], [(0, 1, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        (4, [0, 0, 1, 1], [(0, 1, 0, 1), (1, 2, 0, 1), (2, 3, 0, 1), (3, 4, 0, 1)]),
        (4, [0, 0, 0, 1], [(0, 1, 0, 1), (1, 2, 0, 1), (2, 3, 0, 1), (3, 4, 0, 1)]),
        (1, [0, 0, 0], [(0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 3)]),
        (3, [0, 1, 0, 1], [(0, 1, 0, 1), (2, 3, 0, 2), (1, 2, 0, 1), (2, 3, 1, 2)]),
    ],
    ids=str,
)
def test_parts_go_to_hosts_and_then_to_their_ranks(
    parts: int, hosts: list[int], expected: list[tuple[int, int, int, int]]
) -> None:
    shares = deal_parts(parts, hosts)
    assert [(*(share.parts or ()), share.index, share.of) for share in shares] == expected
    assert are_in_order(shares) == (hosts != [0, 1, 0, 1])


def test_fewer_parts_than_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parts=2 cannot be dealt to 3 hosts: .*; make parts>=3, or use 2 hosts"):
        deal_parts(2, [0, 1, 2])


# The data


class Rows(Dataset[Any]):
    """Rows that no tensor holds, each asked for by itself."""

    def __init__(self, part: int, length: int) -> None:
        self.part, self.length = part, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.part, index, torch.rand(()).item()]), self.part


class Together(Rows):
    def __getitems__(self, index: list[int]) -> Any:
        return [(torch.tensor([self.part, i, 0.5]), self.part) for i in index]


def tensors(part: int, length: int) -> TensorDataset:
    return TensorDataset(
        torch.stack([torch.tensor([float(part), i, 0.5]) for i in range(length)]), torch.full((length,), part)
    )


LENGTHS = (11, 4, 17)
KINDS = {"tensors": tensors, "rows": Rows, "rows at once": Together}


def workload(kind: str = "tensors", **changes: Any) -> apportion.Workload:
    return apportion.Workload(
        model=lambda: nn.Linear(3, 3),
        data=lambda part: KINDS[kind](part, LENGTHS[part]),  # type: ignore[operator]
        parts=len(LENGTHS),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=8,
        **changes,
    )


def own_parts(of: apportion.Workload, first: int, end: int) -> PartedDataset:
    """Of a rank that has these alone: another one is not there."""

    def make(part: int) -> Dataset[Any]:
        assert first <= part < end, f"part {part} is another rank's"
        return of.open_part(part)

    return PartedDataset(make, checked, 3, of.seed, lengths=LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loaders", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_the_batches_of_ranks_that_have_a_part_each_are_those_of_one_process(kind: str, loaders: int) -> None:
    of = workload(kind, epochs=2)
    whole = BatchSource(of)
    for rank, share in enumerate(deal_parts(3, [0, 1, 2])):
        dataset = own_parts(of, rank, rank + 1)
        dataset.open(rank)
        source = BatchSource(of, rank=rank, dataset=dataset)
        source.load_ahead(loaders)
        try:
            for step in range(source.total):
                batch, expected = source.at(step, share), whole.at(step)
                assert (batch.size, batch.step, batch.epoch) == (expected.size, expected.step, expected.epoch)
                assert batch.index.tolist() == expected.index[batch.rows].tolist()
                if len(batch):
                    assert torch.equal(batch.inputs, expected.inputs[batch.rows])
                    assert torch.equal(batch.targets, expected.targets[batch.rows])
                    assert torch.equal(batch.draws().uniform(2), expected.draws().uniform(2)[batch.rows])
                else:
                    assert batch.borrowed().targets.tolist() == [rank]
        finally:
            source.close()
        assert dataset.opened == [rank]


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_some_parts_opens_no_other(kind: str) -> None:
    dataset = own_parts(workload(kind), 1, 3)
    source = BatchSource(workload(kind), dataset=dataset)
    for step in range(source.total):
        source.at(step, DataShard(1, 2, parts=(1, 3))).borrowed().inputs  # noqa: B018
    assert set(dataset.opened) <= {1, 2}
    with pytest.raises(ApportionError, match=r"part 0 of 3 could not be opened: AssertionError: part 0 is another"):
        source.at(0).inputs  # noqa: B018


def test_what_a_part_draws_as_it_is_opened_is_its_own() -> None:
    def drawn(part: int) -> TensorDataset:
        return TensorDataset(torch.rand(LENGTHS[part], 3), torch.zeros(LENGTHS[part]))

    of = replace(workload(), data=drawn)
    whole, one = of.open_data(), of.parted_data()
    one.know(LENGTHS)
    assert torch.equal(one[16][0], whole[16][0])
    assert not torch.equal(whole[0][0], whole[11][0])
    before = torch.get_rng_state()
    of.open_data()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_row_has_its_place_after_those_of_the_parts_before() -> None:
    whole = workload().open_data()
    assert len(whole) == 32  # type: ignore[arg-type]
    assert whole[10][0].tolist() == [0, 10, 0.5]
    assert whole[11][0].tolist() == [1, 0, 0.5]
    assert whole[31][0].tolist() == [2, 16, 0.5]
    assert len([*whole]) == 32  # type: ignore[call-overload]
    with pytest.raises(IndexError):
        whole[32]


def test_sequential_rows_come_in_the_order_of_each_part() -> None:
    source = BatchSource(workload(order="sequential"))
    taken = np.concatenate([source.deal.index(step) for step in range(source.total)])
    for low, high in pairwise([0, 11, 15, 32]):
        assert [row for row in taken if low <= row < high] == list(range(low, high))


# What goes wrong


@pytest.mark.parametrize("parts", [0, -1, 2.0, "3", True])
def test_a_number_of_parts_that_is_none_is_refused(parts: Any) -> None:
    with pytest.raises(ValueError, match=rf"parts={parts!r} must be a whole number of at least 1"):
        replace(workload(), parts=parts)


def test_data_that_take_no_part_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parts=3 needs data to be a function of the number of a part"):
        replace(workload(), data=lambda: tensors(0, 3))


def test_a_carried_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parts=3 and carry contradict each other"):
        workload(carry=lambda rows: None, order="sequential")


def test_an_empty_part_is_refused_with_its_number() -> None:
    of = replace(workload(), data=lambda part: [] if part == 1 else tensors(part, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"part 1 of 3 cannot be taken: data\(1\) gave an empty dataset"):
        BatchSource(of)


def test_a_part_that_cannot_be_opened_is_named_with_the_line() -> None:
    def missing(part: int) -> TensorDataset:
        with open(f"/nowhere/{part}"):
            raise AssertionError

    with pytest.raises(ApportionError, match=r"part 0 of 3 could not be opened: FileNotFoundError: .*\.py:\d"):
        BatchSource(replace(workload(), data=missing))


def test_a_part_whose_length_changes_is_refused() -> None:
    dataset = PartedDataset(lambda part: tensors(part, 5), checked, 3, 0, lengths=(5, 6, 5))
    assert len(dataset.open(0)) == 5  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"part 1 of 3 has 5 rows, and had 6 where"):
        dataset.open(1)


def test_parts_with_rows_of_different_shapes_are_refused() -> None:
    of = replace(workload(), data=lambda part: TensorDataset(torch.zeros(6, 2 + part), torch.zeros(6)))
    with pytest.raises(ValueError, match=r"the parts of the data set have rows of different shapes or types"):
        BatchSource(of).at(0).inputs  # noqa: B018


def test_measured_shares_are_refused() -> None:
    with pytest.raises(ValueError, match=r'shares="measured" would move rows between ranks'):
        apportion.data_parallel(shares="measured").build(workload(), apportion.World())


def test_a_run_is_not_gone_on_with_on_other_parts() -> None:
    model = nn.Linear(3, 3)
    saved, now, plain = (
        fingerprint(workload(), model, {}, deal)
        for deal in (PartSampler([3, 4], 8), PartSampler([4, 3], 8), Sampler(7, 8))
    )
    check_fingerprint(saved, saved)
    with pytest.raises(ValueError, match=r"examples of each part was \[3, 4\] and is \[4, 3\]"):
        check_fingerprint(saved, now)
    with pytest.raises(ValueError, match=r"examples of each part was absent and is \[3, 4\]"):
        check_fingerprint(plain, saved)


# Rows that travel


def test_examples_are_encoded_and_decoded() -> None:
    made = [
        (torch.arange(6.0).view(2, 3).t(), {"label": 3, "name": "a", 1: [None, True, 0.1]}),
        (np.arange(4, dtype=np.int16), np.float32(0.5), torch.tensor(2), torch.ones(0, 3, dtype=torch.bfloat16)),
        [torch.tensor([1 + 2j]), (), np.zeros((0,)), torch.tensor([True]), float("inf")],
    ]
    found = decode(encode(made))
    assert torch.equal(found[0][0], made[0][0])  # type: ignore[index]
    assert found[0][1] == made[0][1]  # type: ignore[index]
    assert found[1][0].tolist() == [0, 1, 2, 3]
    assert (found[1][0].dtype, type(found[1][1]), found[1][1]) == (np.int16, np.float32, 0.5)
    assert (found[1][2].shape, found[1][3].shape, found[1][3].dtype) == ((), (0, 3), torch.bfloat16)
    assert torch.equal(found[2][0], torch.tensor([1 + 2j]))
    assert (type(found[1]), type(found[2]), found[2][1], found[2][4]) == (tuple, list, (), float("inf"))
    assert decode(encode([])) == []


def test_a_tensor_that_is_said_to_be_larger_than_its_bytes_is_refused() -> None:
    data = encode([torch.zeros(10)])
    assert data.count(b"[10]") == 1
    with pytest.raises(ValueError, match=r"a tensor of 396 bytes is said to be in the 40 bytes that are left"):
        decode(data.replace(b"[10]", b"[99]"))


def test_what_does_not_travel_is_refused_by_its_kind() -> None:
    with pytest.raises(ValueError, match=r"an example holds a builtins\.set, and between hosts go tensors"):
        encode([({1}, 2)])
