"""References that are remembered from one proof to the next: what the tests are held against stays what it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import networks
import planted
import pytest
import recorded_references
import warm_ranks
from ranks import by_value

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.strategy import State, Step, Strategy
from apportion.parallel.replica.step import reference
from apportion.runtime.launch.local import Local
from apportion.runtime.proof.proof import Proof
from apportion.strategies.data_parallel import DataParallel

pytestmark = pytest.mark.processes


@dataclass(frozen=True, repr=False)
class Wrong(Strategy):
    """data_parallel whose ranks all weigh the same, and whose reference is one device as it should be."""

    @property
    def exact(self) -> bool:
        return True

    def build(self, workload: Workload, world: World) -> Step:
        step = DataParallel().build(workload, world)
        planted.mean_of_means(step, world)
        return step

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs of the pools that are used from here on, with nothing remembered from before."""
    monkeypatch.setattr(recorded_references, "remembered", type(recorded_references.remembered)())
    found: list[str] = []
    kept = warm_ranks.kept

    def noted(launcher: Local, target: str, job: Any, ranks: int) -> Any:
        found.append(target.partition(":")[2])
        return kept(launcher, target, job, ranks)

    monkeypatch.setattr(warm_ranks, "kept", noted)
    return found


def prove(strategy: str | Strategy, *, steps: int = 4, workers: int = 2, **changes: Any) -> Proof:
    with by_value(networks), by_value(planted), by_value(sys.modules[__name__]):
        workload = replace(networks.cases["adam"](61), **changes)
        return apportion.check(workload, strategy, workers=workers, steps=steps)


def references(started: list[str]) -> int:
    """How many there were until now, from when this was asked before."""
    found = started.count("reference")
    started.clear()
    return found


@pytest.mark.thorough
def test_a_second_proof_has_its_reference_from_the_first(started: list[str]) -> None:
    first = prove("data_parallel")
    assert sorted(started) == ["reference", "reference", "steps"]
    started.clear()
    assert prove("data_parallel") == first
    assert started == ["steps"]
    assert prove("fully_sharded", workers=3).holds
    assert started == ["steps"] * 2


def test_a_longer_proof_goes_on_where_the_first_has_ended(started: list[str]) -> None:
    longer = prove("data_parallel", steps=6)
    recorded_references.remembered.clear()
    prove("data_parallel", steps=4)
    assert references(started) == 4
    assert prove("data_parallel", steps=6) == longer
    assert references(started) == 2


def test_another_workload_has_a_reference_of_its_own(started: list[str]) -> None:
    prove("data_parallel")
    assert references(started) == 2
    for changes in ({"seed": 1}, {"batch_size": 60}, {"optimizer": networks.momentum}, {"clip_grad_norm": 0.5}):
        assert prove("data_parallel", **changes).holds
        assert references(started) == 2, changes


def test_a_proof_on_few_rows_has_a_reference_for_its_number_of_workers(started: list[str]) -> None:
    for workers in (2, 3):
        assert prove("data_parallel", workers=workers, steps=2).holds
        assert references(started) == 2


def test_what_is_remembered_finds_a_mistake_as_a_rank_does(started: list[str]) -> None:
    alone = prove(Wrong())
    assert references(started) == 2
    again = prove(Wrong())
    assert references(started) == 1  # for the first module that computes something else, which is not remembered
    assert not alone.holds
    assert again == alone
