"""The manifests of docs/kubernetes: what is said twice is said alike, torchrun reads it, and the schemas allow it."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import SECONDS

from apportion.comm.network.handshake import SECRET_ENV

FOLDER = Path(__file__).parents[2] / "docs" / "kubernetes"
JOB, RUNTIME = FOLDER / "indexed_job.yaml", FOLDER / "training_runtime.yaml"
TORCHRUN_SECONDS = 30.0
"""The seconds for which torchrun waits for its ranks after SIGTERM."""
SAVE_SECONDS = 3.5
"""The seconds in which a rank that is told to end has saved (docs/faults.md)."""
SCHEMAS = Path(sys.prefix) / "kubernetes"
"""Of packages that nothing else needs."""


def documents(path: Path) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(path.read_text())}


def pods() -> dict[str, dict[str, Any]]:
    job = documents(JOB)["Job"]["spec"]["template"]["spec"]
    (replicated,) = documents(RUNTIME)["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return {JOB.name: job, RUNTIME.name: replicated["template"]["spec"]["template"]["spec"]}


def environment(pod: dict[str, Any]) -> dict[str, str]:
    (container,) = pod["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def as_torchrun_reads_it(command: list[str], monkeypatch: pytest.MonkeyPatch, **given: str) -> Any:
    from torch.distributed.run import get_args_parser

    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert command[0] == "torchrun"
    return get_args_parser().parse_args(command[1:])


@pytest.mark.parametrize("name", [JOB.name, RUNTIME.name])
def test_the_secret_is_where_a_rank_looks_for_it_and_its_owners_alone(name: str) -> None:
    pod = pods()[name]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert set(mounts) == set(volumes)
    secret = volumes["secret"]["secret"]
    assert secret["defaultMode"] == 0o400
    (item,) = secret["items"]
    assert environment(pod)[SECRET_ENV] == f"{mounts['secret']['mountPath']}/{item['path']}"
    assert mounts["runs"]["mountPath"] == f"{container['workingDir']}/runs"
    assert f"create secret generic {secret['secretName']} --from-file={item['key']}=" in page()


def test_the_pods_of_the_job_are_as_many_as_torchrun_waits_for_and_meet_at_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, service = documents(JOB)["Job"], documents(JOB)["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (rank,) = [one for one in container["env"] if "valueFrom" in one]
    read = as_torchrun_reads_it(container["command"], monkeypatch, **{rank["name"]: "1"})
    assert spec["completionMode"] == "Indexed"
    assert int(read.nnodes) == spec["completions"] == spec["parallelism"]
    assert read.node_rank == 1, "the index of the pod, which Kubernetes writes into an annotation"
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert service["spec"]["clusterIP"] == "None", "a name for each pod"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert read.master_addr == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert read.training_script == "train.py"


def test_the_ranks_of_a_pod_have_a_core_each() -> None:
    job = documents(JOB)["Job"]["spec"]["template"]["spec"]
    trainer = documents(RUNTIME)["TrainJob"]["spec"]["trainer"]
    (option,) = [word for word in job["containers"][0]["command"] if word.startswith("--nproc-per-node=")]
    for ranks, resources, pod in (
        (int(option.partition("=")[2]), job["containers"][0]["resources"], job),
        (trainer["numProcPerNode"], trainer["resourcesPerNode"], pods()[RUNTIME.name]),
    ):
        assert resources["requests"] == resources["limits"]
        assert int(resources["limits"]["cpu"]) == ranks * int(environment(pod)["OMP_NUM_THREADS"])


def test_the_train_job_is_of_its_runtime_and_torchrun_reads_what_kubeflow_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, job = documents(RUNTIME)["TrainingRuntime"], documents(RUNTIME)["TrainJob"]["spec"]
    group = runtime["apiVersion"].partition("/")[0]
    assert job["runtimeRef"] == {"apiGroup": group, "kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert job["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert "torch" in runtime["spec"]["mlPolicy"]
    (container,) = pods()[RUNTIME.name]["containers"]
    sets = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29400"}
    read = as_torchrun_reads_it(
        container["command"], monkeypatch, PET_MASTER_ADDR="train-mine-node-0-0.train-mine", **sets
    )
    told = (read.nnodes, read.nproc_per_node, read.node_rank, read.master_addr, read.master_port)
    assert told == ("2", "2", 1, "train-mine-node-0-0.train-mine", 29400)
    assert container["name"] == "node", "which Kubeflow looks for"


def jobs() -> dict[str, dict[str, Any]]:
    """The specification of the Job that starts the pods."""
    (replicated,) = documents(RUNTIME)["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return {JOB.name: documents(JOB)["Job"]["spec"], RUNTIME.name: replicated["template"]["spec"]}


@pytest.mark.parametrize("name", [JOB.name, RUNTIME.name])
def test_the_pods_are_allowed_at_the_level_restricted(name: str) -> None:
    """The rules of the Pod Security Standards that a pod has to do something for."""
    pod = pods()[name]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] != 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all({"secret", "persistentVolumeClaim", "emptyDir"} & set(volume) for volume in pod["volumes"])
    assert pod["securityContext"]["fsGroup"], "or nobody but root could read the secret"


@pytest.mark.parametrize("name", [JOB.name, RUNTIME.name])
def test_an_eviction_is_no_failure_and_a_pod_that_is_told_to_end_has_the_time_to_save(name: str) -> None:
    job, pod = jobs()[name], pods()[name]
    rules = job["podFailurePolicy"]["rules"]
    assert pod["restartPolicy"] == "Never", "which a podFailurePolicy needs"
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = [code for rule in rules[1:] for code in rule["onExitCodes"]["values"]]
    assert not {0, 1, 143} & set(codes), "a run that was told to end, or has lost a rank, is started again"
    assert {rule["onExitCodes"]["containerName"] for rule in rules[1:]} == {pod["containers"][0]["name"]}
    assert pod["terminationGracePeriodSeconds"] > TORCHRUN_SECONDS + SAVE_SECONDS


def test_a_job_that_is_over_is_removed() -> None:
    template = documents(RUNTIME)["TrainingRuntime"]["spec"]["template"]["spec"]
    assert documents(JOB)["Job"]["spec"]["ttlSecondsAfterFinished"] == template["ttlSecondsAfterFinished"] == 86400


def page() -> str:
    return (FOLDER.parent / "several_hosts.md").read_text()


def test_the_page_names_the_manifests_and_their_image() -> None:
    for path in (JOB, RUNTIME):
        assert f"](kubernetes/{path.name})" in page()
    images = {container["image"] for pod in pods().values() for container in pod["containers"]}
    assert len(images) == 1
    claims = {volume["persistentVolumeClaim"]["claimName"] for pod in pods().values() for volume in pod["volumes"][1:]}
    assert claims == {"runs"}
    assert re.search(r"claim `runs`", page())


def validated(*paths: Path) -> subprocess.CompletedProcess[str]:
    if not (SCHEMAS / "kubernetes_validate").is_dir():
        pytest.skip(f"the schemas are not in {SCHEMAS}: scripts/test slow installs them")
    script = Path(__file__).parents[1] / "helpers" / "manifest_schemas.py"
    path = os.pathsep.join([str(SCHEMAS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(script), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.slow
def test_the_schemas_of_kubernetes_and_kubeflow_allow_the_manifests() -> None:
    done = validated(JOB, RUNTIME)
    assert (done.returncode, done.stdout) == (0, "all as it should be\n"), done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [(JOB, "Job", "completionModus"), (RUNTIME, "TrainingRuntime", "mlPolicies"), (RUNTIME, "TrainJob", "runtime")],
)
def test_a_misspelt_field_is_seen(path: Path, kind: str, said: str, tmp_path: Path) -> None:
    wrong = copy.deepcopy(documents(path)[kind])
    wrong["spec"][said] = wrong["spec"].pop(next(iter(wrong["spec"])))
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    done = validated(tmp_path / "wrong.yaml")
    assert done.returncode != 0
    assert said in done.stderr or "runtimeRef" in done.stderr
