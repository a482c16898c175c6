"""Every strategy that runs on several hosts, proved by one command on hosts that ssh reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Eventually
from ssh_checks import checked_by_ssh
from ssh_hosts import SshHosts
from test_several_hosts import EVERYWHERE, EXACT, networks_of

pytestmark = [pytest.mark.processes, pytest.mark.serial, pytest.mark.slow]
HOSTS = 3

NAMES = {"2x1": ("a", "b"), "2x2": ("a:2", "b:2"), "2+1": ("a:2", "b"), "3x1": ("a", "b", "c")}
"""The hosts of each layout, with their numbers of ranks."""
RANKS = {"2x1": 2, "2x2": 4, "2+1": 3, "3x1": 3}


@pytest.mark.parametrize(("layout", "strategy"), EVERYWHERE)
def test_every_strategy_equals_its_reference_on_hosts_that_ssh_reaches(
    hosts: SshHosts, layout: str, strategy: str, tmp_path: Path, eventually: Eventually
) -> None:
    network = networks_of(strategy, RANKS[layout])[0]
    (told,) = checked_by_ssh(hosts, NAMES[layout], [(strategy, network)], tmp_path)
    assert not told.raised
    assert told.holds, told.sentence
    assert f" of {len(NAMES[layout])} hosts " in told.sentence
    assert told.worst <= EXACT
    print(f"{layout}\t{strategy}\t{network}\t{told.worst:.1e}\t{told.seconds:.1f} s")  # pytest -s makes a table of it
    eventually(lambda: hosts.left() == [], within=10, what=f"nothing is left on the hosts, not {hosts.left()}")
