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
_FITTED = r"[+-]?(?:\$signed\(\{[^()]*\}\)|\w+'sd\d+|1'sb0|\w+)"
"""A name, a number, or a name with its sign repeated, its upper bits left out, or zeros behind it."""
_INPUT = re.compile(_WIRE + r"(n\d+) = \$signed\((?:\{1'b0, )?buffer\[(\d+):(\d+)\]\}?\);")
_LARGER = re.compile(_WIRE + rf"(n\d+) = \(({_FITTED}) > ({_FITTED})\) \? ({_FITTED}) : ({_FITTED});")
_CLAMP = re.compile(
    _WIRE + r"(n\d+); (\w+)_limit_(\d+)_(\d+)_(\d+)_(m?)(\d+)_(\d+) \w+ \(\.a\((\w+)\), \.y\((n\d+)\)\);"
)
_SUM = re.compile(_WIRE + r"(n\d+) = (.+);")
_REGISTER = re.compile(
    r"reg signed \[(\d+):0\] (r\d+_\d+); always @\(posedge clk\) if \(valid\[(\d+)\]\) (r\d+_\d+) <= "
    rf"({_FITTED});"
)
_OUTPUT = re.compile(_WIRE + rf"out(\d+) = ({_FITTED});")
_TERM = re.compile(rf"([+-]?) ?({_FITTED})(?: |$)")
_SIGNED = re.compile(r"\$signed\(\{(?:\{(\d+)\{(\w+)\[(\d+)\]\}\}, )?(\w+)(?:\[(\d+):0\])?(?:, (\d+)'d0)?\}\)")


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
                # Two's complement of ``width`` bits: wrap around as the hardware does, and move the range back to -half
                # ... half - 1.
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
    """Return the circuit in a file. Raises ValueError for a line that is not a statement of this target's, or reads a
    name that is not declared above it, or as a number of other bits than the rest of the statement has."""
    ports = ports_of(path)
    lines = path.read_text().splitlines()
    begins = next(n for n, line in enumerate(lines) if line.startswith(f"module {ports.module} ("))
    body = [line.strip() for line in lines[begins:]]
    return VerilogCircuit(ports, tuple(_Statements(ports).of(body)))


class _Statements:
    def __init__(self, ports: CircuitPorts) -> None:
        self._ports = ports
        self._widths: dict[str, int] = {}
        """The bits of each name that is declared above."""

    def of(self, lines: list[str]) -> Iterator[VerilogStatement]:
        for line in lines:
            if line.startswith(("wire signed ", "reg signed ")):
                statement = self._statement(line)
                _must(statement.name not in self._widths, line)
                self._widths[statement.name] = statement.width
                yield statement

    def _statement(self, line: str) -> VerilogStatement:
        if found := _REGISTER.fullmatch(line):
            bits, name, stage, again, value = found.groups()
            _must(name == again, line)
            return VerilogStatement(name, int(bits) + 1, "register", (self._copied(value, bits, line),), (int(stage),))
        if found := _OUTPUT.fullmatch(line):
            operand = self._copied(found[3], found[1], line)
            return VerilogStatement(f"out{found[2]}", int(found[1]) + 1, "output", (operand,), (int(found[2]),))
        if found := _INPUT.fullmatch(line):
            low, bits = int(found[4]), self._ports.input_width
            _must(int(found[3]) - low == bits - 1 and low % bits == 0, line)
            return VerilogStatement(found[2], int(found[1]) + 1, "input", (), (low // bits,))
        if found := _LARGER.fullmatch(line):
            bits, name, *values = found.groups()
            at = max(self._widths.get(self._name(value, line), 0) for value in values[:2])
            first, second = (self._copied(value, at - 1, line) for value in values[:2])
            _must((first, second) == tuple(self._copied(value, bits, line) for value in values[2:]), line)
            return VerilogStatement(name, int(bits) + 1, "larger", (first, second), ())
        if found := _CLAMP.fullmatch(line):
            bits, name, module, taken, to, shift, sign, low_digits, high, operand, again = found.groups()
            _must(name == again and int(to) == int(bits) + 1 and module == self._ports.module, line)
            _must(self._widths.get(operand) == int(taken), line)
            limit = -int(low_digits) if sign else int(low_digits)
            return VerilogStatement(name, int(to), "clamp", (operand,), (int(shift), limit, int(high), int(taken)))
        found = _SUM.fullmatch(line)
        _must(found is not None, line)
        assert found is not None
        return self._sum(found[2], int(found[1]) + 1, found[3], line)

    def _sum(self, name: str, width: int, text: str, line: str) -> VerilogStatement:
        operands, numbers, constant, at = [], [], 0, 0
        while at < len(text):
            found = _TERM.match(text, at)
            _must(found is not None, line)
            assert found is not None
            sign, value = -1 if found[1] == "-" else 1, found[2]
            if value == "1'sb0":
                _must(width == 1, line)
            elif "'sd" in value:
                bits, digits = map(int, value.split("'sd"))
                _must(bits == width and digits < 2 ** (bits - 1), line)
                constant += sign * digits
            else:
                operand, shift = self._fitted(value, width, line)
                operands.append(operand)
                numbers += [sign, shift]
            at = found.end()
        return VerilogStatement(name, width, "sum", tuple(operands), (*numbers, constant))

    def _name(self, value: str, line: str) -> str:
        if found := _SIGNED.fullmatch(value):
            return found[4]
        _must(value in self._widths, line)
        return value

    def _copied(self, value: str, bits: str | int, line: str) -> str:
        """The name that is read as it is, as a number of ``bits + 1`` bits."""
        name, shift = self._fitted(value, int(bits) + 1, line)
        _must(shift == 0, line)
        return name

    def _fitted(self, value: str, width: int, line: str) -> tuple[str, int]:
        """The name that is read, and by how many bits it is shifted, in a value of ``width`` bits."""
        found = _SIGNED.fullmatch(value)
        if found is None:
            _must(self._widths.get(value) == width, line)
            return value, 0
        repeated, signed, sign_bit, name, upper, zeros = found.groups()
        own = self._widths.get(name, 0)
        taken, shift = own if upper is None else int(upper) + 1, int(zeros or 0)
        _must(0 < taken <= own and int(repeated or 0) + taken + shift == width, line)
        if repeated is not None:
            _must(signed == name and int(sign_bit) == own - 1 and taken == own, line)
        return name, shift


def _must(holds: bool, line: str) -> None:
    if not holds:
        raise ValueError(f"{line!r} is not a statement of the target verilog")
