"""The statements of a Verilog file of this target, read back from its text: what is proved and what is simulated here
is the file, and not what it was written from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apportion.exporting.fpga.verilog_text import CircuitPorts, ports_of


@dataclass(frozen=True)
class VerilogStatement:
    """One statement: what it defines, of how many bits, and from what."""

    name: str
    width: int
    kind: str
    """The kind: those of ``Op``, "register" and "output"."""
    operands: tuple[str, ...]
    numbers: tuple[int, ...]
    """Those of ``Op``; the stage at whose end a register takes its value; the number of an output."""


_WIRE = r"wire signed \[(\d+):0\] "
_INPUT = re.compile(_WIRE + r"(n\d+) = \$signed\((?:\{1'b0, )?buffer\[(\d+):(\d+)\]\}?\);")
_LARGER = re.compile(_WIRE + r"(n\d+) = \((\w+) > (\w+)\) \? (\w+) : (\w+);")
_CLAMP = re.compile(_WIRE + r"(n\d+); limit_(\d+)_(\d+)_(\d+)_(m?)(\d+)_(\d+) \w+ \((\w+), (n\d+)\);")
_SUM = re.compile(_WIRE + r"(n\d+) = (.+);")
_REGISTER = re.compile(
    r"reg signed \[(\d+):0\] (r\d+_\d+); always @\(posedge clk\) if \(valid\[(\d+)\]\) (r\d+_\d+) <= (\w+);"
)
_OUTPUT = re.compile(_WIRE + r"out(\d+) = (\w+);")
_TERM = re.compile(r"([+-]?) ?(?:\((\w+) <<< (\d+)\)|(\d+)'sd(\d+)|(\w+))(?: |$)")


@dataclass(frozen=True, eq=False)
class VerilogCircuit:
    """The circuit in a file: its ports, and its statements in the order of the file."""

    ports: CircuitPorts
    statements: tuple[VerilogStatement, ...]

    def run(self, integers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what leaves the circuit for these integers, a row for each example, by the rules of Verilog: sums
        wrap around at the width of what they define."""
        values: dict[str, NDArray[np.int64]] = {}
        outputs: dict[int, NDArray[np.int64]] = {}
        for statement in self.statements:
            given = [values[name] for name in statement.operands] if statement.kind != "register" else []
            numbers = statement.numbers
            if statement.kind == "input":
                values[statement.name] = integers[:, numbers[0]]
            elif statement.kind == "larger":
                values[statement.name] = np.maximum(given[0], given[1])
            elif statement.kind == "clamp":
                values[statement.name] = np.clip(given[0] >> numbers[0], numbers[1], numbers[2])
            elif statement.kind == "sum":
                total = np.full(len(integers), numbers[-1], dtype=np.int64)
                for n, value in enumerate(given):
                    total += numbers[2 * n] * (value << numbers[2 * n + 1])
                half = 1 << (statement.width - 1)
                values[statement.name] = ((total + half) & (2 * half - 1)) - half
            elif statement.kind == "output":
                outputs[numbers[0]] = given[0]
            if statement.kind != "output":
                values.update({s: values[statement.name] for s in self._copies().get(statement.name, ())})
        return np.stack([outputs[n] for n in range(len(outputs))], axis=1)

    def _copies(self) -> dict[str, list[str]]:
        """Return the registers that hold the value of each wire, whatever the cycle."""
        if "_made" not in self.__dict__:
            of: dict[str, str] = {}
            for statement in self.statements:
                if statement.kind == "register":
                    of[statement.name] = of.get(statement.operands[0], statement.operands[0])
            found: dict[str, list[str]] = {}
            for register, wire in of.items():
                found.setdefault(wire, []).append(register)
            self.__dict__["_made"] = found
        made: dict[str, list[str]] = self.__dict__["_made"]
        return made


def circuit_in(path: Path) -> VerilogCircuit:
    """Return the circuit in a file. Raises ValueError for a line that is no statement of this target's."""
    ports = ports_of(path)
    lines = path.read_text().splitlines()
    begins = next(n for n, line in enumerate(lines) if line.startswith(f"module {ports.module} ("))
    body = [line.strip() for line in lines[begins:]]
    return VerilogCircuit(ports, tuple(_statements(body, ports)))


def _statements(lines: list[str], ports: CircuitPorts) -> Iterator[VerilogStatement]:
    for line in lines:
        if not line.startswith(("wire signed ", "reg signed ")):
            continue
        if found := _REGISTER.fullmatch(line):
            width, name, stage, again, operand = found.groups()
            _must(name == again, line)
            yield VerilogStatement(name, int(width) + 1, "register", (operand,), (int(stage),))
        elif found := _OUTPUT.fullmatch(line):
            yield VerilogStatement(f"out{found[2]}", int(found[1]) + 1, "output", (found[3],), (int(found[2]),))
        elif found := _INPUT.fullmatch(line):
            low, bits = int(found[4]), ports.input_width
            _must(int(found[3]) - low == bits - 1 and low % bits == 0, line)
            yield VerilogStatement(found[2], int(found[1]) + 1, "input", (), (low // bits,))
        elif found := _LARGER.fullmatch(line):
            width, name, a, b, c, d = found.groups()
            _must((a, b) == (c, d), line)
            yield VerilogStatement(name, int(width) + 1, "larger", (a, b), ())
        elif found := _CLAMP.fullmatch(line):
            width, name, taken, to, shift, sign, low_digits, high, operand, again = found.groups()
            _must(name == again and int(to) == int(width) + 1, line)
            limit = -int(low_digits) if sign else int(low_digits)
            yield VerilogStatement(name, int(to), "clamp", (operand,), (int(shift), limit, int(high), int(taken)))
        elif found := _SUM.fullmatch(line):
            yield _sum(found[2], int(found[1]) + 1, found[3], line)
        else:
            _must(False, line)


def _sum(name: str, width: int, text: str, line: str) -> VerilogStatement:
    operands, numbers, constant, at = [], [], 0, 0
    while at < len(text):
        found = _TERM.match(text, at)
        _must(found is not None, line)
        assert found is not None
        sign = -1 if found[1] == "-" else 1
        if found[5] is not None:
            constant += sign * int(found[5])
            _must(int(found[5]) < 2 ** (int(found[4]) - 1), line)
        else:
            operands.append(found[2] or found[6])
            numbers += [sign, int(found[3] or 0)]
        at = found.end()
    return VerilogStatement(name, width, "sum", tuple(operands), (*numbers, constant))


def _must(holds: bool, line: str) -> None:
    if not holds:
        raise ValueError(f"{line!r} is no statement of the target verilog")
