"""What is said of other links and batches, by the strategies' own prices: a plan made there says the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from test_plan import hosts, network

import apportion
from apportion.cost_model.cluster import Cluster
from apportion.cost_model.compute import of_rows
from apportion.planner.search import search
from apportion.planner.what_if.cluster_variants import with_bandwidth

EIGHT = network(8)
"""Equal Linear layers."""


def slow_hosts(bits: float) -> Cluster:
    """Two of two cores."""
    return hosts(2, cores=2, bandwidth=bits / 8)


def told_crossings(plan: apportion.Plan) -> Iterator[tuple[str, float, str]]:
    """(who wins above, bits a second, who is told to win below)."""
    for line in plan.sensitivities:
        found = re.fullmatch(
            r"(\S+|\S+, \S+) on .* wins above ([\d.]+) ([MG])b/s of ethernet .*?(?:; below, (.*) on .*)?", line
        )
        if found is not None:
            yield found[1], float(found[2]) * {"M": 1e6, "G": 1e9}[found[3]], found[4] or plan.strategy


@pytest.mark.cases(1)
@pytest.mark.parametrize("bits", [1e7, 1.4e8, 1e9])
def test_who_is_said_to_win_above_a_bandwidth_wins_there(bits: float) -> None:
    told = list(told_crossings(apportion.plan(network=EIGHT, cluster=slow_hosts(bits))))
    assert told
    for above, at, below in told:
        for factor, who in ((0.98, below), (1.02, above)):
            there = with_bandwidth(slow_hosts(bits), "ethernet", factor * at / bits)
            best = str(search(EIGHT, there)[0].strategy)
            assert best.partition("(")[0] == who.partition("(")[0], (
                "of values of one kind that are as good one is named"
            )


@pytest.mark.parametrize("batch", [32, 64, 128])
@pytest.mark.cases(1)
def test_what_is_said_of_another_batch_is_what_a_plan_of_it_says(batch: int) -> None:
    here = of_rows(EIGHT, batch)
    lines = [
        x for x in apportion.plan(network=here, cluster=slow_hosts(1e8)).sensitivities if x.startswith("with batch")
    ]
    for line in lines:
        told = re.match(r"with batch (\d+) choose (.*) \(([\d.]+) times as fast", line)
        assert told is not None, line
        assert str(search(of_rows(EIGHT, int(told[1])), slow_hosts(1e8))[0]) == told[2]
        assert float(told[3]) > 1.1


@pytest.mark.parametrize("batch", [1, 2])
def test_a_pipeline_of_hardly_any_rows_has_its_price(batch: int) -> None:
    found = search(of_rows(EIGHT, batch), slow_hosts(1e9))
    assert [p for p in found if str(p.strategy) == "pipeline_parallel" and p.cost is not None]
