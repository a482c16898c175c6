"""When a plan's answer would change, with prices worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, ROWS, chain, machine

from apportion.core.strategy import Strategy
from apportion.cost_model.cluster import Cluster, Link, Moved, Placement
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.planner.candidate import TIE, Priced, priced, ranked
from apportion.planner.units import rate
from apportion.planner.what_if.cluster_variants import (
    ASSUMED,
    across_hosts,
    of_hosts,
    one_gpu_more,
    one_host_more,
    with_bandwidth,
)
from apportion.planner.what_if.sensitivity import Crossing, WhatIf, crossings, sensitivities
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.hogwild import Hogwild
from apportion.strategies.single_device import SingleDevice

ALONE, SPLIT = SingleDevice(), DataParallel()


def row(strategy: Strategy, seconds: float) -> Priced:
    return Priced(strategy=strategy, layout=machine(), cost=Cost(terms={"computing": seconds}, examples=ROWS))


def both(profile: Profile, layout: Placement) -> list[Priced]:
    """One process, and all."""
    return [priced(ALONE, layout.part((0,)), profile), priced(SPLIT, layout, profile)]


def test_the_fastest_two_of_each_kind_of_exact_strategy_are_looked_at_again() -> None:
    some = [row(DataParallel(microbatches=n), 4.0 - n) for n in (1, 2, 3)]
    alone, free = row(ALONE, 2.5), row(Hogwild(), 0.1)
    refused = Priced(strategy=ALONE, layout=machine(), refusal="no")
    model = WhatIf([*some, refused, alone, free], alone, chain(1.0), machine().cluster)
    assert model.short_list == [some[2], some[1], alone]


def test_what_does_not_run_or_fit_there_is_not_the_fastest_there() -> None:
    profile, layout = chain(1.0, parameter_bytes=GB), machine()
    some = both(profile, layout)
    (cpu,) = layout.cluster.devices
    least = max(p.cost.memory_bytes for p in some[:1] if p.cost is not None)
    small = replace(layout.cluster, devices=(replace(cpu, memory_bytes=least),))
    there = WhatIf(some, some[1], profile, layout.cluster).priced(some, small)
    assert [p.strategy for p in there.ranking] == [ALONE], "one replica fits, and no second one"
    assert there.ours is None
    one = WhatIf(some, some[1], profile, layout.cluster).searched(profile=replace(profile, batch_size=1))
    assert {type(p.strategy) for p in one.ranking} == {SingleDevice}
    assert one.ours is None


HALF = chain(1.0, parameter_bytes=GB)
"""3 s by one. Two on hosts of their own save 1.5 s of it; they move 1 GB, and copy it twice."""


def of_both(profile: Profile, layout: Placement) -> list[Crossing]:
    found = ranked(both(profile, layout))
    return crossings(WhatIf(found, found[0], profile, layout.cluster))


def test_the_answer_changes_where_the_sum_takes_what_two_save() -> None:
    """1 GB in 1.5 s, less what makes 3 s a tie: at 0.71 GB/s. Copying it is free here."""
    layout = machine(1, hosts=2, memory_rate=1e15, bandwidth=1e9)
    found = of_both(HALF, layout)
    assert [(c.kind, c.below.strategy, c.above.strategy) for c in found] == [("wire", ALONE, SPLIT)]
    assert found[0].bandwidth == pytest.approx(1e9 / (3 / (1 + TIE) - 1.5), rel=0.01)
    slow = machine(1, hosts=2, memory_rate=1e15, bandwidth=1e7)
    (up,) = of_both(HALF, slow)
    assert (up.below.strategy, up.above.strategy) == (ALONE, SPLIT), "found from below, 67 times as far"
    assert up.bandwidth == pytest.approx(1e9 / (3 / (1 + TIE) - 1.5), rel=0.01)
    far = machine(1, hosts=2, memory_rate=1e15, bandwidth=1e5)
    assert of_both(HALF, far) == [], "6,700 times as far is not looked at"


def named(cluster: Cluster, kind: str) -> Cluster:
    return replace(cluster, links=tuple(replace(link, kind=kind) for link in cluster.links))


def told(layout: Placement, profile: Profile, begin: str = "") -> list[str]:
    found = ranked(both(profile, layout))
    lines = sensitivities(found, found[0], profile, layout.cluster)
    return [line for line in lines if begin in line]


def test_a_crossing_is_told_in_the_units_of_its_link() -> None:
    layout = machine(1, hosts=2, memory_rate=1e15)
    ethernet = replace(layout, cluster=named(layout.cluster, "ethernet"))
    (line,) = told(ethernet, HALF, "wins above")
    assert line.startswith("data_parallel on 2 workers of 2 hosts wins above 5.6")
    assert line.endswith("Gb/s of ethernet (here 8 Gb/s); below, single_device on local(workers=1, threads=1)")
    slow = machine(1, hosts=2, memory_rate=1e15, bandwidth=1e7)
    memory = replace(slow, cluster=named(slow.cluster, "memory"))
    (line,) = told(memory, HALF, "wins above")
    assert line.startswith("data_parallel on 2 workers of 2 hosts wins above 7")
    assert line.endswith("MB/s of memory between workers (here 10 MB/s)")
    told_as = [rate(kind, 1.25e7) for kind in ("ethernet", "infiniband", "pcie")]
    assert told_as == ["100 Mb/s", "100 Mb/s", "12.5 MB/s"]
    assert rate("infiniband", 2.5e10) == "200 Gb/s"


def test_smaller_and_larger_batches_that_another_one_is_best_with_are_told_once() -> None:
    """Two save 1.5 s for 100 rows and 0.75 s for 50, and a sum of 1 GB takes 1 s whatever the rows."""
    layout = machine(1, hosts=2, memory_rate=1e15)
    (line,) = told(layout, HALF, "with batch")
    assert line == f"with batch 50 choose {ALONE} on local(workers=1, threads=1) (1.17 times as fast as data_parallel)"
    slower = machine(1, hosts=2, memory_rate=1e15, bandwidth=1e9 / 2)
    (line,) = told(slower, HALF, "with batch")
    assert line.startswith("with batch 200 choose data_parallel on 2 workers of 2 hosts (1.20 times as fast as single")
    tie = machine(1, hosts=2, memory_rate=1e15, bandwidth=1e9 / 2.95)
    assert [line.split()[2] for line in told(tie, HALF, "with batch")] == ["400"], "at 200 they are 1 % apart"
    odd = replace(HALF, batch_size=75)
    assert told(layout, odd, "with batch") == [], "37.5 rows, which one would be best with, are no batch"


def test_one_gpu_more_is_told_where_it_helps() -> None:
    heavy = chain(30.0, activation_bytes=8)
    two = machine(2, kind="cuda", memory_rate=1e15)
    (line,) = told(two, heavy, "GPU more")
    assert line.startswith(("one GPU more helps 49%", "one GPU more helps 47%"))
    light = chain(30.0, parameter_bytes=GB)
    assert told(machine(2, kind="cuda", memory_rate=1e15, bandwidth=1e6), light, "GPU more") == []


def test_a_host_more_is_on_the_network_that_is_there_or_on_one_that_is_named() -> None:
    heavy = chain(30.0, activation_bytes=8)
    (line,) = told(machine(1, memory_rate=1e15), heavy, "helps")
    assert line.startswith("a second host on 10 Gb/s Ethernet helps ")
    (line,) = told(machine(1, hosts=2, memory_rate=1e15), heavy, "helps")
    assert line.startswith("a third host helps ")


# The same machines with one thing changed


def moved(nbytes: int, seconds: float, **facts: Any) -> Moved:
    return Moved(**{"what": "message", "ranks": 2, "nbytes": nbytes, "seconds": seconds, **facts})


def test_of_a_faster_link_the_latency_stays() -> None:
    table = (moved(8, 0.25), moved(GB, 2.5), moved(1 << 40, 0.25))
    layout = machine(1, hosts=2, latency=0.5, measured=table)
    (link,) = with_bandwidth(layout.cluster, "wire", 4.0).links
    assert (link.bandwidth, link.latency) == (4e9, 0.5)
    assert [m.seconds for m in link.measured] == [0.25, 0.5 + 2.0 / 4, 0.25], "what was shorter is not made negative"
    assert with_bandwidth(layout.cluster, "ethernet", 4.0) == layout.cluster


def test_a_host_more_has_links_of_its_own_and_joins_those_between_hosts() -> None:
    one = machine(2)
    grown = one_host_more(one.cluster)
    own, twin, across = grown.links
    assert (own.devices, twin.devices) == (("h0/cpu0",), ("h0+/cpu0",))
    assert (across.kind, across.port, across.devices) == ("ethernet", "host", ("h0/cpu0", "h0+/cpu0"))
    assert {"latency": across.latency, "bandwidth": across.bandwidth} == ASSUMED
    (joined,) = one_host_more(machine(2, hosts=2).cluster).links
    assert joined.devices == ("h0/cpu0", "h1/cpu0", "h1+/cpu0")


def test_hosts_are_joined_by_the_fastest_that_joins_them_now() -> None:
    two = machine(1, hosts=2).cluster
    (wire,) = two.links
    table = (moved(8, 1.0, what="all_reduce", ranks=2), moved(8, 1.0, what="all_reduce", ranks=8), moved(8, 1.0))
    fast = Link(kind="fast", devices=wire.devices, latency=0.0, bandwidth=9e9, port="host", measured=table)
    within = Link(kind="memory", devices=("h0/cpu0",), latency=0.0, bandwidth=99e9)
    cluster = replace(two, links=(wire, fast, within))
    assert across_hosts(cluster) is fast
    four = of_hosts(cluster, 4)
    assert [link.kind for link in four.links if len(link.devices) == 4] == ["fast"]
    for grown in (of_hosts(cluster, 2), four):
        (joined,) = (link for link in grown.links if link.kind == "fast")
        assert [(m.what, m.ranks) for m in joined.measured] == [("all_reduce", 2), ("message", 2)]
    assert across_hosts(of_hosts(cluster, 1)) is None


def test_a_gpu_more_joins_what_the_last_one_joins() -> None:
    cluster = machine(2, kind="cuda").cluster
    apart = Link(kind="pcie", devices=("h0/cuda0",), latency=0.0, bandwidth=1.0)
    more = one_gpu_more(replace(cluster, links=(*cluster.links, apart)))
    assert more is not None
    assert [link.devices for link in more.links] == [("h0/cuda0", "h0/cuda1", "h0/cuda1+"), ("h0/cuda0",)]
    assert one_gpu_more(machine(1, hosts=2, kind="cuda").cluster) is None
