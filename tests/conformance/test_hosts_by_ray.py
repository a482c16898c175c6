"""Every strategy that runs on several hosts, proved by one command on the nodes of a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray_cluster
from conftest import Eventually
from launched_checks import Told
from launched_drivers import ended
from ssh_checks import driver_command
from test_several_hosts import EVERYWHERE, EXACT, LAYOUTS, networks_of

pytestmark = [pytest.mark.processes, pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(1800)]

CORES = {"2x1": (2, 2), "2x2": (2, 2), "2+1": (2, 1), "3x1": (1, 1, 1)}
"""The cores of each node."""
FIELDS = {"2x1": "workers=1", "2x2": "workers=2", "2+1": "threads=1", "3x1": "workers=1"}
"""What the launcher is told; without a number of workers it takes all cores of each node."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strategy_equals_its_reference_on_the_nodes_of_a_ray_cluster(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    why = ray_cluster.cannot()
    if why is not None:
        pytest.skip(why)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ray_cluster.write_project(tmp_path)
    (tmp_path / "cluster").mkdir()
    strategies = [str(one.values[1]) for one in EVERYWHERE if one.values[0] == layout]
    checks = [(strategy, networks_of(strategy, sum(LAYOUTS[layout]))[0]) for strategy in strategies]
    launcher = f"ray({FIELDS[layout]}, python='{tmp_path}/python')"
    with ray_cluster.ray_cluster(tmp_path / "cluster", cores=CORES[layout]) as cluster:
        ended(cluster.start(driver_command(launcher, checks, tmp_path, 4), tmp_path), seconds=1500)
        eventually(lambda: cluster.left() == [], within=10, what=f"nothing is left, not {cluster.left()}")
    everything = [Told(**told) for told in json.loads((tmp_path / "told.json").read_text())]
    assert len(everything) == len(checks)
    for (strategy, network), told in zip(checks, everything, strict=True):
        assert not told.raised, (strategy, told.raised)
        assert told.holds, (strategy, told.sentence)
        assert f" of {len(CORES[layout])} hosts " in told.sentence, told.sentence
        assert told.worst <= EXACT, strategy
        print(f"{layout}\t{strategy}\t{network}\t{told.worst:.1e}\t{told.seconds:.1f} s")  # pytest -s shows it
