"""What a proof says of networks that are trained right: of 200 of them no false alarm, and at most three left open."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import example_networks
import grid
import networks
import pytest
from ranks import by_value

import apportion
from apportion import Workload
from apportion.core.tree import map_tensors

pytestmark = [pytest.mark.processes, pytest.mark.slow]
MOST_OPEN = 3
PRECISIONS = ("float64", "float32")
SEEDS = (0, 7)
HOLD_FLOAT64 = ("class_weights",)
"""Networks whose loss holds a tensor in float64."""


@pytest.fixture(autouse=True, scope="module")
def _whole() -> Iterator[None]:
    with by_value(networks), by_value(example_networks), by_value(grid), by_value(sys.modules[__name__]):
        yield


def narrow(collate: Any, samples: list[Any]) -> Any:
    """A batch as users have it, in float32."""
    to_float = lambda t: t.float() if t.is_floating_point() else t  # noqa: E731
    return map_tensors(to_float, collate(samples))


def variants() -> Iterator[tuple[str, Workload, int]]:
    """Every network of the grid on two and three workers, under each of its optimizers, in turns in both precisions and
    from both seeds."""
    turn = 0
    for name, make in grid.NETWORKS.items():
        for optimizer in grid.optimizers(name):
            for workers in (2, 3):
                made: Any = grid.OPTIMIZERS[optimizer](make(grid.BATCH))
                precision, seed = PRECISIONS[turn % 2], SEEDS[turn // 2 % 2]
                changed = replace(made, precision=precision, seed=made.seed + seed)
                if name in HOLD_FLOAT64:
                    precision, changed = "float64", replace(changed, precision="float64")
                if precision == "float32":
                    changed = replace(changed, collate=partial(narrow, made.collate))
                yield f"{name}, {optimizer}, {workers} workers, {precision}, seed {changed.seed}", changed, workers
                turn += 1


@pytest.mark.timeout(3600)
def test_no_network_that_is_trained_right_raises_an_alarm() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for name, workload, workers in variants():
        strategy = "map_reduce" if name.startswith("lbfgs") else "data_parallel"
        try:
            proof = apportion.check(workload, strategy, workers=workers, steps=4)
        except (ValueError, apportion.WorkerFailed) as error:
            found["refused"].append(f"{name}: {error}")
            continue
        found[proof.verdict].append(f"{name}: {proof.sentence}")
        if any("random numbers" in line for line in proof.by_design):
            found["draws"].append(f"{name}: {proof.by_design}")
        print(found[proof.verdict][-1], file=sys.stderr, flush=True)
    for kind in ("different", "undecided", "refused", "draws"):
        print(kind, len(found[kind]), *found[kind], sep="\n  ", file=sys.stderr)
    print({kind: len(names) for kind, names in found.items()}, file=sys.stderr)
    assert sum(len(found[kind]) for kind in ("equal", "different", "undecided")) >= 200
    assert not found["different"]
    assert len(found["undecided"]) <= MOST_OPEN
