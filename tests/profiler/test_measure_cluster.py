"""The machine that the tests run on, discovered and measured with real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

from apportion.comm.world import World
from apportion.cost_model.cluster import Cluster
from apportion.process import usable_cores
from apportion.profiler import discover, measure_cluster, samples
from apportion.profiler.cluster_worker import LEAST, SIZES, HardwareBenchmark, undisturbed
from apportion.profiler.launched_cluster import measure_here

pytestmark = pytest.mark.processes

TINY = 0.4
"""Seconds of measuring: each number from a few samples."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def measured(cache: Path) -> Cluster:
    return measure_cluster.measure(seconds=TINY, cache=cache)


# What there is


def test_discovering_tells_what_this_process_may_use() -> None:
    found = discover.discover()
    device = found.devices[0]
    assert not found.measured
    assert (device.kind, device.cores, device.host) == ("cpu", usable_cores(), "local")
    assert device.model == f"{discover.cpu_model()}, {usable_cores()} cores"
    assert 0 < device.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert sum(map(len, discover.numa_nodes())) == len(os.sched_getaffinity(0))
    assert Cluster.from_json(found.to_json()) == found


def test_two_gpus_are_joined_by_the_fewest_nvlinks_of_any_two() -> None:
    table = "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\t{}\t0-7\nGPU1\tNV12\t X \tNV6\t0-7\n"
    table += "GPU2\t{}\tNV6\t X \t8-15\n\nLegend:\n  X    = Self\n"
    assert discover.fewest_nvlinks(table.format("NV4", "NV4")) == 4
    assert discover.fewest_nvlinks(table.format("SYS", "SYS")) == 0
    assert discover.fewest_nvlinks("") == 0


# What it reaches


@pytest.mark.thorough
def test_every_layout_worth_a_look_is_measured(measured: Cluster) -> None:
    assert measured.measured
    device = next(d for d in measured.devices if d.kind == "cpu")
    chosen = measure_cluster.places(measured)
    on_cpu = {(place.threads, place.workers) for place in chosen if place.kind == "cpu"}
    assert {(r.threads, r.together) for r in device.rates} == on_cpu
    assert (usable_cores(), 1) in on_cpu
    for rate in device.rates:
        # Between a very slow core and one that does not exist.
        assert 1e8 < rate.flops < 1e12 * rate.threads
        assert 1e8 < rate.bytes_per_second < 1e12
    assert 1e-7 < device.call_seconds < 1e-2
    assert 0.0 <= device.spread < 2.0
    assert measured.devices[0].model == discover.discover().devices[0].model


@pytest.mark.skipif(usable_cores() < 2, reason="one core: nobody to tell anything")
def test_every_number_of_ranks_has_its_table(measured: Cluster) -> None:
    link = measured.link("local/cpu", "local/cpu")
    sizes = {(m.what, m.ranks): [] for m in link.measured}
    for moved in link.measured:
        assert moved.seconds > 0.0
        sizes[moved.what, moved.ranks].append(moved.nbytes)
    workers = {place.workers for place in measure_cluster.places(measured) if place.workers > 1}
    assert set(sizes) == {("message", 2)} | {("all_reduce", many) for many in workers}
    for known in sizes.values():
        assert known == list(SIZES[: len(known)])
        assert len(known) >= LEAST
    assert link.latency > 0.0
    assert 1e6 < link.bandwidth < 1e13
    assert 0.0 <= link.hidden <= 1.0
    assert link.slowdown >= 0.0


# The cache


def test_what_was_measured_is_not_measured_again(measured: Cluster, cache: Path) -> None:
    assert measure_cluster.measure(seconds=TINY, cache=cache) == measured
    assert measure_cluster.read_cached(TINY, cache) == measured
    assert measure_cluster.read_cached(2 * TINY, cache) is None, "less time than is asked for"


def test_a_cache_of_another_machine_or_none_is_left_alone(
    measured: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_cluster.read_cached(TINY, tmp_path) is None
    measure_cluster.write_cached(measured, TINY, tmp_path)
    (file,) = tmp_path.iterdir()
    assert measure_cluster.read_cached(TINY, tmp_path) == measured
    data = json.loads(file.read_text())
    for broken in ("", "{", "[]", "{}", json.dumps({**data, "cluster": {}}), json.dumps({**data, "fingerprint": {}})):
        file.write_text(broken)
        assert measure_cluster.read_cached(TINY, tmp_path) is None
    monkeypatch.setattr(measure_cluster, "usable_cores", lambda: 77)
    measure_cluster.write_cached(measured, TINY, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_error(measured: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    measure_cluster.write_cached(measured, TINY, tmp_path / "file")
    assert measure_cluster.read_cached(TINY, tmp_path / "file") is None


def test_what_cannot_be_kept_whole_leaves_nothing(measured: Cluster, tmp_path: Path) -> None:
    measure_cluster.write_cached(measured, TINY, tmp_path)
    (kept_in,) = tmp_path.iterdir()
    kept_in.unlink()
    kept_in.mkdir()  # nothing can be put in its place
    measure_cluster.write_cached(measured, TINY, tmp_path)
    assert list(tmp_path.iterdir()) == [kept_in]


def test_the_cache_is_where_the_system_wants_caches(
    measured: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    measure_cluster.write_cached(measured, TINY)
    assert len(list((tmp_path / "caches" / "apportion" / "clusters").iterdir())) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert measure_cluster.read_cached(TINY) is None
    measure_cluster.write_cached(measured, TINY)
    assert len(list((tmp_path / "home" / ".cache" / "apportion" / "clusters").iterdir())) == 1


@pytest.mark.thorough
def test_measuring_anew_replaces_what_was_kept(measured: Cluster, tmp_path: Path) -> None:
    made_up = Cluster.from_json({**measured.to_json(), "name": "made up"})
    measure_cluster.write_cached(made_up, TINY, tmp_path)
    assert measure_cluster.measure(seconds=TINY, cache=tmp_path).name == "made up"
    again = measure_cluster.measure(seconds=TINY, cache=tmp_path, remeasure=True)
    assert again.name == "local"
    assert measure_cluster.read_cached(TINY, tmp_path) == again


def test_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seconds=0\.0 must be positive"):
        measure_cluster.measure(seconds=0.0)
    with pytest.raises(ValueError, match="seconds=-1"):
        measure_here(World(), seconds=-1)


@pytest.mark.thorough
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """The leak check of every test looks for what is left."""
    code = "import sys; from pathlib import Path; from apportion.profiler.measure_cluster import measure;"
    code += "print('begun', flush=True); measure(seconds=60.0, cache=Path(sys.argv[1]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        deadline = time.monotonic() + 60.0
        while not _descendants(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert list(tmp_path.iterdir()) == []


def _descendants(pid: int) -> int:
    """Workers: children of the template, which is the process's child."""
    import psutil

    try:
        return sum(len(child.children()) for child in psutil.Process(pid).children())
    except psutil.Error:
        return 0


# Ranks that run already


def here(world: World) -> Any:
    return measure_here(world, seconds=TINY).to_json()


@pytest.mark.thorough
def test_ranks_that_run_already_measure_their_machine() -> None:
    first, second = (Cluster.from_json(data) for data in on_ranks(here, 2))
    assert first == second
    assert first.measured
    (device,) = first.devices
    assert {(1, 1), (1, 2), (usable_cores(), 1)} == {(r.threads, r.together) for r in device.rates}
    link = first.link(device.name, device.name)
    assert {m.ranks for m in link.measured} == {2}
    assert {m.what for m in link.measured} == {"message", "all_reduce"}


def test_one_sample_that_was_held_up_does_not_end_the_growth_of_what_is_sent() -> None:
    """A cable of 1 GB/s, on which one sample of three took a second."""
    gauge = HardwareBenchmark(World())
    found = gauge._growing(lambda nbytes, _: [nbytes / 1e9, 1.0, nbytes / 1e9], 0.3)
    assert [nbytes for nbytes, _ in found] == [n for n in SIZES if n <= 16 << 20], "100 MiB would take too long"


# What samples come to


def test_what_stands_apart_is_left_out() -> None:
    assert samples.kept([1.0, 1.1, 0.9, 1.0, 9.0]) == [1.0, 1.1, 0.9, 1.0]
    assert samples.kept([2.0, 2.0, 2.0, 5.0]) == [2.0, 2.0, 2.0]
    assert samples.typical([[1.0, 1.1, 50.0], [1.2, 1.0, 1.1], [40.0, 50.0, 60.0], [1.1]]) == pytest.approx(1.1)
    assert samples.spread([[1.0, 1.0, 1.0]]) == 0.0
    assert samples.spread([[0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 30.0]]) == pytest.approx(0.0816, abs=1e-3)


def test_samples_without_a_core_are_left_out() -> None:
    assert undisturbed([(1.0, 0.0), (5.0, 0.8), (1.1, 0.01), (1.2, 0.0)]) == [1.0, 1.1, 1.2]
    assert undisturbed([(9.0, 0.9), (5.0, 0.8), (1.1, 0.5), (1.2, 0.4)]) == [1.2, 1.1, 5.0]


def test_a_line_is_found_through_an_outlier() -> None:
    points = {n: 2e-4 + n / 1e9 for n in SIZES}
    points[SIZES[-2]] *= 3
    latency, bandwidth = samples.line(points)
    assert latency == pytest.approx(2e-4, rel=0.1)
    assert bandwidth == pytest.approx(1e9, rel=0.1)
    assert samples.line({1024: 1e-5}) == (pytest.approx(1e-6), pytest.approx(1.024e8))


def test_hiding_is_told_from_what_is_waited_for() -> None:
    """[the sum alone, the computing alone, begun, computing, waited for]"""
    assert samples.hiding([[1.0, 2.0, 1.0, 2.0, 0.0]] * 3) == (0.0, 0.0)  # the sum is done before computing begins
    assert samples.hiding([[1.0, 2.0, 0.0, 2.0, 0.0]] * 3) == (1.0, 0.0)
    hidden, slower = samples.hiding([[1.0, 2.0, 0.1, 2.4, 0.1]] * 3)
    assert (hidden, slower) == (pytest.approx(0.8), pytest.approx(0.5))


def test_a_bandwidth_is_everyones_where_transfers_take_turns() -> None:
    assert samples.whose(1.0, 2.0, 2) == "all"
    assert samples.whose(1.0, 1.1, 2) == "device"
