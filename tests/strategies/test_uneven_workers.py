"""Uneven workers: shares in proportion to speed, and the same network."""

from __future__ import annotations

import time
from typing import Any

import networks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from apportion import Workload
from apportion.comm.world import World
from apportion.parallel.replica.load_balancing import TOLERANCE, new_shares
from apportion.parallel.replica.step import OneDeviceStep
from apportion.strategies.data_parallel import DataParallel

speed = st.floats(0.1, 1e6)


@given(st.lists(speed, min_size=1, max_size=8), st.integers(8, 1000))
def test_shares_come_to_be_proportional_to_speeds(speeds: list[float], batch_size: int) -> None:
    shares: tuple[float, ...] = (1 / len(speeds),) * len(speeds)
    for _ in range(40):
        shares = new_shares(shares, speeds, batch_size)
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0.5 / batch_size
    floor = 1 / batch_size
    wanted = [max(s / sum(speeds), floor) for s in speeds]
    for share, want in zip(shares, [w / sum(wanted) for w in wanted], strict=True):
        assert share == pytest.approx(want, rel=3 * TOLERANCE, abs=2 * floor)


@given(st.lists(st.floats(0.98, 1.02), min_size=1, max_size=8))
def test_noise_changes_nothing(speeds: list[float]) -> None:
    shares = (1 / len(speeds),) * len(speeds)
    assert new_shares(shares, speeds, 100) == shares


def test_an_unknown_speed_is_taken_for_the_usual_one() -> None:
    assert new_shares((0.5, 0.5), (0.0, 0.0), 64) == (0.5, 0.5)
    assert new_shares((0.5, 0.5), (0.0, 10.0), 64) == (0.5, 0.5)


class Slow(nn.Module):
    """Takes time for each row, on one of the ranks; its numbers are the same."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net, self.seconds = nn.Linear(8, 3), seconds

    def forward(self, x: Tensor) -> Tensor:
        end = time.perf_counter() + self.seconds * len(x)
        while time.perf_counter() < end:
            pass
        return self.net(x)


def made(model: Any) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (256,), generator=generator)
    return Workload(
        model=model,
        data=lambda: TensorDataset(x, y),
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch_size=64,
        steps=60,
        precision="float64",
    )


def rows_taken(world: World, pause: float = 0.0) -> tuple[list[int], dict[str, Tensor]]:
    seconds = 4e-4 if world.rank == 0 else 1e-4
    step = DataParallel(shares="measured").build(made(lambda: Slow(seconds)), world)
    rows = []
    while (batch := step.take()) is not None:
        rows.append(len(batch))
        step(batch)
        time.sleep(pause)
    return rows, dict(step.state_dict().tensors())


@pytest.mark.processes
@pytest.mark.thorough
def test_what_comes_between_two_steps_is_no_ranks_own_slowness() -> None:
    """Both wait as long, many times what a step takes: it would make them look alike."""
    (slow, _), (fast, _) = on_ranks(rows_taken, 2, 0.1)
    assert sum(slow[-8:]) < 0.7 * sum(fast[-8:]), (slow, fast)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_slow_rank_comes_to_take_fewer_rows_and_the_network_is_the_same() -> None:
    (slow, state), (fast, other) = on_ranks(rows_taken, 2)
    assert slow[0] == fast[0] == 32
    assert all(a + b == 64 for a, b in zip(slow, fast, strict=True)), "every row is taken once"
    assert sum(slow[-8:]) < 0.7 * sum(fast[-8:]), (slow, fast)
    alone = OneDeviceStep(made(lambda: Slow(0.0)), torch.device("cpu"))
    while (batch := alone.take()) is not None:
        alone(batch)
    for name, tensor in alone.state_dict().tensors():
        assert (state[name] - tensor).abs().max() <= 1e-12, name
        assert torch.equal(state[name], other[name])


def test_a_carried_state_stays_where_it_is() -> None:
    workload = networks.cases["carried_state"](61)
    with pytest.raises(ValueError, match="a carried state stays with its rank"):
        DataParallel(shares="measured").build(workload, World())
    with pytest.raises(ValueError, match='must be "equal" or "measured"'):
        DataParallel(shares="fair")
