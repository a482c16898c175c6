"""Nets in int8 and float16: smaller files that lose no more accuracy than was allowed, or none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from commands import SECONDS, finish, start
from published_resnets import IMAGES, MODELS, PUBLISHED, published_resnet, training_images, unseen_images
from sklearn.datasets import load_digits
from torch import Tensor, nn

import apportion
from apportion.api.export import Data, Examples
from apportion.exporting.exporter import export
from apportion.exporting.onnxruntime_session import metadata, session
from apportion.exporting.quantization import quantizers
from apportion.exporting.quantization.choice import fewest_kept
from apportion.exporting.quantization.files import LIMIT, described_processor, evaluator, this_processor
from apportion.exporting.target import Exported

INT8 = "onnx(precision='int8', most_lost=0.01)"


def digits_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@cache
def digits() -> tuple[nn.Module, Data]:
    """A convolutional net that knows the digits, and their examples: 1437 that it has learned, and 360 that it has
    not."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    torch.manual_seed(0)
    net = digits_net()
    order = torch.randperm(len(x))
    learned, held = order[:1437], order[1437:]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    for _ in range(6):
        for rows in learned[torch.randperm(len(learned))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    few = learned[:512]
    return net.eval(), Data(calibration=Examples(x[few], y[few]), held_out=Examples(x[held], y[held]))


@pytest.mark.thorough
def test_int8_is_smaller_and_as_right_as_was_allowed(tmp_path: Path) -> None:
    net, data = digits()
    float32 = export(net, torch.rand(2, 1, 8, 8), tmp_path / "net.onnx")
    made = export(net, torch.rand(2, 1, 8, 8), tmp_path / "net.int8.onnx", target=INT8, data=data)
    assert made.nbytes < 0.5 * float32.nbytes
    assert made.verification.held_out == 360
    assert made.verification.before["accuracy"] > 0.95
    assert made.verification.before["accuracy"] - made.verification.after["accuracy"] <= 0.01 + 1e-9
    assert made.verification.difference < LIMIT
    assert made.about["quantization"] == "static, per channel, QDQ"
    assert made.about["int8_layers"] == ["0", "2", "6", "8"]
    assert made.about["float32_layers"] == []
    assert made.about["weight_bits"] == this_processor().weight_bits
    said = metadata(tmp_path / "net.int8.onnx")
    assert said["apportion.precision"] == "int8"
    assert said["apportion.processors"].startswith(f"verified on {this_processor()}; weights of ")
    assert said["apportion.weights"] == metadata(tmp_path / "net.onnx")["apportion.weights"]
    speed = made.tables[0]
    assert {row[0] for row in speed.rows} == {"float32", "int8"}
    assert all(row[2] > 0 for row in speed.rows)
    assert "times as fast as float32 on this machine" in made.conclusion


@pytest.mark.thorough
def test_weights_are_as_narrow_as_was_asked_for(tmp_path: Path) -> None:
    net, data = digits()
    made = export(net, torch.rand(2, 1, 8, 8), tmp_path / "net.onnx", target=f"{INT8[:-1]}, weight_bits=7)", data=data)
    assert made.about["weight_bits"] == 7
    weights = [x for x in initializers(tmp_path / "net.onnx") if x.dtype == np.int8 and x.ndim > 1]
    assert len(weights) == 4
    assert max(int(np.abs(x.astype(int)).max()) for x in weights) == 64


def initializers(path: Path) -> list[Any]:
    return [onnx.numpy_helper.to_array(x) for x in onnx.load(path).graph.initializer]


@pytest.mark.thorough
def test_layers_that_lose_too_much_stay_in_float_and_are_named(tmp_path: Path) -> None:
    """One channel between the convolutions is ten thousand times as large as the others, and divided by as much after
    it: the same net, whose other channels are lost in 255 steps of the whole range."""
    net, data = digits()
    assert isinstance(net, nn.Sequential)
    assert data.calibration is not None
    spread = digits_net().eval()
    spread.load_state_dict(net.state_dict())
    with torch.no_grad():
        most = int(net[:2](data.calibration.inputs).mean((0, 2, 3)).argmax())
        spread[0].weight[most] *= 1e4
        spread[0].bias[most] *= 1e4
        spread[2].weight[:, most] /= 1e4
    made = export(spread, torch.rand(2, 1, 8, 8), tmp_path / "net.onnx", target=INT8, data=data)
    assert set(made.about["float32_layers"]) & {"0", "2"}
    assert "8" in made.about["int8_layers"]
    assert made.verification.before["accuracy"] - made.verification.after["accuracy"] <= 0.01 + 1e-9
    assert metadata(tmp_path / "net.onnx")["apportion.float32_layers"] == ", ".join(made.about["float32_layers"])


@pytest.mark.parametrize(
    ("needed", "kept"), [(0, []), (1, ["d"]), (2, ["d", "a"]), (3, ["d", "a", "c"]), (5, ["d", "a", "c", "b"])]
)
def test_the_most_sensitive_layers_are_kept_and_no_more_than_must_be(needed: int, kept: list[str]) -> None:
    errors = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 4.0}
    assert fewest_kept(list(errors), errors.__getitem__, lambda some: len(some) >= needed) == kept


class Tagger(nn.Module):
    """A recurrent net of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 16), nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(self.lstm(self.embedding(tokens))[0][:, -1])
        return found


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.block(x).mean(1))
        return found


DYNAMIC: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], str]] = {
    "recurrent": (Tagger, lambda n: torch.randint(0, 20, (n, 7)), "dynamic: lstm is recurrent (LSTM)"),
    "attention": (Attending, lambda n: torch.randn(n, 5, 16), "dynamic: block.self_attn is attention"),
}


@pytest.mark.parametrize("case", DYNAMIC)
@pytest.mark.thorough
def test_recurrent_and_transformer_nets_are_quantized_as_they_run(case: str, tmp_path: Path) -> None:
    make, inputs, why = DYNAMIC[case]
    torch.manual_seed(0)
    net = make().eval()
    calibration, held = inputs(64), inputs(40)
    with torch.no_grad():
        data = Data(calibration=Examples(calibration, net(calibration)), held_out=Examples(held, net(held)), metrics={})
    made = export(net, inputs(3), tmp_path / "net.onnx", target="onnx(precision='int8')", data=data)
    assert made.about["quantization"] == why
    assert made.about["int8_layers"]
    assert made.verification.difference < LIMIT
    assert any(x.dtype == np.int8 and x.ndim > 1 for x in initializers(tmp_path / "net.onnx"))


class Mixed(nn.Module):
    """Convolutions of groups, strides and dilations, uneven pads and both kinds of pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.second = nn.Conv2d(8, 8, (3, 1), padding=(2, 0), dilation=(2, 1), bias=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.first(nn.functional.pad(x, (1, 0, 2, 1)))), 3, 2, 1)
        found: Tensor = self.out(nn.functional.avg_pool2d(torch.sigmoid(self.second(x)), 2).mean((2, 3)))
        return found


def test_the_evaluator_computes_what_onnx_runtime_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Mixed().eval(), 5 * torch.randn(70, 4, 16, 16)
    with torch.no_grad():
        data = Data(calibration=Examples(x, net(x)))
    made = export(net, x[:2], tmp_path / "net.onnx", target="onnx(precision='int8')", data=data, check=[x])
    assert made.verification.examples == 73
    assert made.verification.difference < LIMIT
    assert made.about["float32_layers"] == []


def large_sums(folder: Path) -> tuple[Any, Any]:
    """The graph of a net whose sums of two products are as large as bytes allow, and inputs for it."""
    net = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.where(torch.arange(8)[:, None] % 2 == 0, 1.0, 0.9).expand(8, 64))
    export(net, torch.ones(2, 64), folder / "net.onnx")
    return onnx.load(folder / "net.onnx"), {"input": np.ones((2, 64), np.float32)}


@pytest.mark.parametrize("bits", [7, 8])
def test_the_evaluator_cuts_no_sum_off_where_a_processor_may(bits: int, tmp_path: Path) -> None:
    """Where this one does, a file of 8-bit weights differs by more than is allowed; one of 7 bits does nowhere."""
    model, feed = large_sums(tmp_path)
    made = quantizers.static(model, quantizers.ranges(model, [feed])["min-max"], weight_bits=bits, kept=[])
    (found,) = session(made.SerializeToString(), threads=1).run(None, feed)
    (expected,) = evaluator(made)(torch.ones(2, 64))
    np.testing.assert_allclose(expected, [[64.0, 57.6] * 4] * 2, rtol=0.01)
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    assert (difference > LIMIT) == (bits == 8 and this_processor().saturates)


@pytest.mark.parametrize(
    ("architecture", "flags", "bits", "said"),
    [
        ("x86_64", "sse4_2 avx2", 7, "without int8 dot products"),
        ("x86_64", "avx2 avx512f avx512_vnni", 8, "with int8 dot products (avx512_vnni)"),
        ("x86_64", "avx2 avx_vnni amx_int8", 8, "with int8 dot products (avx_vnni, amx_int8)"),
        ("aarch64", "asimd", 8, "without int8 dot products"),
        ("aarch64", "asimd asimddp", 8, "with int8 dot products (asimddp)"),
    ],
)
def test_a_processor_is_known_by_its_flags(architecture: str, flags: str, bits: int, said: str) -> None:
    key = "flags" if architecture == "x86_64" else "Features"
    text = f"processor\t: 0\nmodel name\t: Some CPU\n{key}\t\t: fpu {flags}\n\nprocessor\t: 1\nmodel name\t: Other\n"
    found = described_processor(text, architecture)
    assert found.weight_bits == bits
    assert str(found) == f"Some CPU ({architecture}), {said}"


@pytest.mark.thorough
def test_float16_halves_the_file_and_says_its_speed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64)).eval()
    float32 = export(net, torch.randn(2, 256), tmp_path / "net.onnx")
    made = export(net, torch.randn(2, 256), tmp_path / "net.float16.onnx", target="onnx(precision='float16')")
    assert 0.45 < made.nbytes / float32.nbytes < 0.53
    assert 0 < made.verification.difference < 0.005
    assert {row[0] for row in made.tables[0].rows} == {"float32", "float16"}
    assert metadata(tmp_path / "net.float16.onnx")["apportion.precision"] == "float16"


@pytest.mark.thorough
def test_what_cannot_be_quantized_is_refused_with_the_cure(tmp_path: Path) -> None:
    net, data = digits()
    sample = torch.rand(2, 1, 8, 8)
    cases: Sequence[tuple[Any, str, Data | None, str]] = (
        (net, "onnx(precision='bfloat16')", None, r"no arithmetic in bfloat16 on the CPU.*use 'float16'.*or 'int8'"),
        (net, "onnx(precision='int4')", None, r"precision='int4' must be float32, float16 or int8"),
        (net, "onnx(precision='int8', most_lost=-1)", None, r"most_lost=-1 must be the accuracy"),
        (net, "onnx(precision='int8', weight_bits=6)", None, r"weight_bits=6 must be 7 or 8, or None"),
        (net, "onnx(precision='int8')", None, r"there are none: give data=Data\(calibration="),
        (nn.Flatten(), "onnx(precision='int8')", data, r"no layer with weights .*: use precision=\"float32\""),
        (digits_net().double(), "onnx(precision='int8')", data, r"0.weight is torch.float64.*export model.float\(\)"),
    )
    for model, target, given, said in cases:
        x = sample.double() if "float64" in said else sample
        given = None if "float64" in said else given
        with pytest.raises(ValueError, match=said):
            export(model, x, tmp_path / "net.onnx", target=target, data=given)
    large = nn.Linear(8, 8)
    with torch.no_grad():
        large.weight[3, 3] = 1e5
    with pytest.raises(ValueError, match=r"weight has a weight beyond 65504, which float16 does not hold: use"):
        export(large, torch.ones(2, 8), tmp_path / "net.onnx", target="onnx(precision='float16')")
    assert list(tmp_path.iterdir()) == []


def test_a_report_lies_beside_the_file(tmp_path: Path) -> None:
    net, data = digits()
    made: Exported = apportion.export(net, torch.rand(2, 1, 8, 8), tmp_path / "a<b.onnx", target=INT8, data=data)
    page, told = tmp_path / "a<b.onnx.report.html", tmp_path / "a<b.onnx.report.json"
    assert set(made.reports) == {page, told}
    assert {path.name for path in tmp_path.iterdir()} == {"a<b.onnx", page.name, told.name}
    about = made.to_json()
    del about["reports"]
    assert json.loads(told.read_text()) == about
    assert about["nbytes"] == (tmp_path / "a<b.onnx").stat().st_size
    html = page.read_text()
    assert "a&lt;b.onnx" in html
    assert "a<b" not in html
    for part in ("Speed and size", "Choices", "How it was verified", "int8 layers", made.verification.reader):
        assert part in html


WORK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import apportion

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
asked = []

def worse_each_time(outputs, targets):
    asked.append(1)
    return torch.tensor(1.0 / len(asked))

def made(metric):
    return apportion.Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), data=lambda: data,
        loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=32, steps=12,
        evaluation=apportion.Evaluation(data=lambda: data, metrics={"accuracy": metric}),
    )

workload, worse = made(apportion.accuracy), made(worse_each_time)
"""
APPORTION = (sys.executable, "-m", "apportion")
WITHOUT = "import sys; sys.modules['onnxruntime'] = None; from apportion.cli.app import main; main()"


@pytest.mark.processes
@pytest.mark.thorough
def test_a_run_on_two_workers_is_exported_in_int8_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text(WORK)
    Path("pyproject.toml").touch()  # what lies here is the caller's own
    train = [*APPORTION, "train", "work.py:workload", "--strategy", "data_parallel", "--workers", "2"]
    finish([start([*train, "--run-dir", "run"])])
    (said,) = finish([start([*APPORTION, "export", "run", "--target", INT8])])
    assert said.startswith("run/model.int8.onnx: ")
    assert "accuracy on 256 held-out examples: " in said
    assert "report: run/model.int8.onnx.report.html" in said
    about = json.loads(Path("run/model.int8.onnx.report.json").read_text())
    assert about["about"]["precision"] == "int8"
    assert about["verifications"][0]["held_out"] == 256


@pytest.mark.slow
@pytest.mark.processes
def test_the_exit_status_says_whose_it_is_and_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text(WORK)
    Path("pyproject.toml").touch()
    train = [*APPORTION, "train", "work.py:worse", "--strategy", "single_device", "--run-dir", "run"]
    finish([start(train)])
    there = sorted(path.name for path in Path("run").iterdir())
    for command, status, said in (
        ([*APPORTION, "export", "run", "--target", INT8], 1, "points less at most were allowed; nothing was written"),
        ([*APPORTION, "export", "run", "--target", "onnx(precision='bfloat16')"], 2, "has no arithmetic in bfloat16"),
        ([sys.executable, "-c", WITHOUT, "export", "run"], 3, "onnxruntime"),
    ):
        process = start(command)
        text = process.communicate(timeout=SECONDS)[0]
        assert process.returncode == status, text
        assert said in text
    assert "pip install '.[onnx]'" in text
    assert sorted(path.name for path in Path("run").iterdir()) == there


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.data(IMAGES)
@pytest.mark.data(MODELS)
@pytest.mark.parametrize("depth", PUBLISHED)
def test_int8_of_a_published_resnet_loses_at_most_three_tenths_of_a_point(depth: int, tmp_path: Path) -> None:
    """Calibrated on training images, and judged on all 10,000 test images."""
    net, x = published_resnet(depth), unseen_images()
    data = Data(calibration=Examples(*training_images(1024)), held_out=Examples(*x))
    made = export(net, x[0][:2], tmp_path / "net.onnx", target="onnx(precision='int8')", data=data)
    found = made.verification
    assert found.held_out == 10_000
    assert found.before["accuracy"] == pytest.approx(PUBLISHED[depth], abs=5e-4)
    assert found.before["accuracy"] - found.after["accuracy"] <= 0.003 + 1e-9
    float32 = next(row[3] for row in made.tables[0].rows if row[0] == "float32")
    assert made.nbytes <= 0.32 * float32
