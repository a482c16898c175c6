"""The programs that a circuit is run and placed by: interrupted, killed, too slow, and files of any name."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from apportion.errors import ApportionError
from apportion.exporting.exporter import export
from apportion.exporting.fpga.tools import programs, simulators
from apportion.exporting.fpga.tools.sat import proved_limits
from apportion.exporting.fpga.verilog_reader import circuit_in
from apportion.exporting.targets.verilog import Verilog
from apportion.process import is_alive

pytestmark = pytest.mark.processes
ENDLESS = """
sleep 300 &
echo $! >pids.new
echo $$ >>pids.new
mv pids.new pids
wait
"""
"""A program that has started another one, as yosys starts abc; it writes the numbers of both."""


def pids(folder: Path) -> list[int]:
    until = time.monotonic() + 30
    while not (folder / "pids").exists():
        assert time.monotonic() < until, "the program has not started"
        time.sleep(0.01)
    return [int(line) for line in (folder / "pids").read_text().split()]


def ended(numbers: list[int]) -> bool:
    until = time.monotonic() + 10
    while any(is_alive(pid) for pid in numbers) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(is_alive(pid) for pid in numbers)


def when_started(folder: Path, then: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: (pids(folder), then()))
    thread.start()
    return thread


def test_an_interrupt_ends_a_program_and_what_it_has_started(tmp_path: Path) -> None:
    thread = when_started(tmp_path, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        programs.run(tmp_path, "sh", "-c", ENDLESS)
    thread.join()
    assert ended(pids(tmp_path))


def test_a_program_that_takes_too_long_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    with pytest.raises(ApportionError, match=r"sh has not ended within 1 s: make the network smaller"):
        programs.run(tmp_path, "sh", "-c", ENDLESS, seconds=1.0)
    assert ended(pids(tmp_path))


def test_a_program_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    with pytest.raises(ApportionError, match="sh was ended by SIGKILL from outside"):
        programs.run(tmp_path, "sh", "-c", "kill -9 $$")


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ApportionError, match=r"sh ended with status 4: ERROR: no such thing"):
        programs.must_run(tmp_path, "sh", "-c", "echo begins; echo ERROR: no such thing; exit 4")


def test_an_export_that_is_interrupted_leaves_no_file_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, out = tmp_path / "bin", tmp_path / "out"
    found.mkdir()
    out.mkdir()
    (found / "iverilog").write_text(f"#!/bin/sh\ncd {tmp_path}\ntouch $TMPDIR/partial\n{ENDLESS}")
    (found / "iverilog").chmod(0o755)
    monkeypatch.setenv("PATH", f"{found}:{os.environ['PATH']}")
    before = set(Path(tempfile.gettempdir()).iterdir())
    thread = when_started(tmp_path, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        export(nn.Linear(4, 2), torch.rand(3, 4), out / "net.v", target=Verilog(place=False, most_lost=None))
    thread.join()
    assert ended(pids(tmp_path))
    assert list(out.iterdir()) == []
    assert set(Path(tempfile.gettempdir()).iterdir()) == before


@pytest.mark.skipif(not (shutil.which("iverilog") and shutil.which("yosys")), reason="not installed: iverilog, yosys")
@pytest.mark.parametrize("name", ["module.v", "bench.v", "7 ü.v"])
def test_a_file_of_any_name_in_a_folder_with_blanks_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "my runs; a" / name
    path.parent.mkdir()
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    export(net, torch.rand(3, 4), path, target=Verilog(place=False, most_lost=None, verify="simulated"))
    circuit = circuit_in(path)
    integers = simulators.integers_in(torch.rand(20, 4), circuit.ports)
    np.testing.assert_array_equal(simulators.icarus(path, circuit.ports, integers), circuit.run(integers))
    assert all(proved_limits(path).values())
