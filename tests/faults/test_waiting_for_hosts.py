"""Runs that wait for a host that they have lost. Real sshds in network namespaces, real kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from driven_hosts import DrivenRun, cut, differences, driven, from_one_device, weights
from ssh_hosts import SshHosts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left_on_a_host"),
]
HOSTS = 3
TWO = "b:2", "c:2"
LOST, BACK = "host c is lost with ranks 2, 3", "host c takes part again, with ranks 2, 3"


def between(run: DrivenRun, one: str, other: str) -> list[int]:
    """The steps told after one cause of a fault and before another."""
    causes = [event["data"].get("cause", "") if event["kind"] == "fault" else "" for _, event in run.told]
    first, last = (next(at for at, cause in enumerate(causes) if cause.startswith(words)) for words in (one, other))
    return [event["step"] for _, event in run.told[first:last] if event["kind"] == "step"]


def test_the_same_bits_with_a_host_that_was_lost_and_waited_for(hosts: SshHosts, tmp_path: Path) -> None:
    calm, hit = tmp_path / "calm", tmp_path / "hit"
    for project in (calm, hit):
        project.mkdir()
    with driven(hosts, calm, *TWO, steps=200) as run:
        assert run.end()["step"] == 200
    with driven(hosts, hit, *TWO, steps=200, on_host_loss="wait") as run:
        run.until_begun(4)
        hosts.wipe("c")
        run.until(lambda: any(fault["cause"].startswith(BACK) for fault in run.faults()))
        assert run.end()["step"] == 200
        lost, *_ = (fault for fault in run.faults() if fault["cause"].startswith(LOST))
        assert lost["action"] == "is waited for, 600 s at most"
        assert between(run, LOST, BACK) == [], "nothing is trained without it"
        assert any(fault["action"].startswith("replaced") for fault in run.faults())
    assert differences(weights(calm), weights(hit)) == {}


@pytest.mark.parametrize("name", ["b", "c"])
def test_all_parts_of_a_network_are_there_again_before_it_begins_again(
    hosts: SshHosts, tmp_path: Path, name: str
) -> None:
    """Whichever host is lost, that of the run directory too, whose disk stays."""
    given = {"steps": 300, "strategy": "pipeline_parallel(microbatches=1)", "pause": 0.02, "dropout": 0.0}
    with driven(hosts, tmp_path, "b:1", "c:1", **given, on_host_loss="wait", checkpoint_every="4 steps") as run:
        run.until_begun(2)
        run.until(lambda: any(event["kind"] == "checkpoint" for _, event in run.told))
        hosts.wipe(name)
        run.until(lambda: any(f"host {name} takes part again" in fault["cause"] for fault in run.faults()))
        assert run.end()["step"] == 300
        assert not any("goes on with 1 worker" in fault["action"] for fault in run.faults())
    assert from_one_device(tmp_path, 300) < 1e-10


def test_a_host_that_stays_away_ends_the_run_with_its_last_update_saved(hosts: SshHosts, tmp_path: Path) -> None:
    given = {"steps": 400, "pause": 0.02, "dropout": 0.0, "checkpoint_every": "1000 steps"}
    with driven(hosts, tmp_path, *TWO, **given, on_host_loss="wait", host_wait="3 s") as run:
        run.until_begun(4)
        with cut(hosts, "c"):
            run.process.wait(60)
        assert run.process.returncode != 0
        run.until(lambda: any("it was waited for 3 s (host_wait); --resume goes on" in line for line in run.said))
    with driven(hosts, tmp_path, *TWO, **given, resume=True) as run:
        assert run.end()["step"] == 400
        first = next(event["step"] for _, event in run.told if event["kind"] == "step")
        assert first > 5, "what was trained before is not trained again"
    assert from_one_device(tmp_path, 400) < 1e-10


def test_a_run_that_waits_for_a_host_can_be_interrupted(hosts: SshHosts, tmp_path: Path) -> None:
    with driven(hosts, tmp_path, *TWO, steps=10_000, pause=0.02, dropout=0.0, on_host_loss="wait") as run:
        run.until_begun(4)
        with cut(hosts, "c"):
            run.until(lambda: any(fault["cause"].startswith(LOST) for fault in run.faults()))
            step = run.interrupt()
    assert step >= 5
    assert from_one_device(tmp_path, step) < 1e-10
