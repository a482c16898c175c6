"""Nets as files: what the file computes is what the net computes, or there is no file."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import SECONDS, finish, start
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import apportion
from apportion.api import export as api
from apportion.api.export import export_run
from apportion.core.value import parse
from apportion.errors import ApportionError, NotVerified
from apportion.exporting.exporter import PACKAGE, Data, export
from apportion.exporting.onnxruntime_session import session
from apportion.exporting.target import Examples, Reading
from apportion.exporting.targets.onnx import Onnx
from apportion.process import is_alive


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 12, 2, batch_first=True)
        self.out = nn.Linear(12, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(self.lstm(self.embedding(tokens))[0][:, -1])
        return found


class TwoInTwoOut(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": left + right, "difference": left - 2 * right}


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(8, 4),
    )  # fmt: skip


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


CASES: dict[str, tuple[Any, Any]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)), torch.randn(1, 6)),
    "convolutional": (convolutional, torch.randn(3, 3, 12, 12)),
    "recurrent": (Recurrent, torch.randint(0, 20, (2, 7))),
    "attention": (attention, torch.randn(2, 5, 16)),
    "two inputs by position": (TwoInTwoOut, (torch.randn(2, 3), torch.randn(2, 3))),
    "two inputs by name": (TwoInTwoOut, {"right": torch.randn(2, 3), "left": torch.randn(2, 3)}),
}


def more(sample: Any) -> Any:
    """Seven examples of the same."""
    if isinstance(sample, Mapping):
        return {name: more(x) for name, x in sample.items()}
    return tuple(map(more, sample)) if isinstance(sample, tuple) else sample[torch.arange(7) % len(sample)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough
def test_the_file_computes_what_the_net_computes_for_any_number_of_examples(case: str, tmp_path: Path) -> None:
    make, sample = CASES[case]
    torch.manual_seed(0)
    net = make().train()
    made = export(net, sample, tmp_path / "net.onnx", check=[more(sample)])
    assert made.verification.difference < 1e-5
    assert made.verification.examples >= 8
    assert made.nbytes == (tmp_path / "net.onnx").stat().st_size
    assert all(part.training for part in net.modules()), "the net is left as it was"
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]
    assert all(value["shape"][0] is None for value in (*made.about["inputs"], *made.about["outputs"]))


@pytest.mark.thorough
def test_inputs_by_name_keep_their_names_and_places(tmp_path: Path) -> None:
    left, right = torch.full((2, 3), 5.0), torch.full((2, 3), 2.0)
    made = export(TwoInTwoOut(), {"right": right, "left": left}, tmp_path / "net.onnx")
    assert {value["name"] for value in made.about["inputs"]} == {"left", "right"}
    assert [value["name"] for value in made.about["outputs"]] == ["sum", "difference"]
    computed = session(made.path, threads=1).run(None, {"left": left.numpy(), "right": right.numpy()})
    assert [float(one[0, 0]) for one in computed] == [7.0, 1.0]


def test_examples_by_name_may_come_in_any_order_and_other_names_are_refused(tmp_path: Path) -> None:
    left, right = torch.randn(2, 3), torch.randn(2, 3)
    path = tmp_path / "net.onnx"
    export(TwoInTwoOut(), {"right": right, "left": left}, path, check=[{"left": left[:1], "right": right[:1]}])
    with pytest.raises(ValueError, match=r"inputs have \['left', 'up'\], and those of sample= are \['left', 'right'\]"):
        export(TwoInTwoOut(), {"right": right, "left": left}, path, check=[{"left": left, "up": right}])


def test_a_folder_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder: give the file's name, such as .*model\.onnx"):
        export(nn.Linear(3, 2), torch.randn(2, 3), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_gives_several_rows_for_an_example_is_judged_by_its_own_targets(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.Flatten(0, 1))
    tokens = torch.randint(0, 5, (600, 3), generator=torch.Generator().manual_seed(0))

    def right(outputs: Tensor, targets: Tensor) -> float:
        return float((outputs.argmax(1) == targets.reshape(-1)).double().mean())

    with torch.no_grad():
        own = net(tokens).argmax(1).reshape(600, 3)
    targets = torch.where(torch.arange(600)[:, None] < 450, own, own + 1)
    data = Data(held_out=Examples(tokens, targets), metrics={"right": right})
    made = export(net, tokens[:2], tmp_path / "net.onnx", data=data).verification
    assert (made.held_out, made.before, made.after) == (600, {"right": 0.75}, {"right": 0.75})


def test_what_a_loss_of_accuracy_could_not_be_told_of_is_said(tmp_path: Path) -> None:
    target = "verilog(verify='simulated', place=False)"
    made = export(nn.Linear(3, 2), torch.rand(4, 3), tmp_path / "net.v", target=target)
    assert "that no more than 0.02 of it is lost was not checked" in made.conclusion


def test_a_net_that_decides_by_its_numbers_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Deciding cannot be exported to ONNX: .+"):
        export(Deciding(), torch.randn(2, 3), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


class Narrow(nn.Module):
    """bfloat16 in and out, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x.float() + 1).bfloat16()


def test_bfloat16_in_and_out_is_held_against_the_net(tmp_path: Path) -> None:
    made = export(Narrow(), torch.randn(2, 3).bfloat16(), tmp_path / "net.onnx")
    assert made.verification.difference == 0.0
    assert made.about["outputs"] == [{"name": "output", "shape": [None, 3], "type": "tensor(bfloat16)"}]


def test_a_net_that_computes_in_bfloat16_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be run by ONNX Runtime on the CPU: .+: export model\.float\(\)"):
        export(nn.Linear(3, 2).bfloat16(), torch.randn(2, 3).bfloat16(), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_something_else_is_not_given_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Onnx.read

    def wrong(*a: Any) -> list[Reading]:
        return [replace(one, outputs=[[y * np.float32(1.001) for y in ys] for ys in one.outputs]) for one in right(*a)]

    monkeypatch.setattr(Onnx, "read", wrong)
    with pytest.raises(NotVerified, match=r"something else than the model: outputs by .* differ by 0.001"):
        export(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_reader_that_names_what_it_must_compute_is_held_to_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Onnx.read
    net = nn.Linear(3, 2)

    def another(inputs: Tensor) -> list[Any]:
        return [2 * net(inputs).detach().numpy()]

    def twice(*a: Any) -> list[Reading]:
        return [replace(one, outputs=[[2 * y for y in ys] for ys in one.outputs]) for one in right(*a)]

    monkeypatch.setattr(Onnx, "read", lambda *a: [replace(one, reference=another) for one in twice(*a)])
    assert export(net, torch.randn(2, 3), tmp_path / "net.onnx").verification.difference < 1e-6
    (tmp_path / "net.onnx").unlink()
    monkeypatch.setattr(Onnx, "read", lambda *a: [replace(one, reference=another) for one in right(*a)])
    with pytest.raises(NotVerified, match=r"something else than .* differ by 0\.5"):
        export(net, torch.randn(2, 3), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["onnx", "spiking(timesteps=4)", "verilog(verify='simulated', place=False)"])
def test_a_disk_without_room_is_named_and_nothing_is_left(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every target: some write by libraries that end the process where they find no room."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a module that is imported now would be cut off for good
    net = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))
    x = torch.randn(64, 40)
    data = Data(calibration=Examples(x, torch.arange(64) % 3))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, before[1]))
    try:
        with pytest.raises(ApportionError, match=r"net could not be written: .*; free some of the disk"):
            export(net, x, tmp_path / "net", target=target, data=data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_wrong_uses_say_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder .* does not exist: make it first"):
        export(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "none" / "net.onnx")
    with pytest.raises(ValueError, match="dimension 0 is the example, as many in each"):
        export(TwoInTwoOut(), (torch.randn(2, 3), torch.randn(4, 3)), tmp_path / "net.onnx")
    with pytest.raises(ValueError, match="unknown target 'onxx': did you mean onnx"):
        export(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "net.onnx", target="onxx")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("onnx(opset='20')", "opset='20' must be a whole number or None"),
        ("onnx(opset=True)", "opset=True must be a whole number or None"),
        ("onnx(weight_bits=7.0)", "weight_bits=7.0 must be a whole number or None"),
        ("onnx(precision=['int8'])", "precision=['int8'] must be a text"),
        ("onnx(precision='int8', most_lost='x')", "most_lost='x' must be a number"),
        ("spiking(timesteps=True)", "timesteps=True must be a whole number or a text"),
        ("spiking(dialect=['nir'], timesteps=2)", "dialect=['nir'] must be a text"),
        ("spiking(most_lost='x', timesteps=2)", "most_lost='x' must be a number"),
        ("verilog(clock_mhz='fast')", "clock_mhz='fast' must be a number or None"),
        ("verilog(most_lost=-1)", "most_lost=-1 must be the accuracy that may be lost"),
        ("verilog(place='no')", "place='no' must be True or False"),
        ("stablehlo(topology=5)", "topology=5 must be a text or None"),
        ("stablehlo(platforms=['tpu'])", "platforms=['tpu'] must be several in brackets"),
        ("stablehlo(platforms=(['tpu'],))", "platforms=(['tpu'],) must be some of tpu"),
        ("stablehlo(training='no')", "training='no' must be True or False"),
    ],
)
def test_a_parameter_of_a_wrong_type_is_refused_by_its_name(target: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(said)}"):
        parse(target, PACKAGE)


@pytest.mark.parametrize("opset", [3, 99])
@pytest.mark.cases(2)
def test_an_opset_that_would_become_another_is_refused(opset: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"opset={opset} is none that torch writes, which has made [0-9]+ of it"):
        export(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "net.onnx", target=f"onnx(opset={opset})")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_judged_by_examples_of_all_classes_and_tuned_on_those_that_chose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "CALIBRATION", 20)
    monkeypatch.setattr(api, "HELD_OUT", 10)
    ordered = TensorDataset(torch.arange(60.0)[:, None], torch.arange(60) // 15)  # by classes, as folders are

    def halved(items: list[Any]) -> Any:
        inputs, targets = default_collate(items)
        return inputs / 2, targets

    workload = apportion.Workload(
        model=lambda: nn.Linear(1, 4), data=lambda: ordered, loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4, steps=1, collate=halved,
        evaluation=apportion.Evaluation(data=lambda: ordered, metrics={}),
    )  # fmt: skip
    data = api._data(workload, ordered)
    assert data.held_out is not None
    assert data.held_out.targets.unique().tolist() == [0, 1, 2, 3]
    assert data.calibration is not None
    assert data.training is not None
    chosen = set((2 * data.calibration.inputs).flatten().tolist())
    trained = {float(data.training[n][0]) for n in range(40)}
    assert len(chosen) == 20
    assert chosen | trained == set(range(60))
    assert data.collate is halved


WORK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import apportion

x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
workload = apportion.Workload(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), data=lambda: data,
    loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=32, steps=12,
)
"""
STATE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.RNN(8, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, state):
        found, state = self.rnn(x[:, None], state)
        return self.out(found[:, -1]), state


recurrent = apportion.Workload(
    model=Net, data=lambda: data, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    batch_size=32, steps=3, order="sequential", carry=lambda n: torch.zeros(1, n, 4),
)
"""
APPORTION = (sys.executable, "-m", "apportion")


@pytest.mark.processes
@pytest.mark.thorough
def test_a_run_is_exported_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text(WORK)
    Path("pyproject.toml").touch()  # what lies here is the caller's own
    finish([start([*APPORTION, "train", "work.py:workload", "--strategy", "single_device", "--run-dir", "run"])])
    (said,) = finish([start([*APPORTION, "export", "run"])])
    assert said.startswith("run/model.onnx: ")
    assert "computes 65 examples with outputs that differ by " in said
    x = torch.randn(5, 8)
    with torch.no_grad():
        expected = apportion.load("run")(x).numpy()
    (found,) = session("run/model.onnx", threads=1).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    command = [
        *APPORTION,
        "export",
        "run/checkpoints/latest",
        "--target",
        "onnx(opset=20)",
        "--out",
        "net.onnx",
        "--json",
    ]
    told = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=True).stdout
    about = json.loads(told)
    assert (about["path"], about["about"]["opset"]) == ("net.onnx", 20)
    assert Path("net.onnx").stat().st_size == about["nbytes"]


@pytest.mark.processes
def test_what_is_no_run_is_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = start([*APPORTION, "export", "."])
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 2, text
    assert "holds no run (it has no run.json): give the folder of one" in text


ENDLESS = """#!/bin/sh
cd "$KEPT"
sleep 300 &
echo $! >pids.new
echo $$ >>pids.new
mv pids.new pids
wait
"""
"""A simulator that never ends, nor what it has started."""


@pytest.mark.processes
@pytest.mark.thorough
def test_an_export_that_is_told_to_end_clears_away_what_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text(WORK)
    Path("pyproject.toml").touch()
    finish([start([*APPORTION, "train", "work.py:workload", "--strategy", "single_device", "--run-dir", "run"])])
    before = sorted(Path("run").iterdir())
    Path("bin").mkdir()
    Path("bin/iverilog").write_text(ENDLESS)
    Path("bin/iverilog").chmod(0o755)
    target = "verilog(place=False, most_lost=None)"
    process = start(
        [*APPORTION, "export", "run", "--target", target],
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        KEPT=str(tmp_path),
    )
    until = time.monotonic() + SECONDS
    while not Path("pids").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "the simulator has not started"
        time.sleep(0.05)
    process.terminate()
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 128 + signal.SIGTERM, text
    started = [int(line) for line in Path("pids").read_text().split()]
    while any(map(is_alive, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, started))
    assert sorted(Path("run").iterdir()) == before


@pytest.mark.processes
def test_a_net_that_takes_a_state_is_refused_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text(WORK + STATE)
    Path("pyproject.toml").touch()
    apportion.train("work.py:recurrent", "single_device", run_dir=tmp_path / "run", check=False)
    with pytest.raises(ValueError, match=r"takes a state besides its inputs \(carry=\).*\(inputs, state\), path\)"):
        export_run(tmp_path / "run")
