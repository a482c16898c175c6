"""Profiles as data: what is between measured points, what crosses a cut, and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apportion.cost_model.cluster import Device, Rate
from apportion.cost_model.profile import LayerProfile, Pass, Profile, Timing, interpolated

RATES = (
    Rate(threads=1, together=1, flops=1e9, bytes_per_second=1e9),
    Rate(threads=1, together=2, flops=5e8, bytes_per_second=5e8),
)
HERE = Device(name="a/cpu", host="a", kind="cpu", model="here", memory_bytes=1 << 30, rates=RATES, cores=2)
ELSEWHERE = replace(HERE, model="elsewhere", call_seconds=0.0)


def layer(name: str, *inputs: str, nbytes: int = 100, timings: tuple[Timing, ...] = ()) -> LayerProfile:
    return LayerProfile(
        name=name, kind="Linear", inputs=inputs, parameter_bytes=1000, activation_bytes=nbytes, kept_bytes=nbytes,
        flops=1e6, timings=timings,
    )  # fmt: skip


def timing(rows: float, forward: float, way: str = "", share: float = 1.0) -> Timing:
    return Timing(rows=rows, way=way, share=share, forward=forward, backward=2 * forward)


def profile(*layers: LayerProfile, passes: tuple[Pass, ...] = ()) -> Profile:
    return Profile(name="net", batch_size=100, layers=layers, device="here", passes=passes)


def test_between_two_points_the_time_is_on_their_line() -> None:
    points = [(100.0, 10.0), (10.0, 4.0), (50.0, 5.0)]
    assert interpolated(points, 10) == 4.0
    assert interpolated(points, 30) == pytest.approx(4.5)
    assert interpolated(points, 75) == pytest.approx(7.5)


def test_beyond_the_points_the_last_line_goes_on_and_does_not_fall() -> None:
    assert interpolated([(10.0, 1.0), (20.0, 3.0)], 30) == pytest.approx(5.0)
    assert interpolated([(10.0, 3.0), (20.0, 1.0)], 30) == 1.0  # more rows are never faster than the most measured
    assert interpolated([(10.0, 1.0), (20.0, 3.0)], 5) == pytest.approx(0.5)  # not on the line, which is at 0 there


def test_one_point_is_scaled() -> None:
    assert interpolated([(10.0, 2.0)], 25) == pytest.approx(5.0)


def test_of_two_points_at_the_same_place_one_counts() -> None:
    assert interpolated([(10.0, 2.0), (10.0, 2.2), (20.0, 4.0)], 10) in (2.0, 2.2)
    assert interpolated([(10.0, 2.0), (10.0, 2.0)], 20) == pytest.approx(4.0)


def test_a_skip_connection_crosses_every_cut_that_it_spans() -> None:
    net = profile(
        layer("a", "input/x", nbytes=1),
        layer("b", "a", nbytes=10),
        layer("c", "b", nbytes=100),
        layer("add", "c", "a", nbytes=1000),
        layer("d", "add", nbytes=10_000),
    )
    assert net.crossing_bytes == (0, 1, 11, 101, 1000)


def test_what_was_timed_is_taken_as_it_is() -> None:
    table = (timing(100, 8.0), timing(10, 1.0), timing(100, 5.0, "units", 0.5))
    net = profile(layer("a", timings=table))
    assert net.layer_seconds(net.layers[0], HERE, rows=100) == (8.0, 16.0)
    assert net.layer_seconds(net.layers[0], HERE, rows=100, way="units", share=0.5) == (5.0, 10.0)
    assert net.layer_seconds(net.layers[0], HERE, rows=0) == (0.0, 0.0)


def test_a_share_that_was_not_timed_lies_between_those_that_were() -> None:
    table = (timing(100, 8.0), timing(100, 5.0, "units", 0.5))
    net = profile(layer("a", timings=table))
    found = net.layer_seconds(net.layers[0], HERE, rows=100, way="units", share=0.75)
    assert found.forward == pytest.approx(6.5)
    assert net.layer_seconds(net.layers[0], HERE, rows=100, way="height", share=0.5).forward == 4.0  # in proportion


def test_a_layout_that_was_not_timed_is_scaled_by_what_the_device_reaches() -> None:
    net = profile(layer("a", timings=(timing(100, 8.0),)))
    assert net.layer_seconds(net.layers[0], HERE, rows=100, together=2).forward == pytest.approx(16.0)


def test_another_device_is_worked_out_from_its_rates() -> None:
    net = profile(layer("a", nbytes=0, timings=(timing(100, 8.0),)))
    assert net.layer_seconds(net.layers[0], ELSEWHERE, rows=50).forward == pytest.approx(5e-4)
    assert net.layer_seconds(net.layers[0], ELSEWHERE, rows=50).backward == pytest.approx(1e-3)


def test_the_network_takes_what_its_passes_took_and_else_what_its_layers_do() -> None:
    a_pass = Pass(rows=100, forward=1.0, backward=3.0, update=0.5, fused_update=0.25)
    bare = profile(layer("a", timings=(timing(100, 8.0),)))
    assert bare.network_seconds(HERE, rows=100) == (8.0, 16.0)
    net = replace(bare, passes=(a_pass,))
    assert net.network_seconds(HERE, rows=100) == (1.0, 3.0)
    assert net.network_seconds(HERE, rows=100, together=2) == pytest.approx((16.0, 32.0))


def test_an_update_is_the_workloads_own_or_fused() -> None:
    a_pass = Pass(rows=100, forward=1.0, backward=3.0, update=0.5, fused_update=0.25)
    net = profile(layer("a"), passes=(a_pass,))
    assert net.update_seconds(HERE) == 0.5
    assert net.update_seconds(HERE, fused=True) == 0.25
    assert net.update_seconds(HERE, nbytes=500) == 0.25
    same = replace(net, passes=(replace(a_pass, fused_update=None),))
    assert same.update_seconds(HERE, fused=True) == 0.5


def test_a_profile_is_the_same_from_its_file(tmp_path: Path) -> None:
    stack = replace(layer("lstm", timings=(timing(100, 8.0),)), ways=("units", "chunk"), stack=2, image=(32, 3, 1))
    net = profile(stack, passes=(Pass(rows=100, forward=1.0, backward=3.0, update=0.5),))
    net.save(tmp_path / "net.json")
    assert Profile.load(tmp_path / "net.json") == net


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has no layers"):
        profile()
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_json({"name": "net"})
    (tmp_path / "net.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Profile.load(tmp_path / "net.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.update(format=2), "unknown field 'format'"),
        (lambda p: p.update(batch_size=0), "batch_size=0: a batch has at least one example"),
        (lambda p: p.update(batch_size="64"), "batch_size='64': a whole number is wanted"),
        (lambda p: p["layers"][0].update(zip=1), "layers[0]: unknown field 'zip'"),
        (lambda p: p["layers"][0].update(flops=None), "layers[0].flops=None: a number is wanted"),
        (lambda p: p["layers"][0].update(parameter_bytes=-5), "parameter_bytes=-5 is below 0"),
        (lambda p: p["layers"][0].update(inputs="x"), "layers[0].inputs='x': a list is wanted"),
        (lambda p: p["layers"][0].update(image=[3, 1]), "layers[0].image=[3, 1]: a list of 3 is wanted"),
        (lambda p: p["layers"][0]["timings"][0].update(rows=0), "rows=0"),
    ],
)
def test_what_is_wrong_in_a_profile_is_named_with_its_place(change: Any, said: str) -> None:
    data = json.loads(json.dumps(profile(layer("a", "x", timings=(timing(100, 8.0),))).to_json()))
    change(data)
    with pytest.raises(ValueError, match=re.escape(said)):
        Profile.from_json(data)
