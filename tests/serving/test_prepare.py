"""What is found out about a member before it is served."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SECONDS, start

from apportion.api.export import export_run
from apportion.core.strategy import State
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.serving.prepare import TimedPreparation, prepare
from apportion.serving.runtimes.source import Source

WORK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import apportion

class Deciding(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 1e9 else 1 * x)  # ONNX has no words for it

data = TensorDataset(torch.ones(4, 3), torch.zeros(4, 2))
workload = apportion.Workload(
    model=lambda: NET(3, 2), data=lambda: data, loss=nn.MSELoss(), optimizer=torch.optim.SGD, batch_size=4
)
"""


def saved(run: RunDirectory, step: int, *, keep: int = 9, best: bool = False) -> None:
    """All weights are the step's number."""
    model = {"weight": torch.full((2, 3), float(step)), "bias": torch.zeros(2)}
    run.save(State(step=step, model=model), epoch=0.0, strategy="single_device", keep=keep, best=best)


def a_run(folder: Path, net: str) -> RunDirectory:
    (folder / "work.py").write_text(WORK.replace("NET", net))
    run = RunDirectory(folder / "run")
    run.start({"address": "work.py:workload", "cwd": str(folder), "fingerprint": {"seed": 0}})
    saved(run, 1, best=True)
    saved(run, 2)
    return run


def answer(source: Source) -> float:
    """Of the net as a process of its own would load it: three times its weights."""
    program = source.open()
    try:
        return float(program.run([np.ones((1, 3), dtype=np.float32)], float("inf"))[0][0, 0])
    finally:
        program.close()


@pytest.mark.parametrize("net", ["nn.Linear", "Deciding"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["linked", "copied"])
@pytest.mark.thorough
def test_a_run_that_goes_on_changes_no_member(
    net: str, elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = a_run(tmp_path, net), tmp_path / "made"
    folder.mkdir()
    if elsewhere:  # as on another disk

        def refuse(*paths: object) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refuse)
    source, said = prepare("m1", str(run.path), folder, threads=[1], trust=True)
    assert said[0] == f"m1: step-00000001 of {run.path}"
    assert source.runtime == ("torch" if net == "Deciding" else source.runtime)
    assert answer(source) == 3.0
    saved(run, 3, keep=1, best=True)
    assert run.steps() == [3]
    assert answer(source) == 3.0, "and not that of step 3"
    fresh, _ = prepare("m1", str(run.path), tmp_path / "made", threads=[1], trust=True)
    assert answer(fresh) == 9.0


def test_a_run_that_cannot_be_served_is_named_as_it_was_given(tmp_path: Path) -> None:
    run = a_run(tmp_path, "nn.Linear")
    (run.path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"{run.path} names no workload as FILE:NAME"):
        prepare("m1", str(run.path), tmp_path, threads=[1], trust=True)


@pytest.mark.processes
def test_a_full_disk_is_said_with_the_cure_and_nothing_is_left_on_it(tmp_path: Path, small_disk: Path) -> None:
    run = a_run(tmp_path, "nn.Linear")
    wide = {"weight": torch.zeros(600, 1000)}
    run.save(State(step=3, model=wide), epoch=0.0, strategy="single_device", keep=9, best=True)
    command = [sys.executable, "-m", "apportion", "serve", "--port", "0", f"wide={run.path}"]
    process = start(command, TMPDIR=str(small_disk))
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 3, text
    assert f"error: member wide ({run.path}): [Errno 28] No space left on device" in text
    assert "set TMPDIR to a folder on another one" in text
    assert not list(small_disk.iterdir())


@pytest.mark.thorough
def test_a_runs_file_in_int8_is_timed_beside_float_and_taken_where_it_is_the_same_net(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apportion.serving import prepare as module

    run, folder = a_run(tmp_path, "nn.Linear"), tmp_path / "made"
    folder.mkdir()
    export_run(run.path, target="onnx(precision='int8')", trust=True)
    int8_first(monkeypatch)
    source, said = prepare("m1", str(run.path), folder, threads=[1], trust=True)
    assert any("onnxruntime" in line and ", int8, 1 thread: " in line for line in said)
    assert source.path == str(folder / f"m1{module.INT8}")
    (run.path / "model.int8.onnx").unlink()
    assert answer(source) == pytest.approx(3.0, rel=0.01), "the file that is served is a copy"
    export_run(run.path, target="onnx(precision='int8')", trust=True)
    saved(run, 3, best=True)
    source, said = prepare("m1", str(run.path), folder, threads=[1], trust=True)
    assert not any(", int8, " in line for line in said), "it was exported from weights of another step"
    assert answer(source) == 9.0


@pytest.mark.thorough
def test_a_file_in_int8_is_served_and_one_beside_a_file_of_float_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = a_run(tmp_path, "nn.Linear"), tmp_path / "made"
    folder.mkdir()
    export_run(run.path, path=tmp_path / "net.onnx", trust=True)
    export_run(run.path, target="onnx(precision='int8')", path=tmp_path / "net.int8.onnx", trust=True)
    alone, said = prepare("m1", str(tmp_path / "net.int8.onnx"), folder, threads=[1])
    assert [", int8, " in line for line in said] == [True, False]
    assert answer(alone) == pytest.approx(3.0, rel=0.01)
    int8_first(monkeypatch)
    source, said = prepare("m1", str(tmp_path / "net.onnx"), folder, threads=[1])
    assert [", int8, " in line for line in said] == [False, True, False]
    assert answer(source) == pytest.approx(3.0, rel=0.01)
    assert source.path.endswith(".int8.onnx")


def int8_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever net is faster on this machine, the one in int8 is taken for it."""
    from apportion.serving import prepare as module

    right = module.chosen

    def chosen(found: Sequence[TimedPreparation]) -> TimedPreparation:
        ends = [one.source.path.endswith(".int8.onnx") for one in found]
        return right([replace(one, seconds=0.0) if int8 else one for one, int8 in zip(found, ends, strict=True)])

    monkeypatch.setattr(module, "chosen", chosen)


@pytest.mark.thorough
def test_a_program_of_torch_is_served_at_every_length_that_it_takes(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 3)).eval()
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(network, (torch.ones(2, 6, dtype=torch.int64),), dynamic_shapes=(free,))
    torch.export.save(program, tmp_path / "net.pt2")
    source, _ = prepare("m1", str(tmp_path / "net.pt2"), tmp_path, threads=[1])
    served = source.open()
    assert [spec.shape for spec in (*served.inputs, *served.outputs)] == [(None, None), (None, None, 3)]
    for length in (1, 2, 6, 7, 30):
        words = torch.arange(2 * length).reshape(2, length) % 20
        found = served.run([words.numpy()], float("inf"))[0]
        np.testing.assert_allclose(found, network(words).detach().numpy(), rtol=1e-5, atol=1e-6)
    served.close()


def test_batches_can_be_turned_off(tmp_path: Path) -> None:
    from served import save_net

    save_net(tmp_path / "net.onnx", 1)
    for batch, said in ((True, "each row depends on itself alone"), (False, "computed one by one: batch=False")):
        source, lines = prepare("m1", str(tmp_path / "net.onnx"), tmp_path, threads=[1], batch=batch)
        assert source.batched is batch
        assert lines[-1].endswith(said)
