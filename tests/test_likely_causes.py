"""What is known to make ranks train another network, recognised in small nets."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apportion import Workload
from apportion.likely_causes import batch_statistics, common_factor, draws_of, likely_causes

WORKLOAD = Workload(model=nn.Identity, data=list, optimizer=list, batch_size=1, loss=nn.MSELoss())  # type: ignore[arg-type]


class OwnForward(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)


class Activated(nn.BatchNorm2d):
    """It only adds to torch's own forward, which it calls."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


def test_statistics_outside_torchs_own_forward_are_found() -> None:
    network = nn.Sequential(
        nn.BatchNorm2d(3),
        OwnForward(3),
        Activated(3),
        nn.InstanceNorm2d(3),
        nn.InstanceNorm2d(3, track_running_stats=True),
    )
    assert batch_statistics(network) == ["1", "4"]
    told = likely_causes(WORKLOAD, network, ranks=2, named="4")
    assert [text.split()[0] for text in told] == ["4", "1"]
    assert "(OwnForward) takes statistics of a batch" in told[1]


def test_gradients_that_are_off_by_the_number_of_ranks() -> None:
    expected = [torch.randn(4, 3).double(), torch.zeros(3).double(), torch.randn(2).double()]
    twice = {str(i): (t * 3, t) for i, t in enumerate(expected)}
    (told,) = likely_causes(WORKLOAD, nn.Identity(), ranks=3, gradients=twice)
    assert "3 times one device's, on 3 ranks" in told
    assert "sum" in told
    (told,) = likely_causes(WORKLOAD, nn.Identity(), ranks=3, gradients={"0": (expected[0] / 3, expected[0])})
    assert "0.3333 times" in told
    assert not likely_causes(WORKLOAD, nn.Identity(), ranks=2, gradients=twice)
    assert common_factor([(t, t) for t in expected]) is None
    assert common_factor([(expected[0] * 2, expected[0]), (expected[2] * 3, expected[2])]) is None
    assert common_factor([(expected[0] + 1, expected[0])]) is None


def test_every_source_of_draws_is_named() -> None:
    assert draws_of(lambda: torch.rand(3)) == {"torch's generator"}
    assert draws_of(lambda: nn.Dropout(0.5)(torch.ones(3))) == {"torch's generator"}
    assert draws_of(random.random) == {"random"}
    assert draws_of(lambda: np.random.rand(2)) == {"numpy.random"}
    assert draws_of(lambda: np.random.randn(1)) == {"numpy.random"}
    assert draws_of(lambda: (random.random(), np.random.rand())) == {"random", "numpy.random"}
    assert draws_of(lambda: torch.rand(3, generator=torch.Generator())) == set()
    (told,) = likely_causes(WORKLOAD, nn.Identity(), ranks=2, draws=["random", "numpy.random"])
    assert "draws from numpy.random, random" in told
