"""Exports to Verilog: files that other front ends take, and a stream in which beats are lost."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from pyslang import driver as slang
from torch import nn

import apportion
from apportion.api.export import Data, Examples

pytest.importorskip("alkaid", reason="not installed: apportion[fpga]")
SIMULATED = "verilog(bits=4, place=False, verify='simulated', most_lost=None)"


class Residual(nn.Module):
    """An addition of two paths, and a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Conv2d(1, 2, 3, padding=1),
            nn.Conv2d(2, 2, 3, padding=1),
            nn.Linear(18, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = nn.functional.max_pool2d((self.second(x) + x).relu(), 2)
        found: torch.Tensor = self.last(x.flatten(1))
        return found


NETS: dict[str, tuple[nn.Module, torch.Tensor]] = {}


def exported(name: str, folder: Path, target: str = SIMULATED) -> Path:
    torch.manual_seed(0)
    if name == "dense":
        net: nn.Module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        x = torch.randn(300, 8)
    elif name == "beats":
        net, x = nn.Sequential(nn.Linear(120, 4), nn.ReLU6(), nn.Linear(4, 2)), torch.rand(300, 120)
    else:
        net, x = Residual(), torch.rand(300, 1, 6, 6)
    with torch.no_grad():
        y = net(x).argmax(1)
    NETS[name] = net, x
    data = Data(calibration=Examples(x[:250], y[:250]), held_out=Examples(x[250:], y[250:]))
    return apportion.export(net, x[:2], folder / f"{name}.v", target=target, data=data).path


def header(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text().splitlines()[0].removeprefix("// apportion verilog "))
    return found


def read_above(text: str) -> set[str]:
    """The names that a line reads above the line that declares them."""
    lines = text.splitlines()
    declaring = re.compile(r"(?:reg|wire) signed \S+ (n\d+|r\d+_\d+)")
    declared = {name: at for at, line in enumerate(lines) for name in declaring.findall(line)}
    assert len(declared) > 20
    return {name for at, line in enumerate(lines) for name in re.findall(r"\w+", line) if declared.get(name, -1) > at}


def silent(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("other", ["beats", pytest.param("residual", marks=pytest.mark.thorough)])
def test_two_circuits_of_one_design_are_taken_without_a_warning(other: str, tmp_path: Path) -> None:
    paths = [exported("dense", tmp_path), exported(other, tmp_path)]
    modules = [set(re.findall(r"^module (\w+)", path.read_text(), re.MULTILINE)) for path in paths]
    assert not modules[0] & modules[1]
    for path in paths:
        assert not read_above(path.read_text())
    top = tmp_path / "top.v"
    instances, wires = [], []
    for n, path in enumerate(paths):
        ports = header(path)
        wide, out = ports["in_data_width"], ports["out_data_width"]
        wires.append(f"input wire [{wide - 1}:0] i{n}, output wire v{n}, output wire [{out - 1}:0] o{n}")
        instances.append(
            f"{ports['module']} u{n} (.clk(clk), .rst(rst), .in_valid(valid), .in_first(first), .in_data(i{n}), "
            f".out_valid(v{n}), .out_data(o{n}));"
        )
    control = "input wire clk, input wire rst, input wire valid, input wire first, "
    top.write_text(f"module top ({control}{', '.join(wires)});\n" + "\n".join(instances) + "\nendmodule\n")
    files = [str(path) for path in (top, *paths)]
    if shutil.which("iverilog"):
        silent("iverilog", "-Wall", "-g2005", "-o", str(tmp_path / "out"), "-s", "top", *files)
    if shutil.which("verilator"):
        silent("verilator", "--lint-only", "-Wall", "--top-module", "top", *files)
    if shutil.which("yosys"):
        silent(
            "yosys", "-q", "-p", "; ".join([f"read_verilog {file}" for file in files] + ["hierarchy -check -top top"])
        )


@pytest.mark.parametrize("other", ["beats", pytest.param("residual", marks=pytest.mark.thorough)])
def test_a_strict_front_end_reports_nothing_about_two_circuits_of_one_design(other: str, tmp_path: Path) -> None:
    driver = slang.Driver()
    driver.addStandardArgs()
    files = " ".join(str(exported(name, tmp_path)) for name in ("dense", other))
    assert driver.parseCommandLine(f"slang -Weverything -Werror {files}", slang.CommandLineOptions())
    assert driver.processOptions()
    assert driver.parseAllSources()
    assert driver.runFullCompilation(False), driver.textDiagClient.getString()


BENCH = """
module bench;
  reg clk = 0, rst = 1;
  reg [{width}+1:0] cycles [0:{last}];
  reg [{width}+1:0] now = 0;
  wire out_valid; wire [{out}-1:0] out_data;
  integer n = -3, taken = -1;
  {module} dut (.clk(clk), .rst(rst), .in_valid(now[{width}]), .in_first(now[{width}+1]), .in_data(now[{width}-1:0]),
    .out_valid(out_valid), .out_data(out_data));
  initial $readmemh("{folder}/cycles.hex", cycles);
  always begin
    #5 clk = 1; #5 clk = 0;
    if (out_valid !== 1'b0) $display("%0d %b %h", n, out_valid, out_data);
    n = n + 1; rst = (n < 0);
    now = (n >= 0 && n <= {last}) ? cycles[n] : 0;
    if (n > {last} + {stages} + 4) $finish;
  end
endmodule
"""


def streamed(path: Path, cycles: list[int], folder: Path) -> dict[int, str]:
    """What leaves the circuit in Icarus Verilog, by the number of the edge after which it does."""
    ports = header(path)
    folder.mkdir()
    (folder / "cycles.hex").write_text("".join(f"{cycle:x}\n" for cycle in cycles))
    bench = BENCH.format(
        width=ports["in_data_width"], last=len(cycles) - 1, out=ports["out_data_width"], module=ports["module"],
        folder=folder, stages=ports["stages"],
    )  # fmt: skip
    (folder / "bench.v").write_text(bench)
    silent("iverilog", "-g2005", "-o", str(folder / "out"), "-s", "bench", str(folder / "bench.v"), str(path))
    command = ["vvp", "-N", str(folder / "out")]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(line.split()[1] == "1" for line in text.splitlines())
    return {int(line.split()[0]): line.split()[2] for line in text.splitlines()}


def beats_of(row: torch.Tensor, ports: dict[str, Any]) -> list[int]:
    """The cycles of an example without a gap, as the header of the file says."""
    whole = (row.double() * 2 ** ports["input_exponent"] + 0.5).floor().clamp(ports["input_low"], ports["input_high"])
    integers = [*whole.long().tolist(), *[0] * (ports["words"] * ports["beats"] - len(row))]
    bits, words = ports["input_width"], ports["words"]
    found = []
    for beat in range(ports["beats"]):
        part = integers[beat * words : (beat + 1) * words]
        data = sum((q & (2**bits - 1)) << (n * bits) for n, q in enumerate(part))
        found.append(((2 if beat == 0 else 0) + 1 << ports["in_data_width"]) | data)
    return found


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="not installed: iverilog")
@pytest.mark.parametrize("name", ["beats", pytest.param("residual", marks=pytest.mark.thorough)])
def test_a_lost_beat_spoils_its_example_alone_and_the_latency_is_as_stated(name: str, tmp_path: Path) -> None:
    path = exported(name, tmp_path)
    ports, x = header(path), NETS[name][1][:60].flatten(1)
    every = [beats_of(row, ports) for row in x]
    whole = streamed(path, [cycle for beats in every for cycle in beats], tmp_path / "whole")
    assert list(whole) == [(n + 1) * ports["beats"] - 1 + ports["stages"] for n in range(60)]
    assert len(set(whole.values())) > 10
    drawn, cycles, expected = random.Random(5), list[int](), dict[int, str]()
    for beats, output in zip(every, whole.values(), strict=True):
        lost = drawn.randrange(len(beats)) if drawn.random() < 0.3 else None
        for number, beat in enumerate(beats):
            cycles += [0] * drawn.choice((0, 0, 1, 4))
            cycles += [] if number == lost else [beat]
        if lost is None:
            expected[len(cycles) - 1 + ports["stages"]] = output
    assert streamed(path, cycles, tmp_path / "lossy") == expected


def test_the_module_has_the_name_that_is_asked_for(tmp_path: Path) -> None:
    path = exported("dense", tmp_path, SIMULATED[:-1] + ", name='first')")
    assert header(path)["module"] == "net_first"
    with pytest.raises(ValueError, match="name='a-b' must be letters, digits and underscores"):
        exported("dense", tmp_path, SIMULATED[:-1] + ", name='a-b')")
