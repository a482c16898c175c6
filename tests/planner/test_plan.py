"""Plans: what is priced, how it is ranked, what is said of it, and what the command makes of two files of JSON.

The prices here are short formulas, so that it is known which one has to win; what the strategies really ask for is held
in test_costs_of_replicas.py.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
from click.testing import CliRunner, Result
from ranks import by_value

import apportion
from apportion.cli.app import app
from apportion.core.strategy import Strategy
from apportion.core.value import find, names
from apportion.cost_model.cluster import Cluster, Device, Link, Moved, Placement, Rate
from apportion.cost_model.collectives import all_reduce
from apportion.cost_model.compute import of_rows
from apportion.cost_model.cost import TERMS, Cost, Span
from apportion.cost_model.profile import LayerProfile, Profile
from apportion.planner.build import hosts_to_match, make, why_not
from apportion.planner.candidate import TIE, Measurement, Priced, folded, misfit, ranked
from apportion.planner.plan import commands
from apportion.planner.plan_text import show_plan
from apportion.planner.search import MOST_PRICED, group_sizes, places_of, search
from apportion.planner.units import gibibytes, milliseconds, rate
from apportion.planner.what_if import sensitivity
from apportion.planner.what_if.cluster_variants import of_hosts, one_gpu_more, one_host_more, with_bandwidth
from apportion.planner.what_if.sensitivity import WhatIf, crossings, sensitivities
from apportion.profiler import measure_cluster
from apportion.profiler.measure_workload import profile
from apportion.reporting.html import write_plan_html
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.local_sgd import LocalSgd
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.single_device import SingleDevice

GB = 2**30


def cpu(name: str, cores: int = 2, **changed: Any) -> Device:
    given: dict[str, Any] = {
        "name": f"{name}/cpu",
        "host": name,
        "kind": "cpu",
        "model": "some cpu",
        "memory_bytes": 8 * GB,
        "rates": (
            *(Rate(threads=1, together=n, flops=1e11, bytes_per_second=1e10) for n in (1, cores)),
            Rate(threads=cores, together=1, flops=1e11 * cores * 0.9, bytes_per_second=1e10),
        ),
        "cores": cores,
    }
    return Device(**{**given, **changed})


def host(cores: int = 2, **changed: Any) -> Cluster:
    """One host, whose workers talk through its memory."""
    memory = Link(kind="memory", devices=("a/cpu",), latency=1e-6, bandwidth=4e9, port="all")
    return Cluster(name="one host", devices=(cpu("a", cores, **changed),), links=(memory,))


def hosts(many: int = 2, *, bandwidth: float = 1.25e9, cores: int = 1) -> Cluster:
    """Some hosts on an Ethernet of so many bytes a second."""
    devices = tuple(cpu(chr(ord("a") + i), cores) for i in range(many))
    memories = tuple(Link(kind="memory", devices=(d.name,), latency=1e-6, bandwidth=8e9, port="all") for d in devices)
    ethernet = Link(
        kind="ethernet", devices=tuple(d.name for d in devices), latency=5e-5, bandwidth=bandwidth, port="host"
    )
    return Cluster(name=f"{many} hosts", devices=devices, links=(*memories, ethernet))


def gpus(many: int = 4) -> Cluster:
    """One host of small GPUs."""
    rate = Rate(threads=1, together=1, flops=4e12, bytes_per_second=1e12)
    devices = tuple(
        Device(name=f"a/gpu{i}", host="a", kind="cuda", model="gpu", memory_bytes=16 * GB, rates=(rate,))
        for i in range(many)
    )
    link = Link(kind="nvlink", devices=tuple(d.name for d in devices), latency=1e-5, bandwidth=1e11)
    return Cluster(name="gpus", devices=devices, links=(link,))


def network(layers: int = 4, *, flops: float = 1e9, weights: int = 4_000_000, batch: int = 64) -> Profile:
    """So many equal layers one after the other."""
    return Profile(
        name="some network",
        batch_size=batch,
        device="none",
        layers=tuple(
            LayerProfile(
                name=f"layer{i}",
                kind="Linear",
                inputs=(f"layer{i - 1}",) if i else ("x",),
                parameter_bytes=weights,
                activation_bytes=1 << 20,
                kept_bytes=1 << 20,
                flops=flops,
            )
            for i in range(layers)
        ),
    )


def cost(seconds: float = 1.0, *, examples: float = 64, memory: int = 1 << 20, **terms: float) -> Cost:
    return Cost(terms={"computing": seconds, **terms}, memory={"weights": memory}, examples=examples)


def alone(self: SingleDevice, profile: Profile, layout: Placement) -> Cost:
    rows = layout.ranks and profile.batch_size
    took = profile.network_seconds(layout.device(0), rows=rows, threads=layout.threads)
    update = profile.update_seconds(layout.device(0), threads=layout.threads)
    return cost(took.both, examples=profile.batch_size, updating=update, memory=profile.parameter_bytes * 3)


def in_shares(self: DataParallel, profile: Profile, layout: Placement) -> Cost:
    if self.of is not None:
        raise ValueError(f"{self.of} has no price here")
    rows = profile.batch_size / layout.ranks
    if rows < 1:
        raise ValueError(f"batch_size={profile.batch_size} cannot feed {layout.ranks} workers: use fewer")
    took = profile.network_seconds(layout.device(0), rows=rows, threads=layout.threads, together=layout.together(0))
    sent = all_reduce(layout, range(layout.ranks), profile.parameter_bytes)
    update, memory = profile.update_seconds(layout.device(0)), profile.parameter_bytes * 3
    return cost(took.both, examples=profile.batch_size, communicating=sent, updating=update, memory=memory)


def on_their_own(self: LocalSgd, profile: Profile, layout: Placement) -> Cost:
    took = profile.network_seconds(layout.device(0), rows=profile.batch_size, together=layout.together(0))
    return cost(took.both, examples=profile.batch_size * layout.ranks)


def in_stages(self: PipelineParallel, profile: Profile, layout: Placement) -> Cost:
    whole = profile.network_seconds(layout.device(0), rows=profile.batch_size, together=layout.together(0)).both
    own = whole / layout.ranks
    spans = tuple(Span(f"a/cpu {r}", "forward 0", "computing", r * own, (r + 1) * own) for r in range(layout.ranks))
    priced = cost(own, examples=profile.batch_size, bubble=whole, updating=whole, memory=profile.parameter_bytes)
    return replace(priced, timeline=spans)


def no_price(self: Strategy, profile: Profile, layout: Placement) -> Cost:
    raise ValueError(f"{self} is not for networks of {len(profile.layers)} layers: use data_parallel")


PRICES: dict[str, Callable[..., Cost]] = {
    "single_device": alone,
    "data_parallel": in_shares,
    "local_sgd": on_their_own,
}


@pytest.fixture(autouse=True)
def prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three strategies; the others refuse. Each has its plain value to offer."""
    for name in names("apportion.strategies"):
        cls = find(name, "apportion.strategies")
        monkeypatch.setattr(cls, "cost", PRICES.get(name, no_price), raising=False)
        monkeypatch.setattr(cls, "candidates", classmethod(plain_value), raising=False)


def plain_value(cls: Any, profile: Profile, layout: Placement) -> Iterator[Strategy]:
    if cls.one_process == (layout.ranks == 1):
        yield cls()


def planned(profile: Profile | None = None, cluster: Cluster | None = None, **options: Any) -> apportion.Plan:
    return apportion.plan(network=profile or network(), cluster=cluster or host(), **options)


# What is looked at


def test_every_strategy_is_priced_on_every_layout_or_says_why_not() -> None:
    found = search(network(), host())
    assert {str(p.strategy) for p in found} >= set(names("apportion.strategies"))
    assert all((p.cost is None) == bool(p.refusal) for p in found)
    assert [p.layout.threads for p in found if str(p.strategy) == "single_device"] == [2, 1]


def test_never_more_threads_than_cores() -> None:
    for cluster in (host(2), host(8), hosts(4, cores=4)):
        for p in search(network(), cluster):
            for device in cluster.devices:
                assert p.layout.devices.count(device.name) * p.layout.threads <= device.cores
    with pytest.raises(ValueError, match=r"workers=2 and threads=2: cluster one host has no place.*never more threads"):
        search(network(), host(2), workers=2, threads=2)


def test_a_number_of_workers_leaves_layouts_of_so_many() -> None:
    assert {p.layout.ranks for p in search(network(), host(8), workers=3)} == {3}
    assert [(x.ranks, x.threads) for x in places_of(host(8), 3)] == [(3, 2), (3, 1)]
    assert {x.devices for x in places_of(hosts(2, cores=2), 2)} == {("a/cpu",) * 2, ("a/cpu", "b/cpu")}


@pytest.mark.parametrize(
    ("workers", "threads", "told"),
    [
        (
            3,
            None,
            "workers=3: .*: workers are on one host, or as many on each of the 2, .*; use workers=2 or workers=4",
        ),
        (5, None, "workers=5: .*: there are 4 cores, and never more threads than cores; use workers=4"),
        (4, 2, "workers=4 and threads=2: .*: there are 4 cores, and never more threads than cores; use workers=2"),
    ],
)
def test_a_number_of_workers_without_a_place_is_told_why(workers: int, threads: int | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        search(network(), hosts(2, cores=2), workers=workers, threads=threads)


def test_what_offers_nothing_but_can_run_has_its_plain_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline of a batch of two: no number of micro-batches is worth a look, and it is not that it cannot be cut."""
    monkeypatch.setattr(PipelineParallel, "candidates", classmethod(lambda cls, profile, layout: iter(())))
    monkeypatch.setattr(PipelineParallel, "cost", in_stages)
    found = [p for p in search(network(batch=2), host()) if p.strategy == PipelineParallel()]
    assert [p.cost is not None for p in found] == [True]
    one = [p for p in search(network(batch=2), host(), workers=1) if p.strategy == PipelineParallel()]
    assert [p.refusal for p in one] == ["there is one device, which is one worker"]


def test_a_value_is_priced_as_it_is_and_a_name_in_all_its_values() -> None:
    found = search(network(), host(), strategies=["data_parallel(microbatches=2)", "single_device"])
    assert {str(p.strategy) for p in found} == {"data_parallel(microbatches=2)", "single_device"}


def test_two_hundred_layers_on_64_devices_are_a_few_hundred_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counting(self: DataParallel, profile: Profile, layout: Placement) -> Cost:
        nonlocal asked
        asked += 1
        return in_shares(self, profile, layout)

    monkeypatch.setattr(DataParallel, "cost", counting)
    eight = tuple(
        replace(d, name=f"h{h}/gpu{i}", host=f"h{h}") for h in range(8) for i, d in enumerate(gpus(8).devices)
    )
    link = Link(kind="infiniband", devices=tuple(d.name for d in eight), latency=1e-5, bandwidth=2.5e10)
    found = search(network(200), Cluster(name="64", devices=eight, links=(link,)))
    assert len(found) <= MOST_PRICED + len(names("apportion.strategies"))
    assert max(p.layout.ranks for p in found if p.cost is not None) == 64
    assert asked < MOST_PRICED


def test_groups_of_composites_share_a_host_first() -> None:
    found = search(network(), hosts(2, cores=4))
    groups = [p for p in found if getattr(p.strategy, "of", None) is not None and p.layout.ranks == 8]
    assert {str(p.strategy) for p in groups} >= {"data_parallel(of=pipeline_parallel, replicas=2)"}
    for p in groups:
        size = p.layout.ranks // p.strategy.replicas  # type: ignore[attr-defined]
        for first in range(0, p.layout.ranks, size):
            assert len(p.layout.part(range(first, first + size)).hosts) == 1
    assert group_sizes(Placement(cluster=hosts(2, cores=4), devices=("a/cpu",) * 4 + ("b/cpu",) * 4)) == [2, 4]


def test_what_does_not_fit_is_refused_by_the_name_of_the_device() -> None:
    two = Placement(cluster=host(), devices=("a/cpu", "a/cpu"))
    assert misfit(cost(memory=4 * GB), two) == ""
    told = misfit(cost(memory=5 * GB), two)
    assert told == "does not fit: needs 10 GiB (2 workers of 5 GiB) on a/cpu, which has 8 GiB"
    large = network(weights=GB)
    (p,) = (p for p in folded(search(large, host())) if str(p.strategy) == "single_device")
    assert p.refusal == "does not fit: needs 12 GiB on a/cpu, which has 8 GiB"


# The order


def row(strategy: str, seconds: float, ranks: int = 1, *, measured: float | None = None, **changed: Any) -> Priced:
    value = apportion.__getattr__(strategy)()
    layout = Placement(cluster=host(4), devices=("a/cpu",) * ranks)
    tried = None if measured is None else Measurement(step_seconds=measured, low=measured, high=measured, steps=20)
    return Priced(strategy=value, layout=layout, cost=cost(seconds, **changed), tried=tried)


def test_exact_ones_come_first_by_time_an_example_and_refused_ones_last() -> None:
    refused = Priced(strategy=SingleDevice(), layout=row("hogwild", 1).layout, refusal="no")
    some = [refused, row("local_sgd", 0.1, 2), row("data_parallel", 2, 2), row("map_reduce", 3, 2, examples=640)]
    assert [str(p.strategy) for p in ranked(some)] == ["map_reduce", "data_parallel", "local_sgd", "single_device"]


@pytest.mark.parametrize(("gain", "first"), [(TIE / 2, "single_device"), (TIE * 2, "data_parallel")])
def test_a_tie_goes_to_the_simpler_one(gain: float, first: str) -> None:
    some = [row("data_parallel", 1.0, 2), row("single_device", 1.0 + gain)]
    assert str(ranked(some)[0].strategy) == first
    if first == "single_device":
        plan = make(some, network(), host(4))
        assert "within the uncertainty: the simpler one is taken (1 worker instead of 2 workers)" in plan.why[-1]


def test_what_was_measured_counts_more_than_what_was_predicted() -> None:
    some = [row("data_parallel", 1.0, 2, measured=3.0), row("single_device", 2.0, measured=2.0)]
    first, second = ranked(some)
    assert (str(first.strategy), first.step_seconds) == ("single_device", 2.0)
    assert why_not(second, first, network()) == (
        "1.50 times as long, measured: it takes 3.00 times its prediction, single_device 1.00 times"
    )


def test_a_strategy_on_several_layouts_is_one_line_with_the_best_and_their_number() -> None:
    able = [p for p in folded(search(network(), host(8))) if str(p.strategy) == "data_parallel"]
    assert len(able) == 1
    same = [p for p in search(network(), host(8)) if str(p.strategy) == "data_parallel" and p.cost is not None]
    assert able[0].layouts == len(same) > 1
    assert able[0].seconds_per_example == min(p.seconds_per_example for p in same)


# What is said


def test_nothing_that_runs_is_an_error_with_the_reasons() -> None:
    with pytest.raises(ValueError, match=r"nothing exact can run some network on cluster one host: .*does not fit"):
        planned(network(weights=8 * GB))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (read below)
        make([p for p in search(network(), host()) if not (p.strategy.exact and p.cost)], network(), host())
    said, _, others = str(caught.value).partition("; approximate ones can, which compute something else: ")
    assert others == "local_sgd"
    assert not re.search("local_sgd|hogwild|parameter_server", said)


def test_not_to_distribute_is_an_answer() -> None:
    plan = planned(network(weights=40_000_000, flops=1e8))
    assert plan.strategy == "single_device"
    assert "do not distribute: one process is fastest" in plan.why


def test_why_the_first_won_is_what_it_saves_and_spends_against_the_second() -> None:
    some = [row("data_parallel", 1.0, 2, communicating=0.25), row("single_device", 2.0, updating=0.1)]
    told = make(some, network(), host(4)).why[-1]
    assert told.startswith("1.68 times as fast as single_device on local(workers=1, threads=1): it saves")
    assert "saves 1 s of computing and 100 ms of updating weights and spends 250 ms more of communication" in told


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (row("data_parallel", 0.9, 2, communicating=0.6), "waits 600 ms for the sum of 40 MB of gradients"),
        (row("pipeline_parallel", 1.0, 2, bubble=1.0), "half of each step is bubble"),
        (row("pipeline_parallel", 1.0, 4, bubble=3.0), "75% of each step is bubble"),
        (row("tensor_parallel", 0.9, 2, communicating=0.2), "waits 200 ms for what its workers send each other"),
        (row("hybrid_parallel", 1.0, 2, waiting=0.2), "waits 200 ms for the slowest of 2 workers"),
        (row("conv_parallel", 1.5, 2), "computes 500 ms longer: 2 workers of 1 thread"),
        (row("map_reduce", 1.0, 2, loading=0.5), "loads examples for 500 ms longer"),
        (row("map_reduce", 1.0, 2, updating=0.5), "updates 40 MB of weights for 500 ms longer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_why_another_lost_names_its_dominating_extra_term(other: Priced, told: str) -> None:
    ten = network(10)
    assert ten.parameter_bytes == 40_000_000
    line = why_not(other, row("single_device", 1.0), ten)
    assert line.endswith(told)
    assert re.match(r"(\d\.\d\d times as long|\d\.\d% slower): ", line)


def test_an_approximate_one_is_never_ranked_by_its_step_alone() -> None:
    plan = planned()
    (line,) = (w for p, w in zip(plan.candidates, plan.reasons, strict=True) if str(p.strategy) == "local_sgd")
    faster = plan.chosen.seconds_per_example / next(
        p.seconds_per_example for p in plan.candidates if str(p.strategy) == "local_sgd"
    )
    assert line == (
        f"approximate: {faster:.2f}x faster per example; wins only if it needs less than {faster:.2f}x the examples"
    )
    assert plan.chosen.strategy.exact


def test_what_was_measured_has_no_reason_in_milliseconds_that_were_predicted() -> None:
    """Measured 0.4 s apart, predicted 1 s: the second is no reason of the first."""
    first = row("single_device", 1.0, measured=1.0)
    slow = row("data_parallel", 1.2, 2, communicating=0.8, measured=1.4)
    assert why_not(slow, first, network()) == (
        "1.40 times as long, measured: communication that nothing hides is 40% of its step by prediction"
    )
    learned = replace(row("data_parallel", 1.2, 2, communicating=0.8), corrected=1.4)
    assert "with what the trials taught: communication" in why_not(learned, first, network())
    told = make([first, slow], network(), host(4)).why[-1]
    assert told.endswith("measured: by prediction it saves communication that nothing hides and computing")
    fast = row("data_parallel", 0.5, 2, measured=1.4)
    assert why_not(fast, first, network()) == (
        "1.40 times as long, measured: it takes 2.80 times its prediction, single_device 1.00 times"
    )
    assert (
        make([first, fast], network(), host(4)).why[-1].endswith("measured; predicted were 1 s against 500 ms a step")
    )


def test_a_prediction_is_less_certain_the_more_of_it_is_our_own_calls() -> None:
    """Half of a step of 4 ms are 200 calls of 10 us."""
    cluster = host(call_seconds=1e-5)

    def counted(self: SingleDevice, profile: Profile, layout: Placement) -> Cost:
        return cost(0.002, updating=200 * layout.device(0).call_seconds)

    plain = Priced(strategy=SingleDevice(), layout=Placement(cluster=cluster, devices=("a/cpu",)), cost=cost(0.002))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SingleDevice, "cost", counted)
        half = replace(plain, cost=counted(SingleDevice(), network(), plain.layout)).with_overhead(network())
        assert half.overhead == pytest.approx(0.5)
        assert half.error == pytest.approx(0.5 * 0.1 + 0.5 * 0.5)
        assert planned(cluster=cluster, workers=1).band == pytest.approx(half.error)
    assert plain.error == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [(1000, "0.977 KiB"), (1, "1 B"), (600 * 2**20, "600 MiB"), (6e12, "5.46 TiB"), (6e18, "5,456,968 TiB")],
)
def test_sizes_have_a_unit_near_at_hand(nbytes: float, told: str) -> None:
    assert gibibytes(nbytes) == told


def test_other_numbers_have_no_exponents_either() -> None:
    assert (milliseconds(5.59), milliseconds(0.9999), milliseconds(5590.0)) == ("5.59 s", "1 s", "5,590 s")
    assert [rate("ethernet", x) for x in (1.25e6, 1.25e9, 2e14)] == ["10 Mb/s", "10 Gb/s", "1,600 Tb/s"]


def test_refusals_are_told_as_they_are() -> None:
    plan = planned()
    told = dict(zip((str(p.strategy) for p in plan.candidates), plan.reasons, strict=True))
    assert told["hogwild"] == "hogwild is not for networks of 4 layers: use data_parallel"


# When the answer would change


def crossing_by_hand(profile: Profile, cluster: Cluster) -> float:
    """Bytes a second at which data_parallel on both hosts is told apart from one device: its computing is known, and
    two messages of half the weights each have to fit into the rest."""
    layout = Placement(cluster=cluster, devices=("a/cpu", "b/cpu"))
    one, two = alone(SingleDevice(), profile, layout.part((0,))), in_shares(DataParallel(), profile, layout)
    left = one.step_seconds / (1 + TIE) - (two.step_seconds - two.terms["communicating"])
    return profile.parameter_bytes / (left - 2 * 5e-5)


def test_the_bandwidth_at_which_the_answer_changes_is_found() -> None:
    profile, cluster = network(), hosts()
    found = search(profile, cluster, strategies=["single_device", "data_parallel"])
    model = WhatIf(found, found[0], profile, cluster)
    (crossing,) = (c for c in crossings(model) if c.kind == "ethernet")
    assert crossing.bandwidth == pytest.approx(crossing_by_hand(profile, cluster), rel=0.01)
    assert (str(crossing.below.strategy), str(crossing.above.strategy)) == ("single_device", "data_parallel")
    gigabits = f"{crossing.bandwidth * 8 / 1e9:.3g} Gb/s"
    here = "(here 10 Gb/s); below, single_device on local(workers=1, threads=1)"
    assert (
        f"data_parallel on 2 workers of 2 hosts wins above {gigabits} of ethernet {here}"
        in planned(profile, cluster).sensitivities
    )


def test_a_crossing_above_todays_bandwidth_is_found_from_below() -> None:
    profile, cluster = network(), hosts(bandwidth=2e7)
    assert search(profile, cluster)[0].strategy == SingleDevice()
    wanted = crossing_by_hand(profile, cluster)
    (line,) = (x for x in planned(profile, cluster).sensitivities if "of ethernet" in x)
    assert re.match(r"\S+ on 2 workers of 2 hosts wins above ", line)
    at = float(re.search(r"above ([\d.]+) Gb/s", line)[1]) * 1e9 / 8  # type: ignore[index]
    assert at == pytest.approx(wanted, rel=0.01)


def test_other_batches_and_one_host_more_are_told_only_where_they_change_something() -> None:
    small = planned(network(flops=1.5e8), hosts())
    assert small.strategy == "single_device"
    (line,) = (x for x in small.sensitivities if x.startswith("with batch"))
    assert re.fullmatch(
        r"with batch (128|256) choose data_parallel on 2 workers of 2 hosts \([\d.]+ times as fast as single_.*\)", line
    )
    large = planned(network(flops=1e11), hosts())
    assert not [x for x in large.sensitivities if x.startswith("with batch")]
    assert [x for x in large.sensitivities if re.fullmatch(r"a third host helps \d+%: data_parallel on 3 .*", x)]
    tiny = planned(network(flops=1e6, weights=400_000_000), hosts())
    assert not [x for x in tiny.sensitivities if "host" in x]


def of_three(second: float, third: float) -> dict[str, Callable[..., Cost]]:
    """Prices: one device takes 1 s for 64 examples; data_parallel so long for any number, half of it to send; and one
    in stages so long, of which half is sent at 1 GB/s."""

    def lone(self: Strategy, profile: Profile, layout: Placement) -> Cost:
        return cost(
            profile.batch_size / 64 * (1.0 if str(self) == "single_device" else 1.02), examples=profile.batch_size
        )

    def shared(self: Strategy, profile: Profile, layout: Placement) -> Cost:
        if self != DataParallel():
            raise ValueError("no price here")
        return cost(second / 2, examples=profile.batch_size, communicating=second / 2)

    def staged(self: Strategy, profile: Profile, layout: Placement) -> Cost:
        sent = third / 2 * 1e9 / layout.cluster.joining(layout.devices).bandwidth
        return cost(third / 2, examples=profile.batch_size, communicating=sent)

    return {"single_device": lone, "data_parallel": shared, "layer_placement": staged}


@pytest.fixture
def priced_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Callable[..., Cost]]], None]:
    def put(prices: dict[str, Callable[..., Cost]]) -> None:
        for name in names("apportion.strategies"):
            monkeypatch.setattr(find(name, "apportion.strategies"), "cost", prices.get(name, no_price))

    return put


@pytest.mark.parametrize(("second", "told"), [(1.4, True), (1.85, False)], ids=["by far", "by less than it may be off"])
def test_another_batch_is_told_where_the_gain_is_larger_than_predictions_may_be_off(
    priced_as: Any, second: float, told: bool
) -> None:
    """Data_parallel takes as long for 128 as for 64: of 128 one device takes 2 s."""
    priced_as(of_three(second=second, third=9.0))
    lines = planned(replace(network(), examples=1000)).sensitivities
    assert (
        "with batch 128 choose data_parallel on local(workers=2, threads=1) (1.43 times as fast as single_device)"
        in lines
    ) == told
    assert not any("with batch 128" in line for line in lines) or told


def test_no_batch_is_named_that_is_larger_than_the_data_set(priced_as: Any) -> None:
    priced_as(of_three(second=1.4, third=9.0))
    assert any("with batch 128" in x for x in planned(replace(network(), examples=128)).sensitivities)
    assert not any("with batch" in x for x in planned(replace(network(), examples=127)).sensitivities)


def test_what_trials_taught_counts_at_another_batch_for_all_alike(priced_as: Any) -> None:
    """Data_parallel was measured at twice its price: what it sends, or computes, is as much off at another batch. And
    the ratio is to the one that was chosen, not to another value of the same strategy."""
    priced_as(of_three(second=1.4, third=9.0))
    found = search(network(), host(), strategies=["single_device", "data_parallel"])
    slow = [
        replace(p, tried=Measurement(step_seconds=s, low=s, high=s, steps=20))
        for p in found
        if p.cost is not None and (s := p.cost.step_seconds * (2.0 if p.layout.ranks > 1 else 1.0))
    ]
    assert any("with batch 128" in x for x in sensitivities(found, found[0], network(), host()))
    lines = make(slow, network(), host()).sensitivities
    assert not any("with batch 128" in x for x in lines)


def test_nothing_is_said_where_predictions_do_not_agree_with_trials(priced_as: Any) -> None:
    """By prediction data_parallel is twice as fast; the trial chose one device."""
    priced_as(of_three(second=0.5, third=9.0))
    found = search(network(), host())
    chosen = next(p for p in found if p.strategy == SingleDevice())
    assert sensitivities(found, chosen, network(), host()) == ()


@pytest.mark.parametrize("bandwidth", [2e7, 1e8, 2.6e8, 2.7e8, 2.75e8, 2.8e8, 2.9e8, 1.25e9])
def test_a_plan_does_not_contradict_itself_about_a_bandwidth(bandwidth: float) -> None:
    """Ties go to the simpler one: so they do at a crossing. What is said to win above it wins there, in a plan."""
    profile, cluster = network(), hosts(bandwidth=bandwidth)
    plan = planned(profile, cluster)
    model = WhatIf(plan.found, plan.chosen, profile, cluster)
    found = [c for c in crossings(model) if c.kind == "ethernet"]
    assert len(found) == 1
    for crossing in found:
        for factor, who in ((0.98, crossing.below), (1.02, crossing.above)):
            there = with_bandwidth(cluster, "ethernet", factor * crossing.bandwidth / bandwidth)
            assert planned(profile, there).strategy == str(who.strategy)
        ours = crossing.above if bandwidth > crossing.bandwidth else crossing.below
        assert str(ours.strategy) == plan.strategy


def test_a_winner_from_outside_of_the_short_list_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offered depends on the bandwidth: at ten times today's a pipeline of other micro-batches than here."""
    cluster = hosts(bandwidth=1.25e6)

    def offers(cls: Any, profile: Profile, layout: Placement) -> Iterator[Strategy]:
        if layout.ranks > 1:
            yield cls(microbatches=16 if layout.cluster.joining(layout.devices).bandwidth > 5e6 else 2)

    def in_turns(self: PipelineParallel, profile: Profile, layout: Placement) -> Cost:
        sent = 2e5 / layout.cluster.joining(layout.devices).bandwidth
        return cost(0.01 if self.microbatches == 16 else 1.0, communicating=sent)

    monkeypatch.setattr(PipelineParallel, "candidates", classmethod(offers))
    monkeypatch.setattr(PipelineParallel, "cost", in_turns)
    plan = planned(network(), cluster)
    assert plan.strategy == "single_device"
    (line,) = (x for x in plan.sensitivities if "of ethernet" in x)
    assert line.startswith("pipeline_parallel(microbatches=16) on 2 workers of 2 hosts wins above ")
    at = float(re.search(r"above ([\d.]+) Mb/s", line)[1]) * 1e6 / 8  # type: ignore[index]
    there = with_bandwidth(cluster, "ethernet", 1.02 * at / 1.25e6)
    assert planned(network(), there).strategy == "pipeline_parallel(microbatches=16)"


def test_of_many_layers_on_many_devices_the_few_best_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole search takes too long to be made again and again."""
    monkeypatch.setattr(sensitivity, "MOST_WORK", 0)
    profile, cluster = network(), hosts()
    found = search(profile, cluster)
    model = WhatIf(found, found[0], profile, cluster)
    assert model.narrow
    monkeypatch.setattr(sensitivity, "among", None)
    (crossing,) = (c for c in crossings(model) if c.kind == "ethernet")
    assert crossing.bandwidth == pytest.approx(crossing_by_hand(profile, cluster), rel=0.01)


def test_values_of_one_kind_that_are_as_good_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 5 MB/s another number of micro-batches is 2 % faster."""

    def offers(cls: Any, profile: Profile, layout: Placement) -> Iterator[Strategy]:
        if layout.ranks > 1:
            yield cls(microbatches=2)
            yield cls(microbatches=16)

    def in_turns(self: PipelineParallel, profile: Profile, layout: Placement) -> Cost:
        fast = layout.cluster.joining(layout.devices).bandwidth > 5e6
        return cost(0.001 * (0.98 if fast and self.microbatches == 16 else 1.0))

    monkeypatch.setattr(PipelineParallel, "candidates", classmethod(offers))
    monkeypatch.setattr(PipelineParallel, "cost", in_turns)
    plan = planned(network(), hosts(bandwidth=1.25e6))
    assert plan.strategy == "pipeline_parallel(microbatches=2)"
    assert not [x for x in plan.sensitivities if "of ethernet" in x]


def test_a_number_of_workers_that_was_asked_for_holds_elsewhere_too() -> None:
    lines = planned(network(flops=1e11), hosts(2, cores=2), workers=2).sensitivities
    assert not [x for x in lines if re.search(r"on (?!2 )\d+ workers|workers=(?!2)", x)]


def test_layouts_that_use_a_device_are_looked_at_alone() -> None:
    every = search(network(), hosts(3))
    found = search(network(), hosts(3), using=["c/cpu"])
    assert found
    assert {str(p) for p in found if p.cost} == {str(p) for p in every if p.cost and "c/cpu" in p.layout.devices}
    assert search(network(), hosts(65), using=["no such device"]) == ()


def test_what_was_measured_says_as_much_of_one_host_more() -> None:
    profile, cluster = network(flops=1e11), hosts()
    found = search(profile, cluster)
    slower = [
        replace(p, tried=Measurement(step_seconds=s, low=s, high=s, steps=20))
        for p in found
        if p.cost is not None and (s := 2 * p.cost.step_seconds)
    ]
    (line,) = (x for x in sensitivities(found, found[0], profile, cluster) if "host helps" in x)
    assert line in sensitivities(slower, slower[0], profile, cluster)


def test_a_second_host_says_what_network_it_is_thought_to_be_on() -> None:
    lines = planned(network(flops=1e11), host()).sensitivities
    assert any(
        re.match(r"a second host on 10 Gb/s Ethernet helps \d+%: data_parallel on 4 workers of 2", x) for x in lines
    )


def test_changed_machines_are_the_same_but_for_the_change() -> None:
    faster = with_bandwidth(hosts(), "ethernet", 4.0)
    assert faster.link("a/cpu", "b/cpu").bandwidth == 5e9
    assert faster.link("a/cpu", "a/cpu") == hosts().link("a/cpu", "a/cpu")
    moved = Moved(what="message", ranks=2, nbytes=1000, seconds=1.0 + 5e-5)
    noted = replace(hosts(), links=tuple(replace(x, measured=(moved,)) for x in hosts().links))
    assert with_bandwidth(noted, "ethernet", 2.0).links[-1].measured[0].seconds == pytest.approx(0.5 + 5e-5)
    three = one_host_more(hosts())
    assert len(three.hosts) == 3
    assert three.link("a/cpu", three.devices[-1].name).kind == "ethernet"
    assert three.link(three.devices[-1].name, three.devices[-1].name).kind == "memory"
    assert of_hosts(hosts(4), 1).link("a/cpu", "a/cpu").kind == "memory"
    assert len(of_hosts(hosts(2), 5).devices) == 5
    assert [x.hosts for x in (of_hosts(hosts(4), 1), of_hosts(hosts(4), 2))] == [("a",), ("a", "a+")]
    assert not one_host_more(replace(hosts(), measured=True)).measured
    more = one_gpu_more(gpus())
    assert more is not None
    assert more.link("a/gpu0", more.devices[-1].name).kind == "nvlink"
    assert (one_gpu_more(host()), one_gpu_more(hosts())) == (None, None)


def test_sums_that_were_measured_on_fewer_hosts_say_nothing_of_more() -> None:
    table = tuple(Moved(what="all_reduce", ranks=n, nbytes=1000, seconds=1.0) for n in (2, 4))
    table = (*table, Moved(what="message", ranks=2, nbytes=1000, seconds=1.0))
    noted = replace(hosts(), links=tuple(replace(x, measured=table) for x in hosts().links))
    for grown in (one_host_more(noted), of_hosts(noted, 3)):  # four ranks lay on two hosts
        across = grown.link(grown.devices[0].name, grown.devices[2].name)
        assert [(m.what, m.ranks) for m in across.measured] == [("all_reduce", 2), ("message", 2)]
        assert len(grown.link(grown.devices[2].name, grown.devices[2].name).measured) == 3


def test_another_batch_keeps_times_by_rows_and_scales_what_is_of_the_whole_batch() -> None:
    profile, device = network(), host().devices[0]
    twice = of_rows(profile, 128)
    assert twice.layers[0].activation_bytes == 2 * profile.layers[0].activation_bytes
    assert twice.network_seconds(device, rows=64) == profile.network_seconds(device, rows=64)


def test_two_clusters_side_by_side_say_how_many_hosts_match() -> None:
    profile = network(flops=1e11, weights=400_000)
    plan = planned(profile, gpus(1), against=hosts(2, cores=4))
    assert plan.matched is not None
    many = plan.matched.hosts
    assert many is not None
    enough = search(profile, of_hosts(hosts(2, cores=4), many))[0].seconds_per_example
    fewer = search(profile, of_hosts(hosts(2, cores=4), many - 1))[0].seconds_per_example
    assert enough <= plan.chosen.seconds_per_example < fewer
    assert plan.matched.text.endswith(f"times as long as here; {many} of those hosts match what is here")
    assert hosts_to_match(profile, hosts(2, bandwidth=1e3), plan.chosen.seconds_per_example) is None


# What to type


def test_the_commands_are_those_that_a_shell_understands() -> None:
    plan = planned(network(flops=1e11))
    ours, torchrun = commands("mine.py:workload", plan.chosen)
    assert ours is not None
    launcher = ["--launcher", "local(workers=2, threads=1)"]
    train = ["apportion", "train", "mine.py:workload", "--strategy", "data_parallel"]
    assert shlex.split(ours) == [*train, *launcher]
    *start, sh, flag, inner = shlex.split(torchrun)
    assert start[:2] == ["OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"]
    assert start[2:] == ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python"]
    assert (sh, flag) == ("sh", "-c")
    assert shlex.split(inner) == ["exec", "taskset", "-c", "$LOCAL_RANK", *train, "--launcher", "env"]


def test_several_hosts_are_started_by_torchrun_on_each() -> None:
    plan = planned(network(flops=1e11), hosts(2, cores=4))
    assert plan.launcher == "env"
    ours, torchrun = plan.commands
    assert ours is None
    assert "--nnodes=2 --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR" in torchrun
    assert "--nproc-per-node=4" in torchrun
    assert "FILE:NAME" in torchrun, "a profile has no address"


def test_workers_of_several_threads_get_as_many_cores_each() -> None:
    layout = Placement(cluster=host(4), devices=("a/cpu",) * 2, threads=2)
    value = PipelineParallel(stages=2, schedule="gpipe")
    _, torchrun = commands("m.py:w", Priced(strategy=value, layout=layout, cost=cost()))
    inner = shlex.split(torchrun)[-1]
    assert "taskset -c $((LOCAL_RANK * 2))-$((LOCAL_RANK * 2 + 1)) apportion" in inner
    assert str(value) in shlex.split(inner)


# The command


def test_of_one_process_and_another_no_number_of_workers_is_told() -> None:
    """The simpler of two single processes is not the one with fewer workers."""
    alone = Placement(cluster=host(), devices=("a/cpu",), threads=2)
    plain, fused = (SingleDevice(fused=fused) for fused in (False, True))
    tried = [
        Measurement(step_seconds=seconds, low=seconds * 0.95, high=seconds * 1.05, steps=20) for seconds in (1.0, 0.997)
    ]
    cost = Cost(examples=64, terms={"computing": 1.0}, memory={})
    first, second = (
        Priced(strategy=strategy, layout=alone, cost=cost, tried=measured)
        for strategy, measured in zip((plain, fused), tried, strict=True)
    )
    plan = make([first, second], network(), host(), chosen=first)
    assert plan.why[-1].endswith("within the uncertainty: the simpler one is taken")
    assert plan.reasons[1] == "as fast within the uncertainty (0.3% faster), and less simple"


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload is timed for a moment, where it does not matter how long its layers take."""
    monkeypatch.setitem(profile.__kwdefaults__, "seconds", 0.5)


@pytest.mark.processes
@pytest.mark.usefixtures("briefly")
@pytest.mark.thorough
def test_a_file_of_a_measured_cluster_is_not_thought_to_be_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was measured where it was saved: the layers are timed on this machine, under its own name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure_cluster.write_cached(replace(host(), measured=True), 1e9)
    another = host(32, model="a larger cpu")
    replace(another, measured=True).save(tmp_path / "server.json")
    with by_value(networks):
        workload = networks.workload(networks.perceptron, networks.tabular(16, 10), 16)
        plan = apportion.plan(workload, tmp_path / "server.json", workers=1, trial=False)
    assert plan.profile.device == "some cpu"
    assert plan.cluster.devices[0].model == "a larger cpu"


@pytest.mark.processes
@pytest.mark.usefixtures("briefly")
@pytest.mark.thorough
def test_a_cluster_that_was_measured_elsewhere_is_not_thought_to_be_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it when it is given as a value: nothing is tried on it, and the layers are timed on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure_cluster.write_cached(replace(host(), measured=True), 1e9)
    another = replace(host(32, model="a larger cpu"), measured=True)
    with by_value(networks):
        workload = networks.workload(networks.perceptron, networks.tabular(16, 10), 16)
        plan = apportion.plan(workload, another, workers=1)
        with pytest.raises(ValueError, match="which is elsewhere, there is none"):
            apportion.plan(workload, another, allow_approximate=True)
    assert plan.profile.device == "some cpu"
    assert all(p.tried is None for p in plan.found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With files of a profile and of clusters."""
    network(flops=1e11).save(tmp_path / "profile.json")
    host().save(tmp_path / "cluster.json")
    hosts().save(tmp_path / "hosts.json")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"name": "x"}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result


FILES = ("--network", "profile.json", "--cluster", "cluster.json")


def test_json_is_one_object_with_every_candidate(folder: Path) -> None:
    told = json.loads(called(*FILES, "--json").stdout)
    wanted = {"strategy", "launcher", "workers", "step_seconds", "exact"}
    assert wanted | {"candidates", "because", "sensitivities", "commands", "band"} <= told.keys()
    assert (told["strategy"], told["launcher"], told["workers"]) == ("data_parallel", "local(workers=2, threads=1)", 2)
    assert all(wanted | {"why"} <= c.keys() for c in told["candidates"])
    assert {key: told[key] for key in wanted} == {key: told["candidates"][0][key] for key in wanted}
    assert {c["strategy"] for c in told["candidates"]} >= set(names("apportion.strategies"))
    for c in told["candidates"]:
        assert (c["step_seconds"] is None) == (c["refused"] is not None)
        if c["step_seconds"] is not None:
            assert set(c["terms"]) == set(TERMS)
            assert sum(c["terms"].values()) == pytest.approx(c["predicted_step_seconds"])
    assert json.loads(json.dumps(told)) == told


def test_the_terminal_shows_the_table_the_reasons_and_what_to_type(folder: Path) -> None:
    text = called(*FILES).output
    head = "strategy and launcher step ms compute send bubble wait memory examples/s exact"
    assert head in " ".join(text.split())
    for part in ("data_parallel\n", "local(workers=2, threads=1)", "±10%", "why\n", "why not\n", "to run it\n"):
        assert part in re.sub(r" +\n", "\n", text) or part in text, part
    assert 'apportion train FILE:NAME --strategy data_parallel --launcher "local(workers=2, threads=1)"' in text
    assert "or under torchrun: OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 torchrun --standalone" in text
    assert "hogwild: hogwild is not for networks of 4 layers" in text
    assert max(map(len, text.partition("\nwhy\n")[0].splitlines())) <= 110


def test_the_parts_of_a_step_stand_beside_the_prediction_that_they_add_up_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was measured is another number: its parts are not known."""
    layout = Placement(cluster=host(), devices=("a/cpu",), threads=2)
    cost = Cost(examples=64, terms={"computing": 0.002, "communicating": 0.001}, memory={})
    tried = Measurement(step_seconds=0.007, low=0.006, high=0.008, steps=20)
    show_plan(make([Priced(strategy=SingleDevice(), layout=layout, cost=cost, tried=tried)], network(), host()))
    text = " ".join(capsys.readouterr().out.split())
    assert "step ms predicted compute send" in text
    assert "7* 3 2 1" in text
    assert "parts of that" in text


def test_a_cluster_of_the_catalogue_is_called_by_its_name(folder: Path) -> None:
    told = json.loads(called("--network", "profile.json", "--cluster", "2-cores", "--json").stdout)
    assert {c["launcher"] for c in told["candidates"]} >= {"local(workers=2, threads=1)"}


def test_the_commands_are_for_the_address_and_the_numbers_are_of_the_profile(folder: Path) -> None:
    assert called("mine.py:workload", *FILES).output.startswith("some network, batches of 64, on one host\n")
    told = json.loads(called("mine.py:workload", *FILES, "--json").stdout)
    assert told["workload"] == "some network"
    assert told["commands"]["apportion"].startswith("apportion train mine.py:workload --strategy ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "plan needs a workload (FILE:NAME), or --network: a profile"),
        (("--network", "profile.json"), "say which machines with --cluster"),
        (("--network", "nowhere.json", "--cluster", "cluster.json"), "there is no file nowhere.json"),
        (("--network", "profile.json", "--cluster", "nowhere.json"), "there is no file nowhere.json"),
        (("--network", "broken.json", "--cluster", "cluster.json"), "broken.json is not JSON"),
        (("--network", "profile.json", "--cluster", "broken.json"), "broken.json is not JSON"),
        (
            ("--network", "other.json", "--cluster", "cluster.json"),
            "other.json: this is not a profile: 'batch_size' and 'layers' and",
        ),
        (
            ("--network", "profile.json", "--cluster", "other.json"),
            "other.json: this is not a cluster: 'devices' is missing",
        ),
        (("--network", "profile.json", "--cluster", "4-hosts-10gbits"), "did you mean '4-hosts-10gbit'?"),
        (("nowhere.py:workload",), "there is no file nowhere.py"),
        ((*FILES, "--remeasure"), "nothing is measured or tried with it"),
        ((*FILES, "--allow-approximate"), "nothing is measured or tried with it"),
        ((f"{__file__}:x", "--cluster", "2-cores", "--allow-approximate"), "which is elsewhere, there is none"),
        ((*FILES, "--workers", "3"), "cluster one host has no place for them"),
        ((*FILES, "--out", "nowhere/plan.html"), "the folder nowhere for plan.html does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_use_exits_with_2_and_says_what_is_right(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in " ".join(called(*arguments, status=2).output.split())


# The page


@pytest.mark.thorough
def test_the_page_has_the_bars_the_step_the_reasons_and_the_commands(folder: Path) -> None:
    called(*FILES, "--out", "plan.html")
    text = (folder / "plan.html").read_text()
    assert text.count('aria-label="milliseconds for one batch') == 2, "for a desk and for a telephone"
    assert "hogwild is not for networks of 4 layers" in text
    assert "apportion train FILE:NAME" in text
    assert "http://" not in re.sub(r'xmlns\S*="[^"]*"', "", text)
    assert "One step" not in text, "data_parallel has no timeline here"


@pytest.mark.thorough
def test_the_page_draws_what_was_measured_and_the_step_of_a_pipeline(tmp_path: Path) -> None:
    layout = Placement(cluster=host(), devices=("a/cpu",) * 2)
    tried = Measurement(step_seconds=1.0, low=0.9, high=1.1, steps=20)
    made = in_stages(PipelineParallel(), network(), layout)
    plan = make([Priced(strategy=PipelineParallel(), layout=layout, cost=made, tried=tried)], network(), host())
    path = write_plan_html(plan.to_json(), tmp_path / "plan.html")
    text = path.read_text()
    assert "One step" in text
    assert ">measured</span>" in text
    assert 'aria-label="one step by device and link"' in text


def test_what_a_text_in_a_plan_holds_is_no_html(tmp_path: Path) -> None:
    plan = planned(replace(network(), name="<script>alert(1)</script>"))
    assert "<script>" not in write_plan_html(plan.to_json(), tmp_path / "plan.html").read_text()


def test_without_matplotlib_the_page_holds_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apportion.reporting.html.charts",):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(sys.modules["apportion.reporting.html"], "charts", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = write_plan_html(planned().to_json(), tmp_path / "plan.html").read_text()
    assert "<svg" not in text
    assert "<details open><summary>All in numbers" in text
