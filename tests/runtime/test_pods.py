"""The commands of the manifests of docs/kubernetes, as two pods would run them: a host each, with the names that the
headless Service gives, and what Kubernetes and Kubeflow set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
import yaml
from commands import finish
from launched_runs import MINE, assert_losses_of_one_device, on_host

import apportion

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.serial]

FOLDER = Path(__file__).parents[2] / "docs" / "kubernetes"
TRAIN = """
import apportion
from mine import workload

apportion.train(workload, "data_parallel", launcher=apportion.env(), run_dir="runs/first", resume="auto")
"""


@pytest.fixture
def hosts() -> Iterator[Any]:
    module = slurm_cluster.hosts_module()
    why = module.cannot()
    if why is not None:
        pytest.skip(why)
    with module.several_hosts((2, 2)) as made:
        yield made


def indexed_job() -> tuple[dict[str, Any], str, dict[str, str]]:
    """The container, the names of the pods, and what only the cluster knows."""
    _, job = yaml.safe_load_all((FOLDER / "indexed_job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container, "train-{}.train", {"PET_NODE_RANK": "{}"}


def train_job() -> tuple[dict[str, Any], str, dict[str, str]]:
    """The same of Kubeflow's, which sets more."""
    runtime, job = yaml.safe_load_all((FOLDER / "training_runtime.yaml").read_text())
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    pods = f"{name}-{replicated['name']}-0-{{}}.{name}"
    sets = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    sets |= {"PET_NODE_RANK": "{}", "PET_MASTER_ADDR": pods.format(0), "PET_MASTER_PORT": "29400"}
    return container, pods, sets


@pytest.mark.parametrize("manifest", [indexed_job, train_job])
def test_the_pods_of_a_manifest_train_the_network_of_one_device(
    hosts: Any, manifest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container, pods, sets = manifest()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "mounted").mkdir()
    secret = tmp_path / "mounted" / "secret"
    secret.write_text("a secret of this test's own")
    secret.chmod(0o400)
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    mount = container["volumeMounts"][0]["mountPath"]
    given["APPORTION_SECRET_FILE"] = given["APPORTION_SECRET_FILE"].replace(mount, str(secret.parent))
    given["PYTHONPATH"] = str(Path(apportion.__file__).parents[1])
    table = tmp_path / "hosts"
    names = [f"{address} {pods.format(index)}" for index, address in enumerate(hosts.addresses)]
    table.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    program, *arguments = container["command"]
    assert program == "torchrun"
    started = [
        subprocess.Popen(
            on_host(
                hosts.names[index],
                pods.format(index).partition(".")[0],
                table,
                [sys.executable, "-m", "torch.distributed.run", *arguments],
            ),
            env={**os.environ, **given, **{name: text.format(index) for name, text in sets.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    finish(started)
    assert_losses_of_one_device(tmp_path / "runs" / "first", tmp_path / "mine.py")
