"""The rows of a data set in parts that a proof is made on: some of each part, and all that are asked for are sent."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import apportion
from apportion.core.data.sent_rows import SentPart, SentRows
from apportion.core.data.source import BatchSource
from apportion.runtime.proof.proof_workload import few_rows, rows_of_proof, short_sequences
from apportion.runtime.worker.job import Job

FEW, MANY, STEPS = 3, 16, 4


def part_of(part: int, length: int) -> TensorDataset:
    return TensorDataset(torch.full((length, 2), part), torch.arange(length))


def workload(lengths: list[int], batch_size: int, order: Any = "shuffled") -> apportion.Workload:
    return apportion.Workload(
        model=lambda: nn.Linear(2, 2),
        data=lambda part: part_of(part, lengths[part]),
        parts=len(lengths),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=batch_size,
        order=order,
        epochs=3,
    )


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    batch_size=st.integers(1, 40),
    workers=st.integers(1, 4),
    order=st.sampled_from(["shuffled", "sequential"]),
)
def test_a_proof_asks_for_no_row_that_was_not_sent(
    lengths: list[int], batch_size: int, workers: int, order: Any
) -> None:
    whole = workload(lengths, batch_size, order)
    numbers = [FEW * workers + 1, MANY * workers + 1]
    wanted = rows_of_proof(whole, lengths, numbers, STEPS, workers)
    data = SentRows(
        tuple(
            SentPart(part, length, {at: whole.open_part(part)[at] for at in wanted[part]})
            for part, length in enumerate(lengths)
        ),
        sum(map(len, wanted)),
    )
    job = Job(workload=whole, strategy=apportion.data_parallel(), sent=data, lengths=tuple(lengths), proof=True)
    for rows in (*numbers, batch_size):
        for steps in (STEPS, 2):
            of_proof = few_rows(job.as_written(), rows, steps, workers, lengths)
            here = few_rows(Job(**{**vars(job), "proof": False}).open(), rows, steps, workers, lengths)
            expected, found = BatchSource(of_proof), BatchSource(here)
            for step in range(min(steps, expected.total)):
                assert torch.equal(found.at(step).inputs, expected.at(step).inputs)
                assert torch.equal(found.at(step).targets, expected.at(step).targets)


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5), batch_size=st.integers(2, 40))
def test_a_proof_has_rows_of_every_part_and_the_steps_of_the_run(lengths: list[int], batch_size: int) -> None:
    whole = workload(lengths, batch_size)
    few = few_rows(whole, 7, STEPS, 2, lengths)
    assert few.batch_size <= min(7, batch_size)
    made = BatchSource(few)
    assert made.total == BatchSource(whole).total
    assert all(len(few.open_part(part)) >= 1 for part in range(len(lengths)))  # type: ignore[arg-type]
    assert few_rows(whole, 7, STEPS, 2).batch_size == few.batch_size, "where the lengths are not known, too"


def test_short_sequences_are_of_each_part() -> None:
    def sequences(part: int) -> TensorDataset:
        return TensorDataset(torch.full((3, 50), part), torch.zeros(3, 50, dtype=torch.int64))

    few = short_sequences(
        apportion.Workload(
            model=lambda: nn.Linear(2, 2),
            data=sequences,
            parts=2,
            loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            batch_size=2,
        )
    )
    inputs, _ = few.open_part(1)[0]
    assert inputs.tolist() == [1] * len(inputs)
    assert len(inputs) < 50
