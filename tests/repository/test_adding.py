"""The pages on adding a strategy, a launcher and a target: their code works as it is, from outside of the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
STRATEGY, LAUNCHER, TARGET = (ROOT / "docs" / f"{name}.md" for name in (
    "add_a_strategy", "adding_a_launcher", "adding_a_target",
))  # fmt: skip
MOST_CODE, MOST_READ = 60, 1600
"""The lines of a strategy, and of the page with all that it refers to, comments included."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def installed(folder: Path, page: Path, change: str = "") -> None:
    """Install the module that a page gives an entry point into a folder, as pip would. ``change``: a method that is
    left out."""
    (table,) = blocks(page, "toml")
    group, name, value = re.fullmatch(r'\[project\.entry-points\."([\w.]+)"\]\n(\w+) = "(\w+:\w+)"\n', table).groups()  # type: ignore[union-attr]
    *_, code = (block for block in blocks(page, "python") if f"class {value.partition(':')[2]}(" in block)
    if change:
        code, cuts = re.subn(rf"    def {change}\(.*?\n\n(?=    def )", "", code, flags=re.DOTALL)
        assert cuts == 1
    (folder / f"{name}.py").write_text(code)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


def python(folder: Path, code: str, *arguments: str) -> str:
    """What a program in this folder prints, which finds there what is installed."""
    (folder / "program.py").write_text(code)
    path = os.pathsep.join([str(folder), str(ROOT / "tests" / "helpers"), str(ROOT / "src")])
    command = [sys.executable, *arguments, "program.py"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PROVE = """
import networks
import apportion
from proofs import assert_equal
if __name__ == "__main__":
    proof = apportion.check(networks.cases[{case!r}](61), "local_average", workers={workers}, steps=networks.STEPS)
    {then}
"""


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_strategy_of_the_page_is_the_one_device_step(workers: int, tmp_path: Path) -> None:
    installed(tmp_path, STRATEGY)
    python(tmp_path, PROVE.format(case="mlp", workers=workers, then="assert_equal(proof)"))


def test_what_the_strategy_does_not_refuse_the_proof_finds(tmp_path: Path) -> None:
    installed(tmp_path, STRATEGY, change="prepare")
    told = python(tmp_path, PROVE.format(case="batch_norm_1d", workers=2, then="print(proof.holds, proof)"))
    assert told.startswith("False")


def test_the_strategy_is_short_and_what_there_is_to_read_is_too() -> None:
    (code,) = blocks(STRATEGY, "python")
    assert code.count("\n") <= MOST_CODE
    pages = {
        STRATEGY,
        *((STRATEGY.parent / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", STRATEGY.read_text())),
    }
    assert sum(page.read_text().count("\n") for page in pages) <= MOST_READ
    assert f"fewer than {MOST_READ:,} lines" in STRATEGY.read_text()


WORKLOAD = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import apportion
from apportion.core.value import parse

def data():
    return TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))

def loss(outputs, targets):
    until = time.monotonic() + 30
    while os.getpriority(os.PRIO_PROCESS, 0) != {nice}:
        assert time.monotonic() < until
        time.sleep(0.01)
    return nn.functional.cross_entropy(outputs, targets)

if __name__ == "__main__":
    workload = apportion.Workload(
        model=lambda: nn.Linear(4, 2), data=data, loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=4, epochs=1,
    )
    end = apportion.train(workload, "data_parallel", launcher={launcher}, check=False)
    print(end.kind, end.step)
"""


def test_the_program_that_starts_ranks_does(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(blocks(LAUNCHER, "python")[0])
    code = WORKLOAD.format(nice=os.getpriority(os.PRIO_PROCESS, 0), launcher='apportion.env(device="cpu")')
    assert "end 2" in python(tmp_path, code, "launch.py", "2")


def test_the_launcher_of_the_page_lets_others_go_first(tmp_path: Path) -> None:
    installed(tmp_path, LAUNCHER)
    text = 'parse("polite(workers=2, device=\'cpu\', nice=7)", "apportion.runtime.launch")'
    assert python(tmp_path, WORKLOAD.format(nice=7, launcher=text)) == "end 2\n"


@pytest.mark.thorough
def test_the_launcher_of_several_hosts_of_the_page_starts_their_ranks(tmp_path: Path) -> None:
    *_, code = blocks(LAUNCHER, "python")
    (tmp_path / "docked.py").write_text(code)
    inside = """program=("sh", "-c", 'exec "$@"')"""
    text = f"""__import__("docked").Docked(containers=("a", "b"), workers=1, {inside})"""
    assert python(tmp_path, WORKLOAD.format(nice=os.getpriority(os.PRIO_PROCESS, 0), launcher=text)) == "end 2\n"


EXPORT = """
from pathlib import Path
import torch
from torch import nn
from apportion.exporting.exporter import export

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
made = export(model, torch.ones(3, 4), "net.pt2", target="pt2", check=[torch.ones(5, 4)])
print(made.target, made.verification.examples, Path("net.pt2").stat().st_size == made.nbytes)
"""


def test_the_target_of_the_page_computes_what_the_model_does(tmp_path: Path) -> None:
    installed(tmp_path, TARGET)
    assert python(tmp_path, EXPORT) == "pt2 9 True\n"


UNKNOWN = """
from apportion.core.value import find
try:
    find("pt3", "apportion.exporting.targets")
except ValueError as error:
    print(error)
"""


def test_a_name_that_is_nobodys_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    installed(tmp_path, TARGET)
    assert python(tmp_path, UNKNOWN) == "unknown target 'pt3': did you mean pt2?\n"
