"""Notebooks run for real, by a kernel of Jupyter: progress in the output, results as tables, an interrupt in a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BESIDE = Path(sys.prefix, "notebook")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BESIDE.is_dir(), reason="scripts/test slow installs a kernel of notebooks"),
]
DRIVER = """
import asyncio, json, sys, threading, time
import nbformat
from nbclient import NotebookClient

cells = json.loads(sys.stdin.read())
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text, _ in cells])
client = NotebookClient(book, timeout=120, kernel_name="python3", allow_errors=True)
with client.setup_kernel():
    for number, (cell, (_, interrupts)) in enumerate(zip(book.cells, cells)):
        if interrupts:
            timer = threading.Timer(interrupts, lambda: asyncio.run(client.km.interrupt_kernel()))
            timer.start()
        client.execute_cell(cell, number)
print(json.dumps([cell.outputs for cell in book.cells]))
"""
SETTING = """
import torch, apportion
from torch import nn
def rows():
    inputs = torch.randn(600, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
def make(**changes):
    return apportion.Workload(**{**dict(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), data=rows,
        loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), batch_size=12, epochs=2,
        evaluation=apportion.Evaluation(data=rows)), **changes})
work = make()
"""


def outputs_of(folder: Path, *cells: tuple[str, float]) -> list[list[dict[str, Any]]]:
    """Runs cells, each interrupted after some seconds where they are not 0, and returns the outputs of each."""
    kernels = folder / "share" / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    (kernels / "kernel.json").write_text(
        json.dumps(
            {
                "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": "python3",
                "language": "python",
            }
        )
    )
    path = os.pathsep.join([str(BESIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "JUPYTER_PATH": str(folder / "share" / "jupyter"),
        "HOME": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(cells),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    found: list[list[dict[str, Any]]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def html(outputs: list[dict[str, Any]]) -> str:
    return "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)


def test_each_verb_shows_its_result_as_a_table_and_training_its_progress(tmp_path: Path) -> None:
    setting, trained, checked, planned, compared = outputs_of(
        tmp_path,
        (SETTING, 0),
        ("apportion.train(work, 'data_parallel', launcher=apportion.local(workers=2), run_dir='run')", 0),
        ("apportion.check(work, 'data_parallel', workers=2)", 0),
        ("apportion.plan(work, trial=False)", 0),
        ("apportion.compare(work, ['single_device'], steps=6, predict=False)", 0),
    )
    for outputs in (setting, trained, checked, planned, compared):
        assert not [output for output in outputs if output["output_type"] == "error"], outputs
    assert "step 100 of 100" in html(trained)
    assert "<table>" in html(trained)
    assert "test accuracy" in html(trained)
    assert "the same network in its first steps" in html(checked)
    assert "why not" in html(planned)
    assert "single_device" in html(compared)


def test_an_interrupt_is_one_line_with_how_to_go_on(tmp_path: Path) -> None:
    _, interrupted, resumed = outputs_of(
        tmp_path,
        (SETTING, 0),
        ("apportion.train(make(epochs=100000), 'single_device', run_dir='run')", 8),
        ("next(iter(apportion.run(make(epochs=100000), 'single_device', run_dir='run', resume=True))).resumed", 0),
    )
    (error,) = [output for output in interrupted if output["output_type"] == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    assert len(error["traceback"]) == 1
    assert "\n" not in error["traceback"][0]
    assert "run" in error["traceback"][0]
    assert "resume" in error["traceback"][0]
    assert any("True" in str(output.get("data")) for output in resumed)
