"""A circuit run by Icarus Verilog or Verilator with a test bench of our own, and the integers that go in and out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from apportion.errors import ApportionError
from apportion.exporting.fpga.fixed_point import IntegerFormat
from apportion.exporting.fpga.tools import programs
from apportion.exporting.fpga.verilog_text import CircuitPorts

_BENCH = """
`timescale 1ns / 1ps
module bench;
  reg clk = 0, rst = 1, in_valid = 0;
  reg [{enters}:0] in_data = 0, beats [0:{last}];
  wire out_valid;
  wire [{leaves}:0] out_data;
  integer n = 0, got = 0, idle = 0, file;
  {module} dut (clk, rst, in_valid, in_data, out_valid, out_data);
  always #5 clk = ~clk;
  initial begin
    $readmemh("beats.hex", beats);
    file = $fopen("outputs.hex", "w");
  end
  always @(negedge clk) begin
    if (out_valid && !rst) begin $fdisplay(file, "%h", out_data); got = got + 1; idle = 0; end else idle = idle + 1;
    rst <= (n == 0 && idle < 3);
    in_valid <= 0;
    if (!rst && n <= {last} && !(n > {half} && n % 7 == 3 && idle % 2 == 0)) begin
      in_data <= beats[n]; in_valid <= 1; n = n + 1; idle = 0;
    end
    if (got == {examples} || idle > {patience}) begin $fclose(file); $finish; end
  end
endmodule
"""
"""Examples follow each other without a gap in the first half, and with gaps, also within an example, in the second."""


def integers_in(inputs: torch.Tensor, ports: CircuitPorts) -> NDArray[np.int64]:
    """Return the integers that enter the circuit, a row for each example."""
    form = IntegerFormat(ports.input_low, ports.input_high, ports.input_exponent)
    return form.of(inputs).reshape(len(inputs), -1).numpy().astype(np.int64)


def meaning(integers: NDArray[np.int64], ports: CircuitPorts) -> NDArray[np.float64]:
    """Return what the integers mean that leave the circuit, in the shape of the network's output."""
    return (integers / 2.0**ports.output_exponent).reshape(len(integers), *ports.output_shape)


def icarus(path: Path, ports: CircuitPorts, integers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Run the circuit in Icarus Verilog for these integers, a row for each example, and return those that leave it."""

    def run(folder: Path) -> None:
        programs.must_run(folder, "iverilog", "-g2005-sv", "-o", "bench.vvp", "-s", "bench", "bench.v", "net.v")
        programs.must_run(folder, "vvp", "-N", "bench.vvp")

    return _simulated(run, path, ports, integers)


def verilator(path: Path, ports: CircuitPorts, integers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Run the circuit in Verilator as ``icarus`` does."""

    def run(folder: Path) -> None:
        options = ("--binary", "--timing", "-Wno-fatal", "-Wno-lint", "-Wno-style", "-O3", "-CFLAGS", "-O1")
        programs.must_run(folder, "verilator", *options, "--top-module", "bench", "-o", "bench", "bench.v", "net.v")
        programs.must_run(folder, str(folder / "obj_dir" / "bench"))

    return _simulated(run, path, ports, integers)


SIMULATORS: dict[str, tuple[str, Callable[[Path, CircuitPorts, NDArray[np.int64]], NDArray[np.int64]]]] = {
    "iverilog": ("-V", icarus),
    "verilator": ("--version", verilator),
}
"""The simulators by the name of the program, which is that of the Debian package too: (how to ask its version, how to
run it)."""


def beats_of(integers: NDArray[np.int64], ports: CircuitPorts) -> list[int]:
    """Return the words that enter the circuit, one for each beat."""
    total, width = ports.words * ports.beats, ports.input_width
    wide = np.zeros((len(integers), total), dtype=np.int64)
    wide[:, : integers.shape[1]] = integers & ((1 << width) - 1)
    found = []
    for group in wide.reshape(-1, ports.words).tolist():
        found.append(sum(number << (n * width) for n, number in enumerate(group)))
    return found


def integers_out(lines: list[str], ports: CircuitPorts) -> NDArray[np.int64]:
    """Return the integers that left the circuit, a row for each line of hexadecimal digits."""
    width, count = ports.output_width, int(np.prod(ports.output_shape))
    if any(set(line) & set("xXzZ") for line in lines):
        raise ApportionError("the circuit gave undefined bits: this is a defect of the target verilog")
    numbers = [int(line, 16) for line in lines]
    raw = np.array([[(x >> (n * width)) & ((1 << width) - 1) for n in range(count)] for x in numbers], dtype=np.int64)
    return raw - ((raw >> (width - 1)) << width)


def _simulated(
    run: Callable[[Path], None], path: Path, ports: CircuitPorts, integers: NDArray[np.int64]
) -> NDArray[np.int64]:
    words = beats_of(integers, ports)
    enters, leaves = ports.words * ports.input_width, int(np.prod(ports.output_shape)) * ports.output_width
    bench = _BENCH.format(
        module=ports.module, enters=enters - 1, leaves=leaves - 1, last=len(words) - 1, half=len(words) // 2,
        examples=len(integers), patience=4 * (ports.stages + ports.beats) + 20,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="apportion-verilog-") as made:
        folder = Path(made)
        (folder / "bench.v").write_text(bench)
        (folder / "net.v").write_text(path.read_text())  # the path to it may have blanks
        (folder / "beats.hex").write_text("".join(f"{word:x}\n" for word in words))
        run(folder)
        lines = (folder / "outputs.hex").read_text().split()
    if len(lines) != len(integers):
        raise ApportionError(f"the circuit gave {len(lines)} outputs for {len(integers)} examples")
    return integers_out(lines, ports)
