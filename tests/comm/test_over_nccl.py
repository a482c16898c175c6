"""Which ranks that compute on GPUs talk over NCCL, and which over gloo."""

from __future__ import annotations

import pytest
import torch

from apportion.comm.process_group import over_nccl


@pytest.mark.parametrize(
    ("ranks", "gpus", "told", "version", "expected"),
    [
        (2, 2, None, (2, 28, 9), True),
        (2, 1, None, (2, 30, 3), False),
        (2, 1, "0", (2, 30, 3), False),
        (2, 1, "1", (2, 30, 3), True),
        (2, 1, "1", (2, 28, 9), False),
    ],
)
def test_ranks_that_share_a_gpu_take_nccl_where_it_was_told_and_can(
    monkeypatch: pytest.MonkeyPatch, ranks: int, gpus: int, told: str | None, version: tuple[int, ...], expected: bool
) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    if told is not None:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", told)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert over_nccl(ranks, gpus) is expected
