"""Every strategy gives the network that one device gives: in float64, on real processes, after 8 steps."""

from __future__ import annotations

import networks
import pytest
from ranks import by_value

import apportion
from apportion import Workload
from apportion.strategy import Strategy
from apportion.values import find, names
from apportion.verbs.check import Proof

STRATEGIES = names("apportion.strategies")
STEPS = networks.STEPS
EXACT = 1e-10


def layouts(strategy: str) -> list[int]:
    return [1] if find(strategy, "apportion.strategies").one_process else [1, 2, 3]  # type: ignore[attr-defined]


def prove(workload: Workload, strategy: str | Strategy, workers: int) -> Proof:
    with by_value(networks):
        return apportion.check(workload, strategy, workers=workers, steps=STEPS)


def assert_exact(proof: Proof) -> None:
    (found,) = proof.rounds
    assert found.precision == "float64"
    assert found.steps == STEPS
    assert found.disagreement is None
    assert found.worst.absolute <= EXACT, found
    assert proof.holds
    assert not proof.by_design


FAST = [(s, w, {1: 64, 2: 61, 3: 64}[w]) for s in STRATEGIES for w in layouts(s)]
REST = [(s, w, {1: 61, 2: 64, 3: 61}[w]) for s in STRATEGIES for w in layouts(s)]
BOTH = ("mlp", "cnn", "batch_norm_2d", "counted_tokens", "carried_state")


def everything() -> list[object]:
    made: list[object] = []
    for name in networks.cases:
        made += [pytest.param(name, *layout) for layout in FAST]
        made += [pytest.param(name, *at, marks=() if name in BOTH else pytest.mark.slow) for at in REST]
    return made


@pytest.mark.parametrize(("name", "strategy", "workers", "batch_size"), everything())
def test_equals_one_device(name: str, strategy: str, workers: int, batch_size: int) -> None:
    assert_exact(prove(networks.cases[name](batch_size), strategy, workers))
