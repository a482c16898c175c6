"""Disks on which nothing can be written: a run that cannot write its folder says so, and one that cannot keep its proof
trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORK = """
import torch, apportion

def rows():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(1))

workload = apportion.Workload(
    model=lambda: torch.nn.Linear(4, 4), data=rows, loss=torch.nn.functional.cross_entropy, batch_size=16,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), epochs=2)
"""
DISKS = {
    "full": "mount -t tmpfs -o size=64k tmpfs disk && { head -c 100000 /dev/zero >disk/other 2>errors; true; }",
    "read-only": "mount -t tmpfs -o size=64k tmpfs disk && mount -o remount,ro disk",
}
OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]


def on_disk(state: str, folder: Path, command: str) -> tuple[int, str, list[str]]:
    """Runs a command of the shell where ``disk`` is a disk in this state, which nothing outside of the command sees.
    Returns its status, what it printed, and the files that it left on the disk."""
    if shutil.which("unshare") is None or subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces")
    (folder / "disk").mkdir()
    (folder / "work.py").write_text(WORK)
    script = f"{DISKS[state]} || exit 99; {command}; code=$?; find disk -type f >left; exit $code"
    command_line = [*OWN_MOUNTS, "sh", "-c", script]
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 100}
    ran = subprocess.run(command_line, cwd=folder, **given)  # type: ignore[call-overload]
    if ran.returncode == 99:
        pytest.skip(f"no disk could be mounted: {ran.stderr}")
    left = [line for line in (folder / "left").read_text().split() if line != "disk/other"]
    return ran.returncode, ran.stdout + ran.stderr, left


def train(run_dir: str) -> str:
    words = f"train work.py:workload --strategy data_parallel --workers 2 --run-dir {run_dir}"
    return f"{sys.executable} -m apportion {words}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("state", "why"), [("full", "No space left on device"), ("read-only", "Read-only file system")]
)
def test_a_run_directory_that_cannot_be_written_ends_the_run_with_status_3(
    state: str, why: str, tmp_path: Path
) -> None:
    status, printed, left = on_disk(state, tmp_path, f"{train('disk/run')} --no-check")
    assert status == 3, printed
    assert f"written: {why}" in printed
    assert "Traceback" not in printed
    assert not [path for path in left if path.endswith(".json")]


@pytest.mark.thorough
@pytest.mark.parametrize("state", DISKS)
def test_where_no_proof_can_be_kept_the_run_is_proved_and_trains(state: str, tmp_path: Path) -> None:
    status, printed, left = on_disk(state, tmp_path, f"XDG_CACHE_HOME=$PWD/disk {train('run')}")
    assert status == 0, printed
    assert "trains the same network as one device in its first steps" in printed
    assert "Traceback" not in printed
    assert not [path for path in left if "proofs" in path]
