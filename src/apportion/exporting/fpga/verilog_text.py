"""A netlist with its stages as a Verilog file: one statement an operation, all of them signed, each of what was
declared above it, and each operand as wide as what is computed.

The first line of the file is a comment in JSON that says what its numbers mean. The circuit takes one example in
``beats`` cycles in which ``in_valid`` is 1, a few numbers in each, the first number in the lowest bits. ``in_first`` is
1 with the first of them: what came before of another example is dropped, so that a lost beat spoils that example alone.
Call the edge of the clock that takes the last beat edge 0: ``out_valid`` is 1 from edge ``stages`` to the next one,
where it is read with all outputs in ``out_data``, the first one in the lowest bits. Examples may follow each other
without a gap, and ``in_valid`` may be 0 at any time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from apportion.exporting.fpga.netlist import CircuitPipeline, IntegerRange, Netlist, Op

MARK = "// apportion verilog "
CONTROL_PINS = 5
"""The pins beside those for numbers: clk, rst, in_valid, in_first and out_valid."""


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

    @property
    def in_width(self) -> int:
        """The number of bits of ``in_data``."""
        return self.words * self.input_width

    @property
    def out_width(self) -> int:
        """The number of bits of ``out_data``."""
        return math.prod(self.output_shape) * self.output_width

    def header(self) -> str:
        widths = {"input_width": self.input_width, "in_data_width": self.in_width, "out_data_width": self.out_width}
        return MARK + json.dumps({**asdict(self), **widths})

    def notes(self) -> list[str]:
        """What the ports mean, in words, as comments."""
        sign = "with a sign" if self.input_low < 0 else "without a sign"
        return [
            f"// in_data: {self.words} numbers of {self.input_width} bits {sign}, {self.in_width} bits, in each of "
            f"{self.beats} beats with in_valid; in_first is 1 with the first beat of an example.",
            f"// out_data: {math.prod(self.output_shape)} numbers of {self.output_width} bits with a sign, "
            f"{self.out_width} bits. The last beat is taken at edge 0: out_valid is 1 after edge {self.stages} of clk,",
            f"// and is read at edge {self.stages + 1}. rst is synchronous.",
        ]


def ports_of(path: Path) -> CircuitPorts:
    """Return what the ports of a file mean. Raises ValueError where the file is none of this target's."""
    with path.open() as file:
        line = file.readline()
    if not line.startswith(MARK):
        raise ValueError(f"{path} does not begin with {MARK.strip()!r}: it was not written by the target verilog")
    found = json.loads(line[len(MARK) :])
    known = {one.name: found[one.name] for one in fields(CircuitPorts)}
    shapes = {name: tuple(found[name]) for name in ("input_shape", "output_shape")}
    return CircuitPorts(**{**known, **shapes})


def module_name(name: str) -> str:
    """Return the name of the module of a circuit: ``net_`` and the letters, digits and underscores of this name, which
    by itself may be a keyword of Verilog's, or the name of another module."""
    return "net_" + re.sub(r"\W", "_", name, flags=re.ASCII)


def written(netlist: Netlist, pipeline: CircuitPipeline, ports: CircuitPorts) -> str:
    """Return the text of the file."""
    text = _Text(netlist, pipeline, ports)
    module = text.module()
    lint = "// verilator lint_off DECLFILENAME"  # the modules that limit a number are in the same file
    return "\n".join([ports.header(), *ports.notes(), lint, *text.limits(), *module]) + "\n"


class _Text:
    def __init__(self, netlist: Netlist, pipeline: CircuitPipeline, ports: CircuitPorts) -> None:
        self._netlist, self._pipeline, self._ports = netlist, pipeline, ports
        self._widths: dict[str, int] = {}
        """The bits of each name that was declared."""
        self._read_bits: dict[str, int] = {}
        """Those of them that are read, as a mask."""
        self._limits: dict[str, list[str]] = {}

    def limits(self) -> list[str]:
        """Return a module for each way to limit a number that ``module`` has used."""
        return [line for name in sorted(self._limits) for line in self._limits[name]]

    def module(self) -> list[str]:
        ports, pipeline = self._ports, self._pipeline
        taken: dict[int, list[int]] = {}
        for op_number, stage in sorted(pipeline.registers):
            taken.setdefault(op_number, []).append(stage)
        lines = [
            f"module {ports.module} (",
            "  input wire clk, input wire rst,",
            f"  input wire in_valid, input wire in_first, input wire [{ports.in_width - 1}:0] in_data,",
            f"  output wire out_valid, output wire [{ports.out_width - 1}:0] out_data",
            ");",
            *self._stream(),
        ]
        for number, op in enumerate(self._netlist.ops):
            lines.append(f"  {self._statement(number, op)}")
            for stage in taken.get(number, ()):
                name, width = f"r{number}_{stage}", self._netlist.ranges[number].width
                value = self._fitted(self._source(number, stage), width)
                self._widths[name] = width
                lines.append(
                    f"  reg signed [{width - 1}:0] {name}; always @(posedge clk) if (valid[{stage}]) {name} <= {value};"
                )
        for n, number in enumerate(self._netlist.outputs):
            low, high = n * ports.output_width, (n + 1) * ports.output_width - 1
            value = self._fitted(self._source(number, pipeline.count), ports.output_width)
            lines.append(f"  wire signed [{ports.output_width - 1}:0] out{n} = {value};")
            lines.append(f"  assign out_data[{high}:{low}] = $unsigned(out{n});")
        unused = [part for name, width in self._widths.items() for part in self._unread(name, width)]
        return [*lines, *unused_bits(unused), "endmodule"]

    def _stream(self) -> list[str]:
        """The statements that count the beats of an example, and the stages that it has been through."""
        ports, stages = self._ports, self._pipeline.count
        total, bits, last = ports.in_width * ports.beats, (ports.beats - 1).bit_length(), ports.beats - 1
        self._widths["buffer"] = total
        shifted, complete, counter = "in_data", "in_valid && in_first", []
        if ports.beats > 1:
            self._read_bits["buffer"] = (1 << total) - (1 << ports.in_width)
            shifted = f"{{in_data, buffer[{total - 1}:{ports.in_width}]}}"
            # The circuit starts in the cycle after the last beat: valid[0] is a register, so that the buffer is
            # complete when stage 0 reads it.
            complete = f"in_valid && !in_first && (beat == {bits}'d{last})"
            counter = [
                f"  reg [{bits - 1}:0] beat = {bits}'d0;",
                "  always @(posedge clk) begin",
                f"    if (rst) beat <= {bits}'d0;",
                f"    else if (in_valid && in_first) beat <= {bits}'d1;",
                f"    else if (in_valid && (beat == {bits}'d{last})) beat <= {bits}'d0;",
                f"    else if (in_valid && (beat != {bits}'d0)) beat <= beat + {bits}'d1;",
                "  end",
            ]
        return [
            f"  reg [{total - 1}:0] buffer;",
            *counter,
            f"  reg [{stages}:0] valid = {stages + 1}'d0;",
            "  always @(posedge clk) begin",
            f"    if (in_valid) buffer <= {shifted};",
            f"    if (rst) valid <= {stages + 1}'d0;",
            # The shift register runs freely, independent of ``in_valid``: an example moves on by a stage every cycle.
            # Each stage loads its registers only with its own valid bit.
            f"    else valid <= {{valid[{stages - 1}:0], {complete}}};",
            "  end",
            f"  assign out_valid = valid[{stages}];",
        ]

    def _source(self, op: int, stage: int) -> str:
        register = self._pipeline.source(op, stage)
        return f"n{op}" if register is None else f"r{register[0]}_{register[1]}"

    def _fitted(self, name: str, width: int, shift: int = 0) -> str:
        """A name times 2**shift, as a number of just ``width`` bits: its sign is repeated, or its upper bits are left
        out where the sum that it is a part of is smaller than it."""
        own = self._widths[name]
        taken = max(min(own, width - shift), 0)
        self._read_bits[name] = self._read_bits.get(name, 0) | ((1 << taken) - 1)
        if taken == own == width:
            return name
        if not taken:
            return _zero(width)
        parts = [name if taken == own else f"{name}[{taken - 1}:0]"]
        if width > taken + shift:
            parts.insert(0, f"{{{width - taken - shift}{{{name}[{own - 1}]}}}}")
        if shift:
            parts.append(f"{shift}'d0")
        return f"$signed({{{', '.join(parts)}}})"

    def _unread(self, name: str, width: int) -> list[str]:
        """The bits of a name that are read nowhere."""
        read = self._read_bits.get(name, 0)
        if not read:
            return [name]
        bits = "".join("1" if read >> bit & 1 else "0" for bit in range(width))
        return [f"{name}[{found.end() - 1}:{found.start()}]" for found in re.finditer("0+", bits)]

    def _statement(self, number: int, op: Op) -> str:
        width, name = self._netlist.ranges[number].width, f"n{number}"
        read = [self._source(x, self._pipeline.stages[number]) for x in op.operands]
        if op.kind == "input":
            bits = self._ports.input_width
            low = op.numbers[0] * bits
            self._read_bits["buffer"] = self._read_bits.get("buffer", 0) | (((1 << bits) - 1) << low)
            taken = f"buffer[{low + bits - 1}:{low}]"
            text = f"$signed({taken})" if self._ports.input_low < 0 else signed_of(taken)
        elif op.kind == "larger":
            # Verilog compares operands of different widths after extending them, and as unsigned if either of them is:
            # both are brought to one signed width first.
            at = max(self._widths[x] for x in read)
            a, b = (self._fitted(x, at) for x in read)
            c, d = (self._fitted(x, width) for x in read)
            text = f"({a} > {b}) ? {c} : {d}"
        elif op.kind == "clamp":
            taken_width = self._widths[read[0]]
            width = IntegerRange(op.numbers[1], op.numbers[2]).width
            module = limit_name(self._ports.module, taken_width, width, op)
            self._limits[module] = clamp_module(self._ports.module, taken_width, width, op)
            value = self._fitted(read[0], taken_width)
            self._widths[name] = width
            return f"wire signed [{width - 1}:0] {name}; {module} l{number} (.a({value}), .y({name}));"
        else:
            constant = op.numbers[-1]
            # The literal of the constant has to fit as well, before its sign is applied: the sum alone may be narrower.
            width = max(width, IntegerRange(-abs(constant), abs(constant)).width if constant else 0)
            text = self._sum(read, op.numbers, width)
        self._widths[name] = width
        return f"wire signed [{width - 1}:0] {name} = {text};"

    def _sum(self, read: list[str], numbers: tuple[int, ...], width: int) -> str:
        terms = []
        for n, operand in enumerate(read):
            sign, shift = numbers[2 * n : 2 * n + 2]
            terms.append(("-" if sign < 0 else "+", self._fitted(operand, width, shift)))
        if numbers[-1] or not terms:
            constant = f"{width}'sd{abs(numbers[-1])}" if numbers[-1] else _zero(width)
            terms.append(("-" if numbers[-1] < 0 else "+", constant))
        first = terms[0][1] if terms[0][0] == "+" else f"-{terms[0][1]}"
        return " ".join([first, *(f"{sign} {term}" for sign, term in terms[1:])])


def signed_of(bits: str) -> str:
    """Return a number without a sign as one with a sign."""
    return f"$signed({{1'b0, {bits}}})"


def unused_bits(names: Sequence[str]) -> list[str]:
    """Return the statement that says of these names and bits that they are left out on purpose, by the conventions of
    Verilator (the name) and of slang (the attribute)."""
    if not names:
        return []
    return ["  (* maybe_unused *) wire unused;", f"  assign unused = &{{1'b0, {', '.join(names)}}};"]


def limit_name(prefix: str, width: int, to: int, op: Op) -> str:
    """Return the name of the module that limits a number of this width: it begins with that of the circuit, so that
    several circuits have a place in one design."""
    shift, low, high = op.numbers
    return f"{prefix}_limit_{width}_{to}_{shift}_{'m' if low < 0 else ''}{abs(low)}_{high}"


def clamp_module(prefix: str, width: int, to: int, op: Op) -> list[str]:
    """Return the module that drops the low bits of a number and limits it.

    Where the limits are those of a number of some bits without a sign, a look at the bits above them is enough.
    """
    shift, low, high = op.numbers
    name, left, bits = limit_name(prefix, width, to, op), width - shift, high.bit_length()
    lines = [f"module {name} (input wire signed [{width - 1}:0] a, output wire signed [{to - 1}:0] y);"]
    if left <= 0:  # nothing but the sign is left
        left = 1
        lines += [f"  wire signed [0:0] s = $signed(a[{width - 1}:{width - 1}]);"]
    else:
        lines += [f"  wire signed [{left - 1}:0] s = $signed(a[{width - 1}:{shift}]);"]
    if width - left:
        lines += unused_bits([f"a[{width - left - 1}:0]"])
    # An activation without a sign: it is 0 where the sign bit is set, and all ones where a bit above the limit is. That
    # is one level of look-up tables in place of two comparators.
    if low == 0 and high == 2**bits - 1 and left > bits:
        inner = f"s[{bits - 1}:0]"
        if left > bits + 1:
            lines.append(f"  wire over = |s[{left - 2}:{bits}];")
            inner = f"({inner} | {{{bits}{{over}}}})"
        lines.append(f"  assign y = $signed({{1'b0, {{{bits}{{~s[{left - 1}]}}}} & {inner}}});")
        return [*lines, "endmodule"]
    wide = max(left, to)
    ahead = f"{{{wide - left}{{s[{left - 1}]}}}}, " if wide > left else ""
    lines.append(f"  wire signed [{wide - 1}:0] t = {f'$signed({{{ahead}s}})' if ahead else 's'};")
    below, above = (f"(t {sign} {_literal(end, wide)})" for sign, end in (("<", low), (">", high)))
    inside = "t" if wide == to else f"$signed(t[{to - 1}:0])"
    lines.append(f"  assign y = {below} ? {_literal(low, to)} : {above} ? {_literal(high, to)} : {inside};")
    return [*lines, "endmodule"]


def _zero(width: int) -> str:
    """Zero of ``width`` bits. In decimal notation a signed number of one bit has no room for its sign."""
    return f"{width}'sd0" if width > 1 else "1'sb0"


def _literal(value: int, width: int) -> str:
    """A number of ``width`` bits, in two's complement."""
    return f"{width}'sb{value & ((1 << width) - 1):0{width}b}"
