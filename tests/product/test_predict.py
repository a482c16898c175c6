"""``apportion.predict`` and ``apportion.evaluate``: what a trained network says of data, and how well it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from small_work import FILE

import apportion

Command = Callable[..., CompletedProcess[str]]
MORE = """
def inputs_alone():
    return [x for x, _ in rows()]
def few(count=10):
    return torch.utils.data.Subset(rows(), range(count))
"""

TWO = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = dense()
    def forward(self, x):
        found = self.net(x)
        return {"logits": found, "sum": found.sum(1)}

workload = work(model=Two, loss=lambda outputs, targets: nn.functional.cross_entropy(outputs["logits"], targets))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    (folder / "pyproject.toml").touch()
    (folder / "mine.py").write_text(FILE + MORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        apportion.train("mine.py:tested", "single_device", run_dir=folder / "run")
    return folder


@pytest.fixture(autouse=True)
def there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(1)


@pytest.mark.parametrize("source", ["mine.py:rows", "mine.py:inputs_alone", "mine.py:tested", "inputs.npz", "object"])
@pytest.mark.parametrize("batch_size", [7, 256])
def test_predictions_are_the_outputs_of_the_network(source: str, batch_size: int, run: Path, tmp_path: Path) -> None:
    inputs, _ = data()
    np.savez(run / "inputs.npz", x=inputs.numpy())
    given = torch.utils.data.TensorDataset(inputs) if source == "object" else source
    out = tmp_path / "outputs.npz"
    found = apportion.predict("run", given, out=out, batch_size=batch_size)
    with torch.no_grad():
        expected = apportion.load("run")(inputs)
    assert (found - expected).abs().max() < 1e-12
    with np.load(out) as file:
        assert (file["output"] == found.numpy()).all()


def test_the_metrics_are_those_of_the_evaluation(run: Path) -> None:
    inputs, targets = data()
    outputs = apportion.load("run")(inputs)
    assert apportion.evaluate("run") == {
        "accuracy": pytest.approx((outputs.argmax(1) == targets).double().mean().item())
    }
    ten = (outputs[:10].argmax(1) == targets[:10]).double().mean().item()
    assert apportion.evaluate("run", "mine.py:few(count=10)") == {"accuracy": pytest.approx(ten)}


def test_from_the_command_line(run: Path, apportion_command: Command) -> None:
    ran = apportion_command("predict", "run", "mine.py:few", "--out", "few.npz", cwd=run)
    assert ran.returncode == 0, ran.stderr
    assert "(10, 3)" in ran.stdout
    ran = apportion_command("evaluate", "run", "mine.py:few", cwd=run)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[0] == "accuracy"
    assert 0 <= float(ran.stdout.split()[1]) <= 1


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        pytest.param(("predict", "run", "mine.py:few", "--out", "few.csv"), 2, ".npz", marks=pytest.mark.thorough),
        pytest.param(("predict", "run", "nothing.npz", "--out", "a.npz"), 2, "nothing.npz", marks=pytest.mark.thorough),
        pytest.param(
            ("predict", "run", "mine.py:workload", "--out", "a.npz"), 2, "evaluation set", marks=pytest.mark.thorough
        ),
        pytest.param(
            ("predict", "run", "mine.py:dense", "--out", "a.npz"), 2, "Sequential", marks=pytest.mark.thorough
        ),
        pytest.param(("predict", "no/run", "mine.py:few", "--out", "a.npz"), 2, "no/run", marks=pytest.mark.thorough),
        (("predict", "run", "mine.py:few", "--out", "no/folder/a.npz"), 3, "no/folder"),
        pytest.param(("evaluate", "run", "mine.py:missing"), 2, "missing", marks=pytest.mark.thorough),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    arguments: tuple[str, ...], status: int, named: str, run: Path, apportion_command: Command
) -> None:
    ran = apportion_command(*arguments, cwd=run)
    assert ran.returncode == status, ran.stderr
    assert named in ran.stderr


def test_a_run_without_an_evaluation_has_no_metrics(run: Path) -> None:
    apportion.train("mine.py:workload", "single_device", run_dir=run / "plain")
    with pytest.raises(ValueError, match="has no evaluation"):
        apportion.evaluate("plain")


@pytest.mark.thorough
def test_outputs_of_several_tensors_are_written_one_by_one(run: Path, apportion_command: Command) -> None:
    (run / "two.py").write_text(FILE + TWO)
    ran = apportion_command("train", "two.py:workload", "single_device", "--run-dir", "two", cwd=run)
    assert ran.returncode == 0, ran.stderr
    found = apportion.predict("two", "two.py:rows", out=run / "two.npz")
    assert found["logits"].shape == (60, 3)
    with np.load(run / "two.npz") as file:
        assert (file["output_0"] == found["logits"].numpy()).all()
        assert (file["output_1"] == found["sum"].numpy()).all()
