"""``apportion check train.py``: a script that is not changed for it, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import apportion

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :2].sum(1, keepdim=True))
sampler = DistributedSampler(data, shuffle=True, seed=3)
loader = DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
factor = float(sys.argv[1]) if len(sys.argv) > 1 else dist.get_world_size()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y, reduction="sum") * factor
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
open("trained", "w").close()
dist.destroy_process_group()
"""
"""A sum in the loss, which is multiplied by the world size as DDP averages; with an argument it is not."""
ENDLESS = SCRIPT.replace("range(2)", "range(10**9)").replace("        optimizer.step()\n", "        print(1)\n")
SECONDS = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops" / "__init__.py").write_text("import torch")
    (tmp_path / "loops" / "train.py").write_text(SCRIPT)
    return tmp_path


# Wrong usage

WRONG = {
    "a strategy": (("train.py", "--strategy", "data_parallel"), "--strategy data_parallel", "is a script", "leave"),
    "hosts": (("train.py", "--hosts", "a,b"), "--hosts a,b", "is a script", "leave --hosts out"),
    "a launcher": (("train.py", "--launcher", "env"), "--launcher env", "is a script", "FILE:NAME"),
    "arguments without --": (("train.py", "--lr", "0.1"), "--lr", "follow --", "-- --lr 0.1"),
    "a word without --": (("train.py", "0.1"), "0.1", "follow --", "-- --lr 0.1"),
    "a missing file": (("trian.py",), "trian.py", "there is no file", "did you mean train.py"),
    "a module without -m": (("loops.train",), "loops.train", "is a module", "-m loops.train"),
    "a folder": (("loops",), "loops", "is a folder", "loops/train.py"),
    "a missing module": (("-m", "loops.trian"), "loops.trian", "there is no module", "dotted name"),
    "a path as a module": (("-m", "loops/train.py"), "loops/train.py", "takes the dotted name", "leave -m out"),
    "two scripts": (("-m", "loops.train", "train.py"), "train.py", "two scripts", "-- train.py"),
    "one rank": (("train.py", "--workers", "1"), "1 ranks", "one process is what", "from 2"),
    "too many ranks": (("train.py", "--nproc-per-node", "400"), "400 ranks", "on this machine", "to 64"),
    "no step": (("train.py", "--steps", "0"), "0", "range", "x>=1"),
    "an unknown finding": (("train.py", "--accept", "skiped_steps"), "skiped_steps", "not the name", "skipped_steps"),
    "a page in no folder": (("train.py", "--out", "no/page.html"), "no/page.html", "does not exist", "check.html"),
    "a page in place of the script": (("train.py", "--out", "./train.py"), "--out", "the script itself", "check.html"),
    "a page without a name": (("train.py", "--out", ""), "--out ''", "names no file", "check.html"),
    "a page of a workload": (("train.py:w", "--out", "a.html"), "--out", "goes with a script", "leave it out"),
    "arguments of a workload": (("train.py:w", "--strategy", "hogwild", "--", "x"), "'x'", "takes none", "leave them"),
    "nothing": ((), "Missing", "argument", "apportion check train.py"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ("a strategy", "one rank") else pytest.mark.thorough) for case in WRONG],
)
def test_wrong_usage_is_reported_before_torch_is_imported(case: str, folder: Path) -> None:
    arguments, *parts = WRONG[case]
    command = [sys.executable, "-X", "importtime", "-m", "apportion", "check", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    printed = " ".join(line for line in ended.stderr.splitlines() if not line.startswith("import time:"))
    printed = " ".join(printed.replace("│", " ").split())
    assert ended.returncode == 2, printed
    for part in parts:
        assert part in printed
    assert not imports_torch(ended.stderr)


def imports_torch(importtime: str) -> bool:
    return any(line.rpartition("|")[2].strip() == "torch" for line in importtime.splitlines())


def test_a_python_call_reports_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"did you mean train\.py"):
        apportion.check_script("trian.py")
    with pytest.raises(ValueError, match=r"must be a list of words, as \['--lr', '1'\]"):
        apportion.check_script("train.py", "--lr 1")
    with pytest.raises(ValueError, match="workers='2' must be a whole number"):
        apportion.check_script("train.py", workers="2")  # type: ignore[arg-type]


# Answers


class Page(HTMLParser):
    """The headings of a page, and all that it would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings, self.outside, self._in = list[str](), list[str](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        if tag in ("script", "link", "img", "iframe"):
            self.outside.append(tag)

    def handle_data(self, data: str) -> None:
        if self._in == "h2" and data.strip():
            self.headings.append(data)


@pytest.mark.processes
def test_a_mistake_is_named_with_its_factor_tensors_line_and_page(folder: Path) -> None:
    """The process that compares does not import torch, and the script's folder is as it was."""
    before = sorted(path.name for path in folder.iterdir())
    words = ["check", "train.py", "--workers", "2", "--steps", "6", "--json", "--out", "page.html", "--", "1"]
    command = [sys.executable, "-X", "importtime", "-m", "apportion", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 1, ended.stdout + ended.stderr[-500:]
    answer = json.loads(ended.stdout)
    assert (answer["status"], answer["verdict"]) == (1, "another network")
    first = answer["findings"][0]
    assert first["factor"] == pytest.approx(0.5)
    assert set(first["tensors"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert first["site"].startswith("train.py:")
    assert answer["compared"]["ranks"] == 2
    assert answer["compared"]["steps"] == 6
    table = answer["compared"]["table"]
    assert [tensor["ratios"] for tensor in table["tensors"]] == [[0.5, 0.5]] * 4
    rows = answer["compared"]["loaders"][0]["iterations"][0]
    assert sorted(index for rank in rows for batch in rank for index in batch) == list(range(48))
    assert not imports_torch(ended.stderr)
    page = Page((folder / "page.html").read_text())
    assert page.headings[:2] == ["What was found", "Which tensors differ, by step and rank"]
    assert "Which rows each rank read" in page.headings
    assert page.outside == []
    assert before == sorted(path.name for path in folder.iterdir() if path.name not in ("page.html", "trained"))


@pytest.mark.processes
@pytest.mark.thorough
def test_the_answer_is_printed_where_the_page_cannot_be_written(folder: Path) -> None:
    name = f"{'long' * 62}.html"  # a temporary name beside it is too long for the file system
    command = [sys.executable, "-m", "apportion", "check", "train.py", "--steps", "1", "--out", name]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 3
    assert ended.stdout.startswith("The same network")
    assert f"--out {name} was not written: " in ended.stderr


@pytest.mark.processes
@pytest.mark.thorough
def test_its_healthy_twin_is_the_same_network_as_a_module_too(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "apportion", "check", "-m", "loops.train", "--nproc_per_node=2", "--steps", "6"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, *_ = lines = ended.stdout.splitlines()
    assert first.startswith("The same network")
    assert any(line.startswith("Compared: 2 ranks, 6 steps, 4 tensors") for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in ended.stdout
    assert ended.stderr == ""


@pytest.mark.processes
@pytest.mark.slow
def test_a_finding_that_is_accepted_does_not_count(folder: Path) -> None:
    words = ["check", "train.py", "--steps", "4", "--", "1"]
    command = [sys.executable, "-m", "apportion", *words]
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS).stdout
    names = [line.rpartition(" ")[2] for line in printed.splitlines() if "accept with: --accept" in line]
    assert names
    command[-2:-2] = [word for name in names for word in ("--accept", name)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stdout
    assert "Accepted: " in ended.stdout


# Ends


def marked(token: str) -> list[int]:
    """The processes that have a text in their environment."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def with_torch(pids: list[int]) -> int:
    """How many of these processes have torch loaded: the ranks of a script that runs."""
    found = 0
    for pid in pids:
        try:
            found += "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
    return found


def until(condition: Any, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def going(folder: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A check of a script without end, whose ranks run, and what its processes have in their environment."""
    token = f"CHECK_{os.getpid()}_{tmp_path.name}"
    environment = {**os.environ, "A_CHECK": token}
    command = [sys.executable, "-m", "apportion", "check", "endless.py"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert until(lambda: with_torch(marked(token)) >= 2), "the ranks did not start"
        yield process, token
    finally:
        for pid in marked(token):
            os.kill(pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_check_that_is_ended_leaves_no_process(
    going: tuple[subprocess.Popen[str], str], number: signal.Signals, status: int
) -> None:
    process, token = going
    process.send_signal(number)
    printed = process.communicate(timeout=20)[0]
    assert process.returncode == status
    assert until(lambda: not marked(token)), marked(token)
    assert printed.strip() == ("interrupted" if number == signal.SIGINT else "")
