"""Times by hand: of layers and updates that were not measured, of shares, and of the ranks that a device is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apportion.cost_model.cluster import Cluster, Device, Link, Placement, Rate, layouts
from apportion.cost_model.cost import activations, of_replica, parts_that_fit
from apportion.cost_model.profile import LayerProfile, Pass, Profile, Timing

RATES = (
    Rate(threads=1, together=1, flops=1e9, bytes_per_second=1e9),
    Rate(threads=1, together=4, flops=5e8, bytes_per_second=2.5e8),
)
HERE = Device(name="a/cpu", host="a", kind="cpu", model="here", memory_bytes=1 << 30, rates=RATES, cores=4)
ELSEWHERE = replace(HERE, model="elsewhere", call_seconds=0.0)
GPU = replace(ELSEWHERE, kind="cuda", cores=1)


def layer(name: str = "a", **facts: object) -> LayerProfile:
    """1 MB of weights, 10 MB of outputs, of a batch of 100."""
    given = {"parameter_bytes": 10**6, "activation_bytes": 10**7, "kept_bytes": 4 * 10**6, "flops": 0.0, **facts}
    return LayerProfile(name=name, kind="Conv2d", inputs=("x",), **given)  # type: ignore[arg-type]


def profile(*layers: LayerProfile, **facts: object) -> Profile:
    return Profile(name="net", batch_size=100, layers=layers or (layer(),), device="here", **facts)  # type: ignore[arg-type]


def timing(forward: float, **facts: object) -> Timing:
    return Timing(**{"rows": 100, "forward": forward, "backward": 2 * forward, **facts})  # type: ignore[arg-type]


# Worked out from rates


def test_a_layer_reads_and_writes_its_outputs_and_reads_its_weights_or_computes_if_that_takes_longer() -> None:
    """Of half the batch: 2 x 5 MB and 1 MB at 1 GB/s. Twice that backward."""
    net = profile()
    assert net.layer_seconds(net.layers[0], ELSEWHERE, rows=50) == pytest.approx((0.011, 0.022))
    assert net.layer_seconds(net.layers[0], ELSEWHERE, rows=50, share=0.5) == pytest.approx((0.0055, 0.011))
    long = profile(layer(flops=1e8))
    assert long.layer_seconds(long.layers[0], ELSEWHERE, rows=50) == pytest.approx((0.05, 0.1))
    assert long.layer_seconds(long.layers[0], ELSEWHERE, rows=50, share=0.5) == pytest.approx((0.025, 0.05))


def test_a_core_begins_each_call_itself_and_a_gpus_host_does_so_meanwhile() -> None:
    net = profile()
    core, slow_core = replace(ELSEWHERE, call_seconds=0.001), replace(GPU, call_seconds=0.001)
    assert net.layer_seconds(net.layers[0], core, rows=50) == pytest.approx((0.012, 0.024))
    assert net.layer_seconds(net.layers[0], slow_core, rows=50) == pytest.approx((0.011, 0.022))
    host_bound = replace(GPU, call_seconds=0.02)
    assert net.layer_seconds(net.layers[0], host_bound, rows=50) == pytest.approx((0.02, 0.04))


@pytest.mark.parametrize(("slots", "times"), [(0, 3), (1, 5), (2, 7)])
def test_an_update_moves_weights_twice_gradients_once_and_slots_twice(slots: int, times: int) -> None:
    net = profile(slots=slots)
    assert net.update_seconds(ELSEWHERE) == pytest.approx(times * 0.001)
    slow = replace(ELSEWHERE, call_seconds=0.5)
    assert net.update_seconds(slow, nbytes=500_000) == pytest.approx(times * 0.0005 + 0.5)


# Measured


def test_whole_passes_are_of_the_device_and_the_layout_that_they_were_timed_on() -> None:
    passes = tuple(
        Pass(rows=rows, together=together, forward=rows / 100 + 0.5, backward=1.0, update=update)
        for rows, together, update in ((100, 1, 0.5), (50, 1, 0.4), (100, 4, 9.0))
    )
    net = profile(passes=passes)
    assert net.network_seconds(HERE, rows=100).forward == 1.5
    assert net.network_seconds(HERE, rows=0) == (0.0, 0.0)
    assert net.update_seconds(HERE) == 0.4, "weights are as many however many rows there are"
    assert net.update_seconds(HERE, together=4) == 9.0
    assert net.network_seconds(ELSEWHERE, rows=50) == pytest.approx((0.011, 0.022))
    assert net.update_seconds(ELSEWHERE) == pytest.approx(0.005)


def test_the_nearest_share_that_was_timed_and_the_nearest_layout_count() -> None:
    shares = (timing(8.0), timing(5.0, way="units", share=0.5), timing(1.0, way="units", share=0.25))
    net = profile(layer(timings=shares))
    assert net.layer_seconds(net.layers[0], HERE, rows=100, way="units", share=0.75).forward == pytest.approx(6.5)
    together = (timing(8.0), timing(20.0, together=4))
    net = profile(layer(timings=together))
    # Four threads at once were timed, in four workers: two of two threads share out the same 2 GFLOP/s.
    assert net.layer_seconds(net.layers[0], HERE, rows=100, threads=2, together=2).forward == pytest.approx(10.0)


def test_a_layout_that_was_not_measured_has_its_part_of_what_all_workers_reached() -> None:
    """Four workers reach 2 GFLOP/s and 1 GB/s together."""
    four = replace(HERE, rates=RATES[1:])
    assert four.rate(2, 2) == Rate(threads=2, together=2, flops=1e9, bytes_per_second=5e8)
    assert four.rate(1, 2) == Rate(threads=1, together=2, flops=5e8, bytes_per_second=2.5e8)


def test_a_latency_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"latency=-1e-05, .*its latency not negative"):
        Link(kind="memory", devices=("a/cpu",), latency=-1e-5, bandwidth=1e9)


# Where ranks sit


def cluster(*devices: Device) -> Cluster:
    names = tuple(d.name for d in devices)
    return Cluster(name="c", devices=devices, links=(Link(kind="net", devices=names, latency=0.0, bandwidth=1e9),))


def at(host: str, like: Device = HERE, **changed: object) -> Device:
    return replace(like, name=f"{host}/{like.kind}", host=host, **changed)  # type: ignore[arg-type]


def test_layouts_share_out_cores_in_powers_of_two_and_all_of_them() -> None:
    six = cluster(at("a", cores=6), at("b", cores=6))
    found = {(len(set(x.devices)), x.ranks, x.threads) for x in layouts(six)}
    one, both = {(1, 1, 6), (1, 1, 1), (1, 2, 3), (1, 4, 1), (1, 6, 1)}, {(2, 2, 6), (2, 4, 3), (2, 8, 1), (2, 12, 1)}
    assert found == one | both
    assert max(x.ranks for x in layouts(six, most=8)) == 8


def test_each_make_of_device_is_looked_at_alone_and_gpus_have_a_rank_each() -> None:
    gpus = [replace(GPU, name=f"a/gpu{i}") for i in range(3)]
    found = {(x.devices, x.threads) for x in layouts(cluster(at("a"), *gpus))}
    assert found == {
        (("a/cpu",), 4), (("a/cpu",), 1), (("a/gpu0",), 1), (("a/gpu0", "a/gpu1"), 1),
        (("a/gpu0", "a/gpu1", "a/gpu2"), 1),
    }  # fmt: skip


def test_ranks_of_other_groups_use_cores_too() -> None:
    whole = Placement(cluster=cluster(at("a")), devices=("a/cpu",) * 4)
    part = whole.part((0, 1)).part((0,))
    assert (part.ranks, part.together(0)) == (1, 4)
    with pytest.raises(ValueError, match=r"4 workers of 2 threads on the 4 cores of a/cpu: .*use threads<=1"):
        replace(part, threads=2)


def test_places_are_alike_where_the_make_the_cores_and_the_company_are() -> None:
    machines = cluster(at("a"), at("b"), at("c", cores=8), at("d", model="other"))
    layout = Placement(cluster=machines, devices=("a/cpu", "b/cpu", "b/cpu", "c/cpu", "d/cpu"))
    assert layout.kinds == (0, 1, 3, 4)


# Memory


def test_a_replica_holds_what_its_layers_keep_and_the_largest_output_with_its_gradient() -> None:
    """Of half the batch: (4 + 1 MB + 2 x 10 MB) / 2."""
    net = profile(layer(), layer("b", kept_bytes=10**6, activation_bytes=100), slots=2, buffer_bytes=7)
    assert activations(net, 50) == pytest.approx(12.5e6)
    assert of_replica(net, 50) == pytest.approx(
        {"weights": 2e6, "gradients": 2e6, "slots": 4e6, "buffers": 14.0, "activations": 12.5e6}
    )


def test_a_batch_is_cut_into_as_many_parts_as_memory_asks_for_and_never_where_it_must_not_be() -> None:
    """24 MB of activations and 3 MB of weights, gradients and slots; two workers with 50 rows each."""
    net = profile()

    def parts(nbytes: float, net: Profile = net) -> int:
        small = cluster(at("a", memory_bytes=int(nbytes)))
        return parts_that_fit(net, Placement(cluster=small, devices=("a/cpu", "a/cpu")))

    assert [parts(n) for n in (30.1e6, 29.9e6, 18.1e6, 17.9e6, 12.1e6, 5e6)] == [1, 2, 2, 4, 4, 1]
    for fact in ({"batch_norm": True}, {"own_update": True}, {"cut_by_rows": False}):
        assert parts(18.1e6, replace(net, **fact)) == 1
