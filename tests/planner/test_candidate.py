"""What a plan looks at, and which of two is better, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from by_hand import GB, ROWS, chain, conv, machine, network

from apportion.api.plan import _profiled
from apportion.core.strategy import Strategy
from apportion.cost_model.cluster import Cluster, Placement
from apportion.cost_model.cost import Cost
from apportion.cost_model.rollouts import RolloutTimes
from apportion.planner.candidate import MEASURED_BAND, TIE, Measurement, Priced, folded, misfit, ranked, tied
from apportion.planner.search import group_sizes, places_of, search
from apportion.planner.units import gibibytes
from apportion.profiler import measure_workload
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local
from apportion.strategies.conv_parallel import ConvParallel
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.parameter_server import ParameterServer
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.single_device import SingleDevice
from apportion.strategies.tensor_parallel import TensorParallel

COMPOSITE = DataParallel(of=PipelineParallel(), replicas=2)


def row(strategy: Strategy, seconds: float = 1.0, layout: Placement | None = None, **changed: Any) -> Priced:
    cost = Cost(terms={"computing": seconds}, examples=ROWS, memory={"weights": GB})
    return Priced(**{"strategy": strategy, "layout": layout or machine(), "cost": cost, **changed})


def took(low: float, median: float, high: float, *, steps: int = 1) -> Measurement:
    return Measurement(step_seconds=median, low=low, high=high, steps=steps)


def refused(strategy: Strategy) -> Priced:
    return Priced(strategy=strategy, layout=machine(), refusal="no")


# Places


def at(cluster: Cluster, workers: int, threads: int | None = None) -> list[tuple[tuple[str, ...], int]]:
    return [(place.devices, place.threads) for place in places_of(cluster, workers, threads)]


def test_so_many_workers_share_the_cores_of_one_host_or_of_all_evenly() -> None:
    here, there = "h0/cpu0", "h1/cpu0"
    two = machine(4, hosts=2).cluster
    assert at(two, 2) == [((here, there), 4), ((here, here), 2), ((here, here), 1), ((here, there), 1)]
    assert at(two, 2, 3) == [((here, there), 3)], "two workers of three threads are too many for four cores"
    assert at(two, 3) == [((here,) * 3, 1)], "three are not dealt out to two hosts"
    assert at(two, 6) == [((here,) * 3 + (there,) * 3, 1)]
    assert {place.threads for place in places_of(two, threads=1)} == {1}


def with_cores() -> Cluster:
    """Two GPUs, and two cores of their host."""
    gpus = machine(2, kind="cuda").cluster
    return replace(gpus, devices=(*gpus.devices, *machine(2).cluster.devices))


def test_so_many_workers_have_a_gpu_each() -> None:
    two = machine(2, hosts=2, kind="cuda").cluster
    assert at(two, 2) == [(("h0/cuda0", "h0/cuda1"), 1), (("h0/cuda0", "h1/cuda0"), 1)]
    assert at(two, 4) == [(("h0/cuda0", "h0/cuda1", "h1/cuda0", "h1/cuda1"), 1)]
    assert at(with_cores(), 2) == [(("h0/cuda0", "h0/cuda1"), 1)]
    assert at(with_cores(), 3) == at(with_cores(), 4) == [], "no two workers on one, and none on the cores"


def test_workers_of_a_network_that_acts_may_be_on_the_cores_beside_the_gpus() -> None:
    two = with_cores()
    assert [(p.devices, p.threads) for p in places_of(two, 2, on_cores=True)] == [
        (("h0/cuda0", "h0/cuda1"), 1),
        (("h0/cpu0", "h0/cpu0"), 1),
    ]
    both = {p.devices for p in places_of(two, on_cores=True)}
    assert both - {p.devices for p in places_of(two)} == {("h0/cpu0", "h0/cpu0")}
    plain = chain(1.0, parameter_bytes=0)
    acts = replace(plain, rollouts=RolloutTimes(environments=8, steps=4, played=(), learned=()))
    with pytest.raises(ValueError, match="there are 2 cores, and never more threads than cores; use workers=2"):
        search(acts, two, workers=3)
    for profile, where in (plain, set()), (acts, {("h0/cpu0", "h0/cpu0")}):
        found = search(profile, two, workers=2, strategies=["hogwild"])
        assert {p.layout.devices for p in found if p.cost is not None} == where


def test_more_workers_than_gpus_are_profiled_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_workload, "profile", lambda workload, here, places, rollouts: places)
    for gpus, where in (1, {"h0/cpu0"}), (2, {"h0/cuda0", "h0/cuda1"}):
        here = machine(gpus, kind="cuda").cluster
        found: Any = _profiled(
            "mine.py:workload", replace(here, devices=(*here.devices, *machine(2).cluster.devices)), 2
        )
        assert {name for place in found for name in place.devices} == where
    with pytest.raises(ValueError, match=r"workers=3: cluster made has no place .*; use workers=2"):
        _profiled("mine.py:workload", with_cores(), 3)


def test_threads_are_as_many_as_the_smallest_device_has_cores_for() -> None:
    two = machine(4, hosts=2).cluster
    uneven = replace(two, devices=(two.devices[0], replace(two.devices[1], cores=2)))
    assert at(uneven, 2)[0] == (("h0/cpu0",) * 2, 2)
    assert (("h0/cpu0", "h1/cpu0"), 2) in at(uneven, 2)


def test_groups_share_the_ranks_evenly() -> None:
    assert group_sizes(machine(6)) == [2]
    assert group_sizes(machine(3, hosts=2)) == [2, 3]


def test_the_largest_layouts_come_first() -> None:
    found = [(place.ranks, place.threads) for place in places_of(machine(4).cluster)]
    assert found == [(4, 1), (2, 2), (1, 4), (1, 1)]


def test_what_offers_nothing_is_told_why() -> None:
    def told(strategy: str, cluster: Cluster, *layers: Any) -> str:
        (found,) = search(network(*layers), cluster, strategies=[strategy])
        return found.refusal

    (alone,) = chain(1.0).layers
    low = conv("c", "x", image=(4, 3, 1), ways=("height",))  # 4 rows are too few for windows of 3 on two ranks
    assert told("data_parallel", machine(1).cluster, alone) == "there is one device, which is one worker"
    assert told("conv_parallel", machine(2).cluster, low) == "", "it offers nothing, and has its plain price"
    assert "no convolution" in told("conv_parallel", machine(2).cluster, alone)


def test_values_are_priced_where_they_have_a_place() -> None:
    found = search(chain(1.0), machine(2).cluster, strategies=[DataParallel(), SingleDevice(), DataParallel()])
    assert sorted((str(p.strategy), p.layout.ranks, p.layout.threads) for p in found) == [
        ("data_parallel", 2, 1),
        ("single_device", 1, 1),
        ("single_device", 1, 2),
    ]
    apart = search(chain(1.0), machine(2, hosts=2).cluster, workers=2, threads=1, strategies=[DataParallel()])
    assert {len(p.layout.hosts) for p in apart} == {1, 2}, "on one host, and on two"


def test_what_is_offered_depends_on_what_there_is_to_divide_and_where() -> None:
    layout = machine(1, hosts=2)
    first, second = layout.cluster.devices
    mixed = replace(layout, cluster=replace(layout.cluster, devices=(first, replace(second, model="other"))))
    plain, compressed = chain(1.0), [DataParallel(compress="fp16"), DataParallel(compress="power_sgd")]
    assert list(DataParallel.candidates(plain, layout)) == [DataParallel(), *compressed]
    measured = DataParallel(shares="measured")
    assert list(DataParallel.candidates(plain, mixed)) == [DataParallel(), measured, *compressed]
    assert list(DataParallel.candidates(replace(plain, carries=True), mixed)) == [DataParallel(), *compressed]
    assert list(DataParallel.candidates(plain, machine(2))) == [DataParallel()]
    assert list(DataParallel.candidates(plain, machine(1, hosts=2, kind="cuda"))) == [DataParallel()]
    for rows, splits in ((8, ["channel"]), (16, ["height", "channel"])):
        images = network(conv("a", "x", image=(rows, 3, 1)), conv("b", "a"))
        assert [c.split for c in ConvParallel.candidates(images, machine())] == splits


# Which is better


def test_workers_take_batches_and_servers_do_not() -> None:
    three = row(ParameterServer(servers=1), layout=machine(3))
    assert (three.workers, three.launcher) == (2, Local(workers=2, threads=1))
    assert row(DataParallel(), layout=machine(3)).workers == 3


def test_who_starts_workers_is_told_of_the_cores_only_where_there_are_gpus_too() -> None:
    on_cores = Placement(cluster=with_cores(), devices=("h0/cpu0",) * 2)
    on_gpus = Placement(cluster=with_cores(), devices=("h0/cuda0", "h0/cuda1"))
    assert row(DataParallel(), layout=on_cores).launcher == Local(workers=2, threads=1, device="cpu")
    assert row(DataParallel(), layout=on_gpus).launcher == Local(workers=2, threads=1)
    assert row(DataParallel(), layout=machine(2)).launcher == Local(workers=2, threads=1)
    assert row(DataParallel(), layout=machine(1, hosts=2)).launcher == Env()


def test_a_step_takes_what_was_measured_else_what_was_learnt_else_what_was_predicted() -> None:
    assert (row(DataParallel(), 4.0).step_seconds, row(DataParallel(), 4.0).error) == (4.0, MEASURED_BAND)
    assert row(DataParallel(), 4.0, corrected=3.0).step_seconds == 3.0
    measured = row(DataParallel(), 4.0, corrected=3.0, tried=took(1.5, 2.0, 2.5))
    assert (measured.step_seconds, measured.error) == (2.0, 0.25), "half of the middle half"
    assert measured.seconds_per_example == 2.0 / ROWS
    with pytest.raises(AssertionError):
        took(1.1, 1.0, 1.2)


def test_measurements_are_one_where_their_spreads_meet_by_the_fewest_steps_of_either() -> None:
    def alike(wide: tuple[int, bool], narrow: tuple[int, bool]) -> bool:
        """1 s and 1.06 s, each of so many steps that are 0.1 s apart, or not at all."""
        first, second = (
            row(SingleDevice(), tried=took(at - 0.1 * apart, at, at + 0.1 * apart, steps=steps))
            for at, (steps, apart) in ((1.0, wide), (1.06, narrow))
        )
        return tied(first, second)

    assert alike((1, True), (1, False))
    assert alike((1, False), (1, True))
    assert not alike((1, False), (1, False))
    assert alike((4, True), (100, True)), "0.2 s by the root of 4"
    assert not alike((100, True), (100, True))
    assert alike((100, True), (1, True))
    predicted = row(SingleDevice(), 1.0)
    assert tied(predicted, row(SingleDevice(), 1.0 + 0.9 * TIE))
    assert not tied(predicted, row(SingleDevice(), 1.06, tried=took(0.1, 1.06, 9.0)))


def test_of_equals_the_fewest_ranks_come_first_then_the_fewest_hosts_then_what_is_no_composite() -> None:
    four, apart, two = machine(4), machine(2, hosts=2), machine(2)
    fastest = row(DataParallel(), 1.0, apart)
    for other in (row(DataParallel(), 1.01, two), row(DataParallel(), 1.01, four)):
        assert ranked([fastest, other])[0] is other
    plain, composite = row(DataParallel(), 1.01, four), row(COMPOSITE, 1.0, four)
    assert ranked([composite, plain])[0] is plain
    assert ranked([composite, row(DataParallel(), 1.05, four)])[0] is composite


def test_what_is_refused_stands_there_once_for_each_kind() -> None:
    some = [refused(s) for s in (DataParallel(microbatches=2), DataParallel(), COMPOSITE, TensorParallel())]
    assert folded(some) == [some[0], some[2], some[3]]
    able = row(DataParallel(), 1.0)
    assert folded([able, *some]) == [able, some[2], some[3]]


def test_memory_is_what_all_workers_of_a_device_need() -> None:
    cost = Cost(terms={"computing": 1.0}, examples=1, memory={"weights": 3 << 30})
    layout = machine(2)
    roomy, full = (
        replace(layout, cluster=replace(layout.cluster, devices=(replace(layout.cluster.devices[0], memory_bytes=n),)))
        for n in (6 << 30, (6 << 30) - 1)
    )
    assert misfit(cost, roomy) == ""
    assert misfit(cost, full) == "does not fit: needs 6 GiB (2 workers of 3 GiB) on h0/cpu0, which has 6 GiB"
    assert [gibibytes(n) for n in (2**29, 2**29 - 2**20, 12 << 20)] == ["512 MiB", "511 MiB", "12 MiB"]
