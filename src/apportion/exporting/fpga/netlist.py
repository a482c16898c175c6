"""A circuit as numbered operations on integers, each with the exact range of what it computes.

Within a linear stage every operation is a sum of the stage's inputs with integer coefficients: from these its range is
known exactly, and it is as wide as it has to be. A stage begins with the inputs of the circuit and with every operation
that is not linear.

The stages of a circuit: which operations are computed between two edges of the clock.

A new example comes every few cycles, as its numbers enter in several beats. A register that holds a stage's result
is therefore stable for as many cycles, and later stages read it there: it is copied only where one reads it later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from apportion.exporting.fpga.devices import FpgaDevice

OpKind = Literal["input", "sum", "clamp", "larger"]


class Op(NamedTuple):
    """One operation. Which operands and numbers it has is a matter of its kind.

    ========  =========================================================================================================
    input     the integer number ``numbers[0]`` of the circuit's inputs
    sum       the sum over its operands of sign * operand * 2**shift, with (sign, shift) for each in ``numbers`` in
              turn, and of the last number, a constant
    clamp     operand // 2**s, limited to low and high: ``numbers`` is (s, low, high)
    larger    the larger of two operands
    ========  =========================================================================================================
    """

    kind: OpKind
    operands: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class IntegerRange:
    """The smallest and the largest integer that an operation computes."""

    low: int
    high: int

    @property
    def width(self) -> int:
        """The number of bits of a two's complement that holds it."""
        # Two's complement: a negative number n needs the bits of ~n, and one more for the sign; -8 fits in 4 bits and 8
        # does not.
        return max((~self.low if self.low < 0 else self.low).bit_length(), max(self.high, 0).bit_length(), 0) + 1


@dataclass(frozen=True)
class Term:
    """An operation times 2**shift, or times -2**shift, and a constant; the operation None is 0.

    It has the arithmetic that an adder graph is written in: sums, differences and products with powers of two.
    """

    netlist: Netlist
    op: int | None
    shift: int = 0
    negative: bool = False
    constant: int = 0

    def __add__(self, other: Any) -> Term:
        if isinstance(other, Term):
            return self.netlist.sum_of(self, other)
        return replace(self, constant=self.constant + int(other))

    __radd__ = __add__

    def __neg__(self) -> Term:
        return replace(self, negative=not self.negative, constant=-self.constant)

    def __sub__(self, other: Any) -> Term:
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> Term:
        return (-self).__add__(other)

    def __mul__(self, factor: float) -> Term:
        magnitude = abs(float(factor))
        shift = math.frexp(magnitude)[1] - 1
        if 2.0**shift != magnitude or (self.constant and shift < 0):
            raise AssertionError(f"an adder graph multiplies by {factor}, which is not a power of two")
        negative, constant = self.negative ^ (factor < 0), int(self.constant * factor)
        return replace(self, shift=self.shift + shift, negative=negative, constant=constant)

    __rmul__ = __mul__

    @property
    def range(self) -> IntegerRange:
        """The range of its values, which are integers."""
        if self.op is None:
            return IntegerRange(self.constant, self.constant)
        found = self.netlist.ranges[self.op]
        ends = [(end << self.shift) * (-1 if self.negative else 1) + self.constant for end in (found.low, found.high)]
        return IntegerRange(min(ends), max(ends))


class Netlist:
    """Operations in an order in which each follows its operands."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.ranges: list[IntegerRange] = []
        self.outputs: list[int] = []
        self._forms: list[tuple[dict[int, int], int]] = []
        self._known: dict[Op, int] = {}

    def add(self, op: Op, limits: IntegerRange | None = None) -> int:
        """Return the number of this operation, which is added where it is not there yet."""
        if op in self._known:
            return self._known[op]
        number = len(self.ops)
        if op.kind == "sum":
            form = self.form_of(op)
            self._forms.append(form)
            self.ranges.append(range_of(form, self.ranges))
        else:
            assert limits is not None
            self._forms.append(({number: 1}, 0))
            self.ranges.append(limits)
        self.ops.append(op)
        self._known[op] = number
        return number

    def form_of(self, op: Op) -> tuple[dict[int, int], int]:
        """Return (the coefficient of each operation that begins the stage, the constant) of a sum."""
        coefficients: dict[int, int] = {}
        constant = op.numbers[-1]
        for n, operand in enumerate(op.operands):
            factor = op.numbers[2 * n] << op.numbers[2 * n + 1]
            inner, added = self._forms[operand]
            constant += factor * added
            for key, value in inner.items():
                coefficients[key] = coefficients.get(key, 0) + factor * value
        return {key: value for key, value in coefficients.items() if value}, constant

    def input(self, index: int, low: int, high: int) -> Term:
        return Term(self, self.add(Op("input", (), (index,)), IntegerRange(low, high)))

    def sum_of(self, first: Term, second: Term) -> Term:
        """Return the sum of two terms: what both are a multiple of, a common sign and constants stay outside of it."""
        constant = first.constant + second.constant
        if first.op is None or second.op is None:
            return replace(second if first.op is None else first, constant=constant)
        negative = first.negative and second.negative
        if first.negative and not negative:
            first, second = second, first
        assert first.op is not None
        assert second.op is not None
        least = min(first.shift, second.shift)
        sign = -1 if second.negative and not negative else 1
        op = Op("sum", (first.op, second.op), (1, first.shift - least, sign, second.shift - least, 0))
        if not self.form_of(op)[0]:
            return Term(self, None, constant=constant)
        return Term(self, self.add(op), least, negative, constant)

    def settled(self, term: Term) -> int:
        """Return the number of the operation that is this term, which is an integer."""
        if term.op is None:
            return self.add(Op("sum", (), (term.constant,)))
        if not term.constant and not term.negative and term.shift == 0:
            return term.op
        return self.add(Op("sum", (term.op,), (-1 if term.negative else 1, term.shift, term.constant)))

    def requantised(self, term: Term, shift: int, low: int, high: int) -> Term:
        """Return a term divided by 2**shift, rounded to the nearest integer, halves up, and limited."""
        if shift < 0:
            return self.requantised(term * 2.0**-shift, 0, low, high)
        # Rounding half up is adding half a step before the shift, which floors. The half is part of the constant, so
        # that it costs no adder of its own.
        total = term.constant + (2 ** (shift - 1) if shift else 0)
        # A sum that is a multiple of 2**k cannot carry out of its k low bits: only the constant is there, and floor((a
        # * 2**k + c) / 2**s) = floor((a + floor(c / 2**k)) / 2**(s - k)).
        same = min(shift, term.shift if term.op is not None else shift)  # the low bits that only the constant has
        number = self.settled(replace(term, shift=term.shift - same, constant=total >> same))
        limited = self.clamp(number, shift - same, low, high)
        only = self.ranges[limited]
        return Term(self, limited) if only.low < only.high else Term(self, None, constant=only.low)

    def clamp(self, number: int, shift: int, low: int, high: int) -> int:
        """Return the number of the operation that divides by 2**shift, rounds down and limits."""
        before = self.ranges[number]
        # Shift and limit are monotonic, so that the ends of the range give the range of the result exactly. Python's >>
        # floors for negative numbers, as Verilog's >>> does.
        least = min(max(before.low >> shift, low), high)
        most = min(max(before.high >> shift, low), high)
        return self.add(Op("clamp", (number,), (shift, low, high)), IntegerRange(least, most))

    def larger(self, first: int, second: int) -> int:
        a, b = self.ranges[first], self.ranges[second]
        return self.add(Op("larger", (first, second), ()), IntegerRange(max(a.low, b.low), max(a.high, b.high)))

    def living(self) -> Netlist:
        """Return the netlist of the operations that an output needs, and of all inputs."""
        needed = set(self.outputs)
        for number in range(len(self.ops) - 1, -1, -1):
            if number in needed:
                needed |= set(self.ops[number].operands)
        made, new = Netlist(), dict[int, int]()
        for number, op in enumerate(self.ops):
            if number in needed or op.kind == "input":
                moved = op._replace(operands=tuple(new[x] for x in op.operands))
                new[number] = made.add(moved, self.ranges[number])
        made.outputs = [new[number] for number in self.outputs]
        return made


def range_of(form: tuple[Mapping[int, int], int], ranges: Any) -> IntegerRange:
    """Return the range of a sum, whose inputs are each anywhere in their own."""
    low = high = form[1]
    for key, factor in form[0].items():
        ends = factor * ranges[key].low, factor * ranges[key].high
        # The inputs of a stage are taken to be independent: for these ranges the extremes are reached, and no width is
        # larger than they need.
        low, high = low + min(ends), high + max(ends)
    return IntegerRange(low, high)


STEPS = {"input": 0, "sum": 1, "clamp": 2, "larger": 2}
"""The number of cells in a row that each kind of operation takes."""


@dataclass(frozen=True, eq=False)
class CircuitPipeline:
    """The stage of each operation, and the registers between stages."""

    stages: tuple[int, ...]
    """The stage of each operation, from 0."""
    count: int
    """The number of stages: outputs are read after the last one."""
    beats: int
    """The number of cycles between two examples, at the least."""
    registers: frozenset[tuple[int, int]]
    """Each register as (the operation whose value it holds, the stage at whose end it takes it)."""

    def source(self, op: int, stage: int) -> tuple[int, int] | None:
        """Return the register that a stage reads the value of an operation from; None: the operation itself."""
        made = self.stages[op]
        # A value is valid in its register for ``beats`` cycles, then the next example overwrites it: it is copied every
        # ``beats`` stages, and a reader takes the latest copy before it.
        return None if stage == made else (op, made + self.beats * ((stage - made - 1) // self.beats))


def pipelined(netlist: Netlist, device: FpgaDevice, period_ns: float, beats: int) -> CircuitPipeline:
    """Return the stages in which, by the device's estimates, no way between two registers is longer than the period.

    ``beats``: the number of cycles between two examples, at the least.
    """
    stages: list[int] = []
    times: list[float] = []  # from the beginning of its stage until the value is there, in ns
    for op, extent in zip(netlist.ops, netlist.ranges, strict=True):
        carried = device.carry_ns * extent.width if op.kind in ("sum", "larger") else 0.0
        # A carry chain adds its time per bit to the look-up table that feeds it; a comparison is a subtraction and has
        # one too.
        takes = device.step_ns * STEPS[op.kind] + carried
        if op.kind == "sum" and not op.operands:
            takes = 0.0
        stage = max((stages[x] for x in op.operands), default=0)
        # Operands of earlier stages come out of registers, at the beginning of this stage: only those of the same stage
        # delay it.
        begins = max((times[x] for x in op.operands if stages[x] == stage), default=device.step_ns)
        # An operation that is alone in its stage stays there even if it is too slow: another register could not make it
        # faster, and the compiler finds out by placing it.
        if begins + takes > period_ns and begins > device.step_ns:
            stage, begins = stage + 1, device.step_ns
        stages.append(stage)
        times.append(begins + takes)
    count = max(stages) + 1
    return CircuitPipeline(tuple(stages), count, beats, _registers(netlist, stages, count, beats))


def _registers(netlist: Netlist, stages: list[int], count: int, beats: int) -> frozenset[tuple[int, int]]:
    needed = set()
    last = dict.fromkeys(netlist.outputs, count)  # the last stage that reads each operation
    for number, op in enumerate(netlist.ops):
        for operand in op.operands:
            last[operand] = max(last.get(operand, 0), stages[number])
    for op_number, stage in last.items():
        needed |= {(op_number, taken) for taken in range(stages[op_number], stage, beats)}
    return frozenset(needed)
