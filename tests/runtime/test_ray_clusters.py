"""Ray clusters of other kinds: one that asks for a token, and one on which Ray Train has started the ranks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import ray_cluster
from conftest import Eventually, Within
from launched_drivers import await_steps, ended, own_lines
from launched_runs import assert_losses_of_one_device
from proc_files import told_of

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.serial, pytest.mark.timeout(400)]

TRAINER = """
import os
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def loop():
    import torch.distributed
    import apportion
    group = torch.distributed.group.WORLD
    assert torch.distributed.get_world_size() == 2
    os.chdir(os.environ["PROJECT"])
    apportion.train(
        "mine.py:workload", "data_parallel", launcher=apportion.env(device="cpu"), run_dir="run", check=False,
    )
    assert torch.distributed.group.WORLD is group, "the group of Ray Train is still there"
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    with open(f"ranks-{torch.distributed.get_rank()}", "w") as file:
        file.write(str(int(total)))

ray.init(address="auto", runtime_env={"env_vars": {"PROJECT": os.getcwd()}})
spread = ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
TorchTrainer(loop, scaling_config=spread, run_config=RunConfig(storage_path=os.getcwd() + "/ray")).fit()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder."""
    why = ray_cluster.cannot()
    if why is not None:
        pytest.skip(why)
    ray_cluster.write_project(tmp_path)
    (tmp_path / "cluster").mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_cluster_with_a_token_is_joined_with_it_alone_and_a_node_that_is_lost_is_named(
    project: Path, within: Within, eventually: Eventually
) -> None:
    token = project / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef" * 2)
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with ray_cluster.ray_cluster(project / "cluster", **given) as cluster:
        other = project / "other"
        other.touch(mode=0o600)
        other.write_text("fedcba9876543210" * 2)
        for settings in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": str(other)}):
            _, err = ended(cluster.train(project, "mine.py:workload", **settings), 3)
            assert err.startswith("error: the Ray cluster at address='auto' does not let this process in (Invalid"), err
            assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the cluster's token" in err
            assert len(err.splitlines()) == 1, err
        process = cluster.train(project, "mine.py:endless", "workers=1", "--policy", "policy(max_restarts=0)")
        await_steps(project / "run", process, eventually)
        for pid in cluster.all_processes(1):
            if "raylet" in told_of(pid, "cmdline").decode().partition("\0")[0]:
                os.kill(pid, signal.SIGKILL)
        with within(40, "the end"):
            _, err = ended(process, 3)
        (error,) = own_lines(err)
        assert error.startswith("error: host node2 is lost with rank 1: Ray has lost the actor that held its"), err
        eventually(lambda: cluster.left() == [], within=10, what=f"nothing is left, not {cluster.left()}")


def test_inside_ray_train_env_takes_the_group_that_is_there(project: Path) -> None:
    (project / "trainer.py").write_text(TRAINER)
    with ray_cluster.ray_cluster(project / "cluster", with_torch=True) as cluster:
        ended(cluster.start([sys.executable, "trainer.py"], project), seconds=300)
    assert [(project / f"ranks-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert_losses_of_one_device(project / "run", project / "mine.py")
