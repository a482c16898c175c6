"""A data set of tensors is opened once in each process of a proof; any other anew each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import mlp
from torch.utils.data import Subset, TensorDataset

from apportion.core.workload import Workload
from apportion.runtime.proof.proof_workload import opened_once


class Stateful(TensorDataset):
    given = 0


def workload_of(made: list[Any], kind: Any) -> Workload:
    def data() -> Any:
        made.append(kind(torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])))
        return made[-1]

    return mlp(8).with_data(lambda _: data())


def test_tensors_are_opened_once() -> None:
    made: list[Any] = []
    workload = opened_once(workload_of(made, TensorDataset))
    assert workload.open_data() is workload.open_data() is made[0]
    assert len(made) == 1


def test_tensors_that_were_written_to_are_opened_anew() -> None:
    made: list[Any] = []
    workload = opened_once(workload_of(made, TensorDataset))
    view: Any = workload.open_data()[:2][0]
    view += 1.0
    assert torch.equal(workload.open_data()[0][0], torch.tensor([0.0, 1.0]))
    assert len(made) == 2


@pytest.mark.parametrize("kind", [Stateful, lambda *tensors: Subset(TensorDataset(*tensors), [0, 2])])
def test_any_other_data_set_is_opened_anew(kind: Any) -> None:
    made: list[Any] = []
    workload = opened_once(workload_of(made, kind))
    assert workload.open_data() is not workload.open_data()
    assert len(made) == 2
