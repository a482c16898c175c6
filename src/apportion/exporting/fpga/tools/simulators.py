"""A circuit run by Icarus Verilog or Verilator with a test bench of our own, and the integers that go in and out."""

from __future__ import annotations

import random
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
  reg clk = 0, rst = 1, in_valid = 0, in_first = 0;
  reg [{enters}:0] in_data = 0;
  reg [{cycle}:0] cycles [0:{last}];
  wire out_valid;
  wire [{leaves}:0] out_data;
  integer n = 0, resets = 0, idle = 0, file;
  {module} dut (clk, rst, in_valid, in_first, in_data, out_valid, out_data);
  always #5 clk = ~clk;
  initial begin
    $readmemh("cycles.hex", cycles);
    file = $fopen("outputs.hex", "w");
  end
  always @(negedge clk) begin
    if (out_valid) $fdisplay(file, "%h", out_data);
    resets = resets + 1;
    rst <= (resets < 4);
    in_valid <= 0;
    if (!rst && n <= {last}) begin {{in_first, in_valid, in_data}} <= cycles[n]; n = n + 1; end
    else if (!rst) idle = idle + 1;
    if (idle > {patience}) begin $fclose(file); $finish; end
  end
endmodule
"""
SEED = 17
"""The seed of the gaps, and of the examples that lose a beat."""


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


def cycles_of(integers: NDArray[np.int64], ports: CircuitPorts) -> list[int]:
    """Return what enters the circuit, a word for each cycle: ``in_data``, and above it ``in_valid`` and ``in_first``.

    Examples follow each other without a gap in the first half. In the second half there are gaps of random lengths,
    also within an example, and before some examples one more of which a random beat is lost: it must leave no output,
    and change none.
    """
    total, width, drawn = ports.words * ports.beats, ports.input_width, random.Random(SEED)
    valid, first = 1 << ports.in_width, 2 << ports.in_width
    wide = np.zeros((len(integers), total), dtype=np.int64)
    wide[:, : integers.shape[1]] = integers & ((1 << width) - 1)
    cycles: list[int] = []
    for number, example in enumerate(wide.reshape(len(integers), ports.beats, ports.words).tolist()):
        words = [valid + sum(x << (n * width) for n, x in enumerate(beat)) for beat in example]
        words[0] += first
        late = number >= len(integers) // 2
        if late and drawn.random() < 0.2:
            lost = drawn.randrange(ports.beats)
            cycles += words[:lost] + words[lost + 1 :]
        for word in words:
            cycles += [0] * (drawn.choice((0, 0, 1, 3)) if late else 0)
            cycles.append(word)
    return cycles


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
    cycles = cycles_of(integers, ports)
    bench = _BENCH.format(
        module=ports.module, enters=ports.in_width - 1, cycle=ports.in_width + 1, leaves=ports.out_width - 1,
        last=len(cycles) - 1, patience=ports.stages + 3,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="apportion-verilog-") as made:
        folder = Path(made)
        (folder / "bench.v").write_text(bench)
        (folder / "net.v").write_text(path.read_text())  # the path to it may have blanks
        (folder / "cycles.hex").write_text("".join(f"{cycle:x}\n" for cycle in cycles))
        run(folder)
        lines = (folder / "outputs.hex").read_text().split()
    if len(lines) != len(integers):
        raise ApportionError(f"the circuit gave {len(lines)} outputs for {len(integers)} examples")
    return integers_out(lines, ports)
