"""The commands of the manifests of docs/kubernetes, as two pods would run them: a host each, with the names that the
headless Service gives, and what Kubernetes and Kubeflow set."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
import yaml
from commands import SECONDS, finish
from conftest import Eventually, Within
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


@dataclass
class Pods:
    """Two pods of a manifest, in a folder that stands for what is mounted and for the image's own."""

    hosts: Any
    container: dict[str, Any]
    names: str
    sets: dict[str, str]
    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "train.py").write_text(TRAIN)
        (self.folder / "mounted").mkdir()
        secret = self.folder / "mounted" / "secret"
        secret.write_text("a secret of this test's own")
        secret.chmod(0o400)
        names = [f"{address} {self.names.format(index)}" for index, address in enumerate(self.hosts.addresses)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def start(self) -> list[subprocess.Popen[str]]:
        program, *arguments = self.container["command"]
        assert program == "torchrun"
        given = {one["name"]: one["value"] for one in self.container["env"] if "value" in one}
        mount = self.container["volumeMounts"][0]["mountPath"]
        given["APPORTION_SECRET_FILE"] = given["APPORTION_SECRET_FILE"].replace(mount, str(self.folder / "mounted"))
        given["PYTHONPATH"] = str(Path(apportion.__file__).parents[1])
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        return [
            subprocess.Popen(
                on_host(
                    self.hosts.names[index],
                    self.names.format(index).partition(".")[0],
                    self.folder / "hosts",
                    command,
                ),
                env={**os.environ, **given, **{name: text.format(index) for name, text in self.sets.items()}},
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(2)
        ]

    def kill(self, index: int) -> None:
        """Kills all that runs in a pod."""
        told = subprocess.run(["ip", "netns", "pids", self.hosts.names[index]], capture_output=True, text=True).stdout
        for pid in told.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("manifest", [indexed_job, train_job])
def test_the_pods_of_a_manifest_train_the_network_of_one_device(
    hosts: Any, manifest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    finish(Pods(hosts, *manifest(), tmp_path).start())
    assert_losses_of_one_device(tmp_path / "runs" / "first", tmp_path / "mine.py")


@pytest.mark.timeout(300)
def test_when_a_pod_dies_the_other_ends_and_both_go_on_when_they_are_started_again(
    hosts: Any, tmp_path: Path, eventually: Eventually, within: Within
) -> None:
    (tmp_path / "mine.py").write_text(MINE.replace("workload = made()", "workload = made(loss=slow, steps=100_000)"))
    run = tmp_path / "runs" / "first"
    pods = Pods(hosts, *indexed_job(), tmp_path)
    first, second = pods.start()
    try:
        eventually((run / "checkpoints" / "latest").exists, within=SECONDS, what="it has saved a checkpoint")
        pods.kill(1)
        with within(20, "the end of the other pod"):
            said, _ = first.communicate(timeout=30)
        assert first.returncode != 0
        assert re.search(r"the connection to rank \d on train-1 at .* was lost", said), said
        again = pods.start()
        try:
            eventually(lambda: resumed(run), within=SECONDS, what="it goes on")
        finally:
            pods.kill(0)
            pods.kill(1)
            for pod in again:
                pod.communicate(timeout=20)
    finally:
        for pod in (first, second):
            pod.kill()
            pod.communicate(timeout=20)


def resumed(run: Path) -> bool:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return any(event["kind"] == "start" and event["data"]["resumed"] for event in events)
