"""What runs on several hosts go on from after a loss: the parts of the network in the memory of the hosts, the last
checkpoint, or its copy on another host. Real sshds in network namespaces, real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from conftest import Eventually
from driven_hosts import DrivenRun, differences, driven, from_one_device, weights
from ssh_hosts import SshHosts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left_on_a_host"),
]
HOSTS = 3
TWO = "b:1", "c:1"
AGAIN = "all workers are started again"


def begun(run: DrivenRun) -> None:
    """Waits until a run makes steps, has saved some, and every rank has said its process."""
    run.until_begun(2)
    run.until(lambda: any(event["kind"] == "checkpoint" for _, event in run.told))


@pytest.mark.parametrize("strategy", ["pipeline_parallel(microbatches=1)", "tensor_parallel"])
def test_a_rank_with_a_part_of_the_network_is_replaced_from_the_memory_of_its_host(
    hosts: SshHosts, tmp_path: Path, strategy: str
) -> None:
    """A checkpoint would be too old: there is none but at the end."""
    policy = {"checkpoint_every": "1000 steps"}
    with driven(hosts, tmp_path, *TWO, steps=400, strategy=strategy, dropout=0.0, **policy) as run:
        run.until_step(5)
        for host, rank in (("c", 1), ("b", 0)):
            run.kill(host, rank)
        assert run.end()["step"] == 400
        assert [fault["action"].partition(" in ")[0] for fault in run.faults()] == ["replaced", "replaced"]
    assert from_one_device(tmp_path, 400) < 1e-10


def test_the_others_go_on_from_the_checkpoint_where_a_part_is_lost_with_its_host(
    hosts: SshHosts, tmp_path: Path
) -> None:
    policy = {"checkpoint_every": "3 steps"}
    strategy = "pipeline_parallel(microbatches=1)"
    with driven(hosts, tmp_path, *TWO, steps=500, strategy=strategy, pause=0.05, dropout=0.0, **policy) as run:
        begun(run)
        hosts.wipe("c")
        run.until(lambda: any(fault["action"] == AGAIN for fault in run.faults()))
        run.until(lambda: any("takes part again" in fault["cause"] for fault in run.faults()))
        assert run.end()["step"] == 500
    assert from_one_device(tmp_path, 500) < 1e-10


@pytest.mark.parametrize("strategy", ["fully_sharded", "local_sgd(every=4)"])
def test_a_strategy_that_keeps_nothing_in_memory_begins_again_from_the_checkpoint(
    hosts: SshHosts, tmp_path: Path, strategy: str
) -> None:
    """With the bits of the run that nothing happened to, where a checkpoint holds all that a strategy has."""
    projects = tmp_path / "calm", tmp_path / "killed"
    for project in projects:
        project.mkdir()
    policy = {"checkpoint_every": "8 steps"}
    if strategy == "fully_sharded":
        with driven(hosts, projects[0], *TWO, strategy=strategy, dropout=0.0, **policy) as run:
            assert run.end()["step"] == 120
    with driven(hosts, projects[1], *TWO, strategy=strategy, dropout=0.0, **policy) as run:
        begun(run)
        saved = max(event["step"] for _, event in run.told if event["kind"] == "checkpoint")
        run.kill("c", 1)
        assert run.end()["step"] == 120
        (fault,) = run.faults()
        assert fault["cause"].startswith("rank 1 on host c was killed by SIGKILL")
        assert fault["action"] == AGAIN
        kinds = [event["kind"] for _, event in run.told]
        again = next(e for _, e in run.told[kinds.index("fault") :] if e["kind"] == "step")
        assert again["step"] > saved, "what was saved is not made again"
    if strategy == "fully_sharded":
        assert differences(weights(projects[0]), weights(projects[1])) == {}


def test_a_loss_before_all_have_begun_makes_all_begin_again(hosts: SshHosts, tmp_path: Path) -> None:
    with driven(hosts, tmp_path, *TWO, dropout=0.0) as run:
        run.until(lambda: 1 in run.pids.get("c", {}))
        os.kill(run.pids["c"][1], signal.SIGKILL)
        assert run.end()["step"] == 120
        assert len(run.faults()) == 1
    assert from_one_device(tmp_path, 120) < 1e-10


def test_a_host_that_is_lost_before_all_have_begun_takes_part_later(hosts: SshHosts, tmp_path: Path) -> None:
    """The worker that is left begins alone, and goes on with another: batch normalisation takes both their rows."""
    with driven(hosts, tmp_path, *TWO, steps=500, pause=0.05, dropout=0.0) as run:
        run.until(lambda: 1 in run.pids.get("c", {}))
        hosts.wipe("c")
        run.until(lambda: any("takes part again" in fault["cause"] for fault in run.faults()))
        assert any(fault["action"] == AGAIN for fault in run.faults()), run.faults()
        assert run.end()["step"] == 500
    assert from_one_device(tmp_path, 500) < 1e-10


def test_a_copy_of_the_checkpoints_is_gone_on_from_where_the_first_host_is_lost(
    hosts: SshHosts, tmp_path: Path
) -> None:
    """Each host has a disk of its own."""
    policy = {"checkpoint_every": "4 steps", "copies": 2}
    run_dir = str(hosts.private / "copied")
    given = {"steps": 500, "strategy": "fully_sharded", "pause": 0.05, "dropout": 0.0, "run_dir": run_dir}
    with driven(hosts, tmp_path, *TWO, **given, **policy) as run:
        begun(run)
        saved = run.step
        hosts.wipe("b")
        run.until(lambda: any(fault["action"] == AGAIN for fault in run.faults()))
        run.until(lambda: run.step > saved + 20)
        assert run.end()["step"] == 500
    assert from_one_device(tmp_path, 500, weights(hosts.private, "copied")) < 1e-10


def test_where_the_drivers_host_is_lost_another_goes_on_from_its_copy(
    hosts: SshHosts, tmp_path: Path, eventually: Eventually
) -> None:
    given = {"steps": 300, "strategy": "data_parallel", "pause": 0.02, "checkpoint_every": "4 steps", "copies": 2}
    calm, run_dir = tmp_path / "calm", str(hosts.private / "moved")
    calm.mkdir()
    with driven(hosts, calm, "b:1", "c:1", **given) as run:
        assert run.end()["step"] == 300
    with driven(hosts, tmp_path, "a:1", "b:1", run_dir=run_dir, **given) as run:
        begun(run)
        hosts.wipe("a")
        eventually(lambda: hosts.processes("b") == {}, within=5, what="the workers of the other host are gone")
    kept = hosts.on_disk("b", hosts.private / "moved" / "checkpoints")
    assert list(kept.glob("step-*")), "the copies are there"
    with driven(hosts, tmp_path, "b:1", "c:1", run_dir=run_dir, resume=True, host="b", **given) as run:
        assert run.end()["step"] == 300
    assert differences(weights(calm), weights(kept.parent.parent, "moved")) == {}


def test_a_run_whose_only_checkpoints_are_lost_ends_and_says_how_to_keep_them(hosts: SshHosts, tmp_path: Path) -> None:
    run_dir = str(hosts.private / "lost")
    policy = {"checkpoint_every": "4 steps"}
    with driven(hosts, tmp_path, *TWO, steps=500, strategy="fully_sharded", run_dir=run_dir, **policy) as run:
        begun(run)
        hosts.wipe("b")
        run.process.wait(60)
        assert run.process.returncode != 0
        run.until(lambda: any("policy(copies=2) keeps them on a second host" in line for line in run.said))
