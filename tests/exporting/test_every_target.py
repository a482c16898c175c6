"""One network, trained by two workers, goes through every target by one command each."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from commands import finish, start
from stablehlo_cases import TPU

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("cold_programs"),  # jax begins in a process of its own
]
APPORTION = (sys.executable, "-m", "apportion")
SECONDS = 540
HELD_OUT = 360
WORK = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import apportion

found = load_digits()
images, labels = torch.tensor(found.images / 16, dtype=torch.float32)[:, None], torch.tensor(found.target)
learned, held_out = TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])

workload = apportion.Workload(
    model=lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10)
    ),
    data=lambda: learned, loss=nn.functional.cross_entropy, batch_size=32, epochs=15,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    evaluation=apportion.Evaluation(data=lambda: held_out, every=None),
)
"""


def packages(*names: str) -> Callable[[], list[str]]:
    return lambda: [name for name in names if importlib.util.find_spec(name) is None]


def programs(*names: str) -> Callable[[], list[str]]:
    return lambda: [name for name in names if shutil.which(name) is None]


def of_tpu() -> list[str]:
    return [] if (TPU / "jax").is_dir() else [f"jax in {TPU}, where scripts/test slow installs it"]


ONNX = (packages("onnx", "onnxscript", "onnxruntime"),)
TARGETS: dict[str, tuple[str, str, Sequence[Callable[[], list[str]]]]] = {
    "float32": ("onnx", "model.onnx", ONNX),
    "int8": ("onnx(precision='int8', most_lost=0.02)", "model.int8.onnx", ONNX),
    "float16": ("onnx(precision='float16')", "model.float16.onnx", ONNX),
    "spiking": ("spiking", "model.nir", (packages("nir"),)),
    "verilog": (
        "verilog(bits=4, fine_tune_epochs=5)",
        "model.v",
        (packages("alkaid"), programs("iverilog", "yosys", "nextpnr-ice40")),
    ),
    "stablehlo": ("stablehlo", "model.stablehlo", (of_tpu,)),
}
"""For each target what the command asks for, the file that it writes, and what says which programs it lacks."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of ``data_parallel`` on two workers."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "work.py").write_text(WORK)
    (folder / "pyproject.toml").touch()  # what lies here is the caller's own
    strategy = ("--strategy", "data_parallel", "--workers", "2")
    command = [*APPORTION, "train", str(folder / "work.py:workload"), *strategy, "--run-dir", str(folder / "run")]
    finish([start(command)])
    return folder / "run"


@pytest.mark.parametrize("name", TARGETS)
def test_a_net_of_two_workers_goes_through_every_target_by_one_command_each(name: str, run: Path) -> None:
    target, file, needed = TARGETS[name]
    missing = [what for one in needed for what in one()]
    if missing:
        pytest.skip(f"the target {target} needs what is not installed: {', '.join(missing)}")
    there = {path.name for path in run.iterdir()}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TPU) if name == "stablehlo" else None]))
    ended = subprocess.run(
        [*APPORTION, "export", "run", "--target", target],
        cwd=run.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    made = {path.name for path in run.iterdir()} - there
    assert made == {file, f"{file}.report.html", f"{file}.report.json"}
    told = json.loads((run / f"{file}.report.json").read_text())
    assert told["nbytes"] == (run / file).stat().st_size > 0
    assert file in (run / f"{file}.report.html").read_text()
    assert told["verifications"]
    for one in told["verifications"]:
        assert one["difference"] <= one["limit"], "the file computes what it must"
        assert one["held_out"] == HELD_OUT
        assert one["before"]["accuracy"] > 0.9, "the network knows the digits"
        assert one["before"]["accuracy"] - one["after"]["accuracy"] <= 0.02
        print(name, one["reader"], one["simulated_by"], one["examples"], one["difference"], one["before"], one["after"])
