"""Nets for TPUs: what is lowered for a TPU is run by jax on the CPU, and computes what torch does.

jax and torchax are in an environment of their own: each test lowers in a process that has it on its path.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import finish, start
from published_resnets import IMAGES, MODELS
from stablehlo_cases import CASES, TPU

from apportion.cli.failures import EXTRAS
from apportion.core.value import parse
from apportion.exporting.exporter import PACKAGE
from apportion.exporting.targets import stablehlo
from apportion.exporting.tpu import cost

HELPERS = Path(__file__).parents[1] / "helpers"
SECONDS = 500
NEEDS = pytest.mark.skipif(
    not (TPU / "jax").is_dir(), reason=f"needs jax in {TPU}: scripts/test slow installs it there"
)
COLD = pytest.mark.usefixtures("cold_programs")  # jax begins in a process of its own
DECIDES = "cannot be lowered for TPUs: it decides by the numbers in a tensor.*torch.where"
REFUSED = {
    "deciding": rf"^layer 1\.1 \(Deciding\) {DECIDES}",
    "selecting": rf"^layer 1\.1 \(Selecting\) {DECIDES}",
    "counting": rf"^layer 1\.1 \(Counting\) {DECIDES}",
    "noisy": r"^layer 1\.1 \(Noisy\) draws random numbers \(aten\.\w+\.\w+\), and jax draws others.*use nn\.Dropout",
    "float64": r"^layer 0 \(Linear\) holds weight in float64, which no TPU has: export model\.float\(\)",
    "loss decides": rf"^the loss {DECIDES}",
    "loss of each": r"the loss has the shape \(4,\) and must be one number: give its mean",
}
NO_STEP = {
    "two inputs": "it has no loss, or no examples for calibration",
    "nothing to train": "no parameter is trained",
}
ONE_BY_ONE = ("recurrent", "transformer")


def lowered(folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    """Export these cases in one process, and return what it told of each."""
    command = [sys.executable, str(HELPERS / "stablehlo_cases.py"), str(folder), *names]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [one["case"] for one in told] == list(names), ended.stdout
    return {one["case"]: one for one in told}


def assert_it_is_what_torch_computes(name: str, told: dict[str, Any]) -> None:
    """Assert what holds of every exported case."""
    assert "failed" not in told, told.get("failed")
    assert "refused" not in told, told
    (verification,) = told["verifications"]
    assert verification["reader"].startswith("jax ")
    assert verification["difference"] <= 1e-5
    assert {"tpu", "cpu"} <= set(told["about"]["platforms"])
    assert told["about"]["run_on"] == ["cpu"]
    assert "not on a TPU" in told["conclusion"]
    assert told["left_as_it_was"], "the net is left as it was"
    assert told["fast_path"], "what torchax turns off for the whole process is on again"
    programs, costs = told["tables"]
    rows = [row[:2] for row in programs["rows"]]
    why = NO_STEP.get(name)
    if why is not None:
        assert rows == [["forward", "outputs"], ["step", f"left out: {why}"]]
    else:
        assert rows == [["forward", "outputs"], ["step", "loss"], ["step", "gradients"], ["step", "weights"]]
        assert all(float(row[-1]) <= 1e-5 for row in programs["rows"][1:])
    assert all(row[2] >= 0 and row[4] > 0 for row in costs["rows"])


@NEEDS
@COLD
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.data(IMAGES, MODELS)
@pytest.mark.timeout(SECONDS)
def test_in_float64_the_training_step_of_a_resnet_is_torchs_but_for_the_last_digits() -> None:
    """What differs in float32 is rounding, which the gradients of a batch may enlarge a thousandfold."""
    command = [sys.executable, str(HELPERS / "step_in_float64.py")]
    given = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=given)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(told) == 3
    for one in told:
        assert one["bits"] == 64
        assert one["largest gradient"] > 1e-3
        assert max(one["loss"], one["gradients"], one["weights"]) <= 1e-10


@NEEDS
@COLD
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(SECONDS)
def test_small_nets_and_their_training_steps_are_what_torch_computes(tmp_path: Path) -> None:
    names = [name for name in CASES if name not in REFUSED and name not in ONE_BY_ONE]
    told = lowered(tmp_path, *names)
    for name in names:
        assert_it_is_what_torch_computes(name, told[name])
    assert told["dense"]["about"]["dropout_left_out"] == ["2 (p=0.5)"]
    assert told["dense"]["opened"] == [[4, 3]]
    assert told["dense"]["in_float32"]
    assert not told["fast"]["in_float32"]
    assert told["dense"]["about"]["batch"] is None
    assert told["one batch size"]["about"]["batch"] == told["one batch size"]["about"]["training_batch"] == 4
    assert told["one batch size"]["verifications"][0]["examples"] == 4 + 1 + 7
    assert [x["name"] for x in told["two inputs"]["about"]["inputs"]] == ["right", "left"]
    assert [x["name"] for x in told["two inputs"]["about"]["outputs"]] == ["sum", "product"]
    assert told["regression"]["about"]["platforms"] == ["tpu", "cuda", "cpu"]
    assert list(tmp_path.iterdir()) == []


@NEEDS
@COLD
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_lstm_and_attention_are_what_torch_computes_for_any_number_of_examples(name: str, tmp_path: Path) -> None:
    told = lowered(tmp_path, name)[name]
    assert_it_is_what_torch_computes(name, told)
    assert told["about"]["batch"] is None
    assert told["verifications"][0]["examples"] >= 4 + 1 + 7


@NEEDS
@COLD
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(SECONDS)
def test_what_no_program_for_a_tpu_is_is_refused_by_layer_name_with_the_cure(tmp_path: Path) -> None:
    told = lowered(tmp_path, *REFUSED)
    for name, pattern in REFUSED.items():
        assert "refused" in told[name], told[name]
        assert re.search(pattern, told[name]["refused"], re.DOTALL), (name, told[name]["refused"])
        assert told[name]["left"] == []


WITHOUT_ROOM = """
import resource, sys, warnings
sys.path[:0] = [{helpers!r}]
sys.path.append({tpu!r})
sys.dont_write_bytecode = True  # a module that is imported then would be cut off for good
warnings.simplefilter("ignore")
from apportion.errors import ApportionError
from apportion.exporting.exporter import export
from stablehlo_cases import CASES
case = CASES["dense"]
resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
try:
    export(case.net(), case.inputs, "net.stablehlo", target="stablehlo")
except ApportionError as error:
    print(error)
"""


@NEEDS
@COLD
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(SECONDS)
def test_a_disk_without_room_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    text = WITHOUT_ROOM.format(helpers=str(HELPERS), tpu=str(TPU))
    ended = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True
    )
    assert re.search("net.stablehlo could not be written: .*; free some of the disk", ended.stdout), ended.stdout
    assert list(tmp_path.iterdir()) == []


PLANTED = """
import sys, warnings
sys.path[:0] = [{helpers!r}]
sys.path.append({tpu!r})
warnings.simplefilter("ignore")
import torch
from torch import nn
from apportion.errors import NotVerified
from apportion.exporting.exporter import Data, export
from apportion.exporting.target import Examples
from apportion.exporting.tpu import lowering
from stablehlo_cases import CASES
right = lowering.{name}
def wrong(*a):
    made = right(*a)
    return lambda *b: {wrong}
lowering.{name} = wrong
case = CASES["dense"]
data = Data(calibration=Examples(case.inputs, case.targets), loss=case.loss)
try:
    export(case.net(), case.inputs, "net.stablehlo", target="stablehlo", data=data)
except NotVerified as error:
    print(error)
"""


@NEEDS
@COLD
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("forward_of", "made(*b) * 1.0001", "something else than the model"),
        ("step_of", "(made(*b)[0], {k: v * 1.0001 for k, v in made(*b)[1].items()}, made(*b)[2])",
         "the training step computes another gradient of"),
        ("step_of", "(*made(*b)[:2], {k: v * 1.0001 for k, v in made(*b)[2].items()})",
         r"the training step computes another \d\."),
    ],
)  # fmt: skip
def test_a_program_that_computes_something_else_is_not_given_out(
    name: str, wrong: str, said: str, tmp_path: Path
) -> None:
    text = PLANTED.format(helpers=str(HELPERS), tpu=str(TPU), name=name, wrong=wrong)
    ended = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert re.search(said, ended.stdout), (ended.stdout, ended.stderr)
    assert list(tmp_path.iterdir()) == []


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
APPORTION = (sys.executable, "-m", "apportion")


def trained_run(folder: Path) -> None:
    """Train a small net on two workers into folder/run."""
    (folder / "work.py").write_text(WORK)
    (folder / "pyproject.toml").touch()  # what lies here is the caller's own
    strategy = ("--strategy", "data_parallel", "--workers", "2")
    finish([start([*APPORTION, "train", "work.py:workload", *strategy, "--run-dir", "run"])])


@NEEDS
@COLD
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.skipif(not (TPU / "libtpu").is_dir(), reason="there is no libtpu for this kind of machine")
def test_a_net_that_two_workers_trained_is_lowered_and_compiled_for_a_tpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained_run(tmp_path)
    status, said = exported_for("v5e:2x2")
    assert status == 0, said
    told = json.loads(said[said.index("{") :])
    assert told["path"] == "run/model.stablehlo"
    assert told["verifications"][0]["difference"] <= 1e-5
    compiled = [row[:2] for row in told["tables"][1]["rows"]]
    assert compiled == [
        *(["XLA, CPU", name] for name in ("forward", "step")),
        *(["libtpu, one v5e", name] for name in ("forward", "step")),
    ]
    assert "libtpu has compiled forward, step for one v5e chip without having one" in told["conclusion"]
    assert all(row[2] > 0 and row[7] > 0 for row in told["tables"][1]["rows"][2:]), "operations, and bytes of code"
    there = sorted(path.name for path in Path("run").iterdir())
    status, said = exported_for("v9:2x2")
    assert status == 2, said
    assert "topology='v9:2x2' is none that libtpu compiles for (" in said
    assert sorted(path.name for path in Path("run").iterdir()) == there


def exported_for(topology: str) -> tuple[int, str]:
    """Export the run in the folder run for a topology; return the exit status, and what was said."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TPU)])
    target = f"stablehlo(platforms=('tpu',), topology={topology!r})"
    process = start([*APPORTION, "export", "run", "--target", target, "--json"], PYTHONPATH=path)
    try:
        said = process.communicate(timeout=SECONDS)[0]
    finally:
        process.kill()
    return process.returncode, said


COST = {
    "flops": 2.0, "bytes_moved": 3.0, "argument_bytes": 4, "output_bytes": 5, "temporary_bytes": 6, "code_bytes": 7,
    "predicted_s": None, "compile_s": 8.0,
}  # fmt: skip


@pytest.mark.parametrize(("status", "why"), [(0, ""), (1, "the last line")])
def test_what_the_process_of_libtpu_prints_are_the_costs(
    status: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []

    def run(command: Any, **others: Any) -> Any:
        asked.append((command, others["cwd"]))
        printed = "a word\n" + "".join(json.dumps({"program": x, **COST}) + "\n" for x in ("forward", "step"))
        return subprocess.CompletedProcess(command, status, printed.encode(), b"a line\nthe last line\n")

    monkeypatch.setattr(cost.subprocess, "run", run)
    found = cost.on_tpu(Path("net.stablehlo"), "v5e:2x2", 4)
    assert found == ({name: cost.ProgramCost(**COST) for name in ("forward", "step")}, why)
    ((command, folder),) = asked
    assert Path(folder) / command[3] == tmp_path / "net.stablehlo", "wherever the process runs, it is this file"
    monkeypatch.setattr(
        cost.subprocess, "run", lambda *a, **_: subprocess.CompletedProcess(a, 0, b'{"unknown": "no TPU v9"}', b"")
    )
    with pytest.raises(ValueError, match=r"topology='v9:2x2' is none that libtpu compiles for \(no TPU v9\): give one"):
        cost.on_tpu(Path("net.stablehlo"), "v9:2x2", 4)


def test_a_topology_without_libtpu_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cost, "version", missing)
    with pytest.raises(ModuleNotFoundError, match="libtpu") as caught:
        cost.ask_for_libtpu()
    assert EXTRAS[caught.value.name or ""] == "tpu"


@pytest.mark.processes
@pytest.mark.thorough
def test_without_jax_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained_run(tmp_path)
    hidden = tmp_path / "hidden" / "jax"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\", name='jax')\n")
    path = os.pathsep.join([str(hidden.parent), os.environ.get("PYTHONPATH", "")])
    process = start([*APPORTION, "export", "run", "--target", "stablehlo"], PYTHONPATH=path)
    text = process.communicate(timeout=110)[0]
    assert process.returncode == 3, text
    assert "No module named 'jax': in a clone of apportion, pip install '.[tpu]'" in text
    assert not Path("run/model.stablehlo").exists()


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
def test_a_program_of_four_examples_computes_any_number_of_them(count: int) -> None:
    sizes: list[int] = []

    def run(weights: Any, x: Any) -> tuple[Any, Any]:
        sizes.append(len(x))
        return x * weights["w"], x + 1

    x = np.arange(2.0 * count).reshape(count, 2)
    found = stablehlo._in_pieces(run, {"w": 3.0}, [x], 4)
    assert set(sizes) == {4}
    np.testing.assert_array_equal(found[0], 3 * x)
    np.testing.assert_array_equal(found[1], x + 1)


def test_wrong_uses_say_the_cure() -> None:
    for text, said in {
        "stablehlo(platforms=('gpu',))": r"platforms=\('gpu',\) must be some of tpu, cpu, cuda, rocm",
        "stablehlo(platforms='tpu')": r"platforms='tpu' must be several in brackets",
        "stablehlo(precision='bfloat16')": r"precision='bfloat16' must be one of highest, high, default",
        "stablehlo(topology='v5e')": r"topology='v5e' must be written as libtpu does, 'v5e:2x2'",
    }.items():
        with pytest.raises(ValueError, match=said):
            parse(text, PACKAGE)
    assert str(parse("stablehlo(platforms=('tpu',))", PACKAGE)) == "stablehlo"
