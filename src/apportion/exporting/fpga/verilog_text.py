"""A netlist with its stages as a Verilog file: one statement an operation, all of them signed.

The first line of the file is a comment in JSON that says what its numbers mean. The circuit takes one example in
``beats`` cycles in which ``in_valid`` is 1, a few numbers in each, the first number in the lowest bits; ``out_valid``
is 1 for one cycle, ``stages`` cycles after the last of them, with all outputs in ``out_data``, the first one in the
lowest bits. Examples may follow each other without a gap, and ``in_valid`` may be 0 at any time.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from apportion.exporting.fpga.netlist import IntegerRange, Netlist, Op
from apportion.exporting.fpga.pipeline import CircuitPipeline

MARK = "// apportion verilog "
CONTROL_PINS = 4
"""The pins beside those for numbers: clk, rst, in_valid and out_valid."""


@dataclass(frozen=True, kw_only=True)
class CircuitPorts:
    """What the ports of a circuit mean; an integer q means q / 2**exponent."""

    module: str
    input_shape: tuple[int, ...]
    input_low: int
    input_high: int
    input_exponent: int
    words: int
    """The number of inputs that enter in a beat."""
    beats: int
    output_shape: tuple[int, ...]
    output_width: int
    output_exponent: int
    stages: int

    @property
    def input_width(self) -> int:
        """The number of bits of an input: an unsigned number has no bit for the sign."""
        return IntegerRange(self.input_low, self.input_high).width - (self.input_low >= 0)

    def header(self) -> str:
        return MARK + json.dumps(asdict(self))


def ports_of(path: Path) -> CircuitPorts:
    """Return what the ports of a file mean. Raises ValueError where the file is none of this target's."""
    with path.open() as file:
        line = file.readline()
    if not line.startswith(MARK):
        raise ValueError(f"{path} does not begin with {MARK.strip()!r}: it was not written by the target verilog")
    told = json.loads(line[len(MARK) :])
    return CircuitPorts(
        **told | {"input_shape": tuple(told["input_shape"]), "output_shape": tuple(told["output_shape"])}
    )


def module_name(path: Path) -> str:
    """Return the name of the module in a file: ``net_`` and the letters, digits and underscores of the file's own name,
    which by itself may be a keyword of Verilog's, or the name of another module."""
    return "net_" + re.sub(r"\W", "_", path.stem, flags=re.ASCII)


def written(netlist: Netlist, pipeline: CircuitPipeline, ports: CircuitPorts) -> str:
    """Return the text of the file."""
    text = _Text(netlist, pipeline, ports)
    return "\n".join([ports.header(), *text.limits(), *text.module()]) + "\n"


class _Text:
    def __init__(self, netlist: Netlist, pipeline: CircuitPipeline, ports: CircuitPorts) -> None:
        self._netlist, self._pipeline, self._ports = netlist, pipeline, ports

    def limits(self) -> list[str]:
        """Return a module for each way to limit a number that there is."""
        found = {}
        for op in self._netlist.ops:
            if op.kind == "clamp":
                width, to = self._netlist.ranges[op.operands[0]].width, IntegerRange(op.numbers[1], op.numbers[2]).width
                found[limit_name(width, to, op)] = clamp_module(width, to, op)
        return [line for name in sorted(found) for line in found[name]]

    def module(self) -> list[str]:
        ports, pipeline = self._ports, self._pipeline
        bits, count = ports.input_width, ports.words * ports.beats
        enters, last = ports.words * bits, ports.beats - 1
        outputs = len(self._netlist.outputs) * ports.output_width
        valid = pipeline.count
        shifted = f"{{in_data, buffer[{count * bits - 1}:{enters}]}}" if ports.beats > 1 else "in_data"
        lines = [
            f"module {ports.module} (",
            "  input wire clk, input wire rst,",
            f"  input wire in_valid, input wire [{enters - 1}:0] in_data,",
            f"  output wire out_valid, output wire [{outputs - 1}:0] out_data",
            ");",
            f"  reg [{count * bits - 1}:0] buffer;",
            f"  reg [{max((ports.beats - 1).bit_length(), 1) - 1}:0] beat;",
            f"  reg [{valid}:0] valid;",
            "  always @(posedge clk) begin",
            f"    if (in_valid) buffer <= {shifted};",
            f"    if (rst) beat <= 0; else if (in_valid) beat <= (beat == {last}) ? 0 : beat + 1;",
            f"    if (rst) valid <= 0; else valid <= {{valid[{valid - 1}:0], in_valid && (beat == {last})}};",
            "  end",
            f"  assign out_valid = valid[{valid}];",
        ]
        for number, op in enumerate(self._netlist.ops):
            lines.append(f"  {self._statement(number, op)}")
        for op_number, stage in sorted(pipeline.registers, key=lambda register: (register[1], register[0])):
            width = self._netlist.ranges[op_number].width
            lines.append(
                f"  reg signed [{width - 1}:0] r{op_number}_{stage}; always @(posedge clk) if (valid[{stage}])"
                f" r{op_number}_{stage} <= {self._read(op_number, stage)};"
            )
        for n, number in enumerate(self._netlist.outputs):
            low, high = n * ports.output_width, (n + 1) * ports.output_width - 1
            wide = f"out{n}"
            lines.append(f"  wire signed [{ports.output_width - 1}:0] {wide} = {self._read(number, pipeline.count)};")
            lines.append(f"  assign out_data[{high}:{low}] = {wide};")
        return [*lines, "endmodule"]

    def _read(self, op: int, stage: int) -> str:
        register = self._pipeline.source(op, stage)
        return f"n{op}" if register is None else f"r{register[0]}_{register[1]}"

    def _statement(self, number: int, op: Op) -> str:
        width = self._netlist.ranges[number].width
        begins = f"wire signed [{width - 1}:0] n{number}"
        read = [self._read(x, self._pipeline.stages[number]) for x in op.operands]
        if op.kind == "input":
            bits = self._ports.input_width
            taken = f"buffer[{(op.numbers[0] + 1) * bits - 1}:{op.numbers[0] * bits}]"
            return f"{begins} = {f'$signed({taken})' if self._ports.input_low < 0 else signed_of(taken)};"
        if op.kind == "larger":
            return f"{begins} = ({read[0]} > {read[1]}) ? {read[0]} : {read[1]};"
        if op.kind == "clamp":
            limits = IntegerRange(op.numbers[1], op.numbers[2])
            name = limit_name(self._netlist.ranges[op.operands[0]].width, limits.width, op)
            return f"wire signed [{limits.width - 1}:0] n{number}; {name} l{number} ({read[0]}, n{number});"
        terms = []
        for n, operand in enumerate(read):
            sign, shift = op.numbers[2 * n : 2 * n + 2]
            terms.append(("-" if sign < 0 else "+", f"({operand} <<< {shift})" if shift else operand))
        if op.numbers[-1] or not terms:
            constant = op.numbers[-1]
            bits = IntegerRange(-abs(constant), abs(constant)).width
            terms.append(("-" if constant < 0 else "+", f"{bits}'sd{abs(constant)}"))
        first = terms[0][1] if terms[0][0] == "+" else f"-{terms[0][1]}"
        return f"{begins} = {' '.join([first, *(f'{sign} {term}' for sign, term in terms[1:])])};"


def signed_of(bits: str) -> str:
    """Return a number without a sign as one with a sign."""
    return f"$signed({{1'b0, {bits}}})"


def limit_name(width: int, to: int, op: Op) -> str:
    """Return the name of the module that limits a number of this width."""
    shift, low, high = op.numbers
    return f"limit_{width}_{to}_{shift}_{'m' if low < 0 else ''}{abs(low)}_{high}"


def clamp_module(width: int, to: int, op: Op) -> list[str]:
    """Return the module that drops the low bits of a number and limits it.

    Where the limits are those of a number of some bits without a sign, a look at the bits above them is enough.
    """
    shift, low, high = op.numbers
    left = width - shift
    lines = [
        f"module {limit_name(width, to, op)} (input wire signed [{width - 1}:0] a, output wire signed [{to - 1}:0] y);",
    ]
    bits = high.bit_length()
    if left <= 0:
        lines.append(f"  wire signed [{to}:0] s = {{{to + 1}{{a[{width - 1}]}}}};")
        left = to + 1
    else:
        lines.append(f"  wire signed [{left - 1}:0] s = a[{width - 1}:{shift}];")
    if low == 0 and high == 2**bits - 1 and left > bits + 1:
        lines.append(f"  wire over = |s[{left - 2}:{bits}];")
        lines.append(f"  assign y = {{1'b0, {{{bits}{{~s[{left - 1}]}}}} & (s[{bits - 1}:0] | {{{bits}{{over}}}})}};")
    elif low == 0 and high == 2**bits - 1 and left == bits + 1:
        lines.append(f"  assign y = {{1'b0, {{{bits}{{~s[{left - 1}]}}}} & s[{bits - 1}:0]}};")
    else:
        sizes = [f"{IntegerRange(-abs(end), abs(end)).width}'sd{abs(end)}" for end in (low, high)]
        ends = [f"-{size}" if end < 0 else size for end, size in zip((low, high), sizes, strict=True)]
        lines.append(f"  assign y = (s < {ends[0]}) ? {ends[0]} : (s > {ends[1]}) ? {ends[1]} : s;")
    return [*lines, "endmodule"]
