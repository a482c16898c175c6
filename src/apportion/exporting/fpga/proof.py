"""A proof for every input that the circuit in a file computes the network in integers.

Each statement of the file is carried as a sum with integer coefficients over the inputs and over what is not linear
before it, together with its exact range: where the range fits the width, nothing overflows and nothing is truncated.
The network's layers are carried in the same way, from its weights in integers and from where the windows of its
convolutions and pools lie. The circuit was made from these windows as well: that they are torch's is seen in
simulation. An operation that is not linear is the same on both sides where it is the same operation of the same sum; by
induction over the layers the outputs are the same for every input. A register holds the value of the example for as
many cycles as examples are apart, and every statement must read all that it reads at a stage in which they hold the
same example.

What it rests on: that the modules that limit a number do so, which ``sat`` shows, and that the two counters count the
beats and the stages, which is seen in simulation alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apportion.errors import NotVerified
from apportion.exporting.fpga.compiler import matrix_of, windows_of
from apportion.exporting.fpga.fixed_point import FixedLayer, FixedNet
from apportion.exporting.fpga.netlist import IntegerRange, range_of
from apportion.exporting.fpga.verilog_reader import VerilogCircuit, VerilogStatement

Form = tuple[tuple[tuple[int, int], ...], int]
"""A sum: pairs of (the number of what it is over, its coefficient) in order, and a constant."""


@dataclass(frozen=True)
class ProvedLayer:
    """A layer whose numbers are the file's for every input."""

    name: str
    kind: str
    numbers: int
    """The number of numbers that it computes for an example."""


@dataclass
class _Atoms:
    """What sums are over: inputs and operations that are not linear, each known by what it is computed from."""

    known: dict[Any, int] = field(default_factory=dict)
    ranges: list[IntegerRange] = field(default_factory=list)
    largest_of: dict[int, frozenset[Form]] = field(default_factory=dict)

    def atom(self, key: Any, limits: IntegerRange) -> Form:
        if key not in self.known:
            self.known[key] = len(self.ranges)
            self.ranges.append(limits)
        return ((self.known[key], 1),), 0

    def range(self, form: Form) -> IntegerRange:
        return range_of((dict(form[0]), form[1]), self.ranges)

    def clamped(self, form: Form, shift: int, low: int, high: int) -> Form:
        """Return floor(form / 2**shift), limited; a common factor of two is divided out of it first."""
        terms, constant = form
        # A normal form: the compiler drops low bits that only the constant has, and the network does not. Both become
        # the same key only if the common factors are divided out here.
        while shift and all(factor % 2 == 0 for _, factor in terms):
            terms, constant, shift = tuple((n, factor // 2) for n, factor in terms), constant // 2, shift - 1
        form = (terms, constant)
        extent = self.range(form)
        limits = IntegerRange(*(min(max(end >> shift, low), high) for end in (extent.low, extent.high)))
        if limits.low == limits.high:
            return (), limits.low
        return self.atom(("clamp", form, shift, low, high), limits)

    def larger(self, forms: Iterable[Form]) -> Form:
        """Return the largest of these, whatever the order in which they are compared."""
        every: set[Form] = set()
        for form in forms:
            inner = self.largest_of.get(form[0][0][0]) if form[1] == 0 and [f for _, f in form[0]] == [1] else None
            every |= inner or {form}
        if len(every) == 1:
            return every.pop()
        ranges = [self.range(form) for form in every]
        limits = IntegerRange(max(r.low for r in ranges), max(r.high for r in ranges))
        found = self.atom(("larger", frozenset(every)), limits)
        self.largest_of[found[0][0][0]] = frozenset(every)
        return found


def proved(circuit: VerilogCircuit, net: FixedNet) -> list[ProvedLayer]:
    """Return the layers, each of which the file computes for every input. Raises NotVerified where one differs."""
    atoms = _Atoms()
    inputs = net.layers[0]
    outputs = _outputs_of(circuit, atoms, IntegerRange(inputs.low, inputs.high))
    values: list[list[Form]] = []
    for layer in net.layers:
        values.append(_values_of(layer, net, values, atoms))
    _must(outputs == values[-1], f"the outputs are not those of the layer {net.layers[-1].name}")
    return [ProvedLayer(layer.name, layer.kind, int(np.prod(layer.shape))) for layer in net.layers]


def _values_of(layer: FixedLayer, net: FixedNet, values: Sequence[list[Form]], atoms: _Atoms) -> list[Form]:
    given = [values[n] for n in layer.inputs]
    if layer.kind == "input":
        limits = IntegerRange(layer.low, layer.high)
        return [atoms.atom(("input", n), limits) for n in range(int(np.prod(layer.shape)))]
    shapes = [net.layers[n].shape for n in layer.inputs]
    if layer.kind in ("linear", "convolution"):
        matrix, constants = matrix_of(layer, shapes[0])
        found = []
        for row, constant in zip(matrix, constants.tolist(), strict=True):
            used = np.flatnonzero(row)
            found.append(_sum([(int(row[n]), given[0][n]) for n in used], constant))
        return found
    if layer.kind == "requantise":
        shift, made = layer.shift, []
        for form in given[0]:
            form = _sum([(2 ** max(-shift, 0), form)], 2 ** (shift - 1) if shift > 0 else 0)
            made.append(atoms.clamped(form, max(shift, 0), layer.low, layer.high))
        return made
    if layer.kind == "add":
        ups = [2 ** (layer.exponent - net.layers[n].exponent) for n in layer.inputs]
        return [_sum([(ups[0], a), (ups[1], b)], 0) for a, b in zip(*given, strict=True)]
    if layer.kind == "reshape":
        return given[0]
    windows = windows_of(layer, shapes[0])
    if layer.kind == "average":
        return [_sum([(1, given[0][n]) for n in window], 0) for window in windows]
    return [atoms.larger(given[0][n] for n in window) for window in windows]


def _sum(terms: Iterable[tuple[int, Form]], constant: int) -> Form:
    coefficients: dict[int, int] = {}
    for factor, (inner, added) in terms:
        constant += factor * added
        for n, value in inner:
            coefficients[n] = coefficients.get(n, 0) + factor * value
    return tuple(sorted((n, value) for n, value in coefficients.items() if value)), constant


@dataclass(frozen=True)
class _Known:
    """What is known of a name in the file: its sum, its width, and the stages in which it holds it."""

    form: Form
    width: int
    first: int
    last: int


def _outputs_of(circuit: VerilogCircuit, atoms: _Atoms, limits: IntegerRange) -> list[Form]:
    """Return the sum of each output of the file."""
    ports = circuit.ports
    known: dict[str, _Known] = {}
    outputs: dict[int, Form] = {}
    for statement in _in_order(circuit.statements):
        read = [known[name] for name in statement.operands]
        first = max((x.first for x in read), default=0)
        last = min((x.last for x in read), default=0 if statement.kind == "input" else ports.stages)
        _must(first <= last, f"{statement.name} reads numbers of two examples")
        if statement.kind == "register":
            stage = statement.numbers[0]
            _must(first <= stage <= last, f"{statement.name} takes a number of another example")
            # A register that loads at the end of a stage holds its example from the next stage on, until the next
            # example is loaded ``beats`` cycles later.
            known[statement.name] = _Known(read[0].form, statement.width, stage + 1, stage + ports.beats)
            form = read[0].form
        else:
            form = _form_of(statement, read, atoms, limits)
            known[statement.name] = _Known(form, statement.width, first, last)
        needs = atoms.range(form).width
        _must(needs <= statement.width, f"{statement.name} overflows: it needs {needs} bits, not {statement.width}")
        if statement.kind == "output":
            _must(first <= ports.stages <= last, f"{statement.name} is of another example")
            outputs[statement.numbers[0]] = form
    return [outputs[n] for n in range(len(outputs))]


def _form_of(statement: VerilogStatement, read: Sequence[_Known], atoms: _Atoms, limits: IntegerRange) -> Form:
    numbers = statement.numbers
    if statement.kind == "input":
        return atoms.atom(("input", numbers[0]), limits)
    if statement.kind == "sum":
        factors = [numbers[2 * n] << numbers[2 * n + 1] for n in range(len(read))]
        return _sum(zip(factors, (x.form for x in read), strict=True), numbers[-1])
    if statement.kind == "clamp":
        shift, low, high, taken = numbers
        _must(taken == read[0].width, f"{statement.name} limits a number of {read[0].width} bits as one of {taken}")
        return atoms.clamped(read[0].form, shift, low, high)
    if statement.kind == "larger":
        return atoms.larger(x.form for x in read)
    return read[0].form


def _in_order(statements: Sequence[VerilogStatement]) -> list[VerilogStatement]:
    """Return the statements so that each follows what it reads; registers stand at the end of the file."""
    waiting: dict[str, list[VerilogStatement]] = {}
    missing: dict[str, int] = {}
    ready: list[VerilogStatement] = []
    for statement in statements:
        missing[statement.name] = len(set(statement.operands))
        for name in set(statement.operands):
            waiting.setdefault(name, []).append(statement)
        if not statement.operands:
            ready.append(statement)
    for statement in ready:
        for reader in waiting.get(statement.name, ()):
            missing[reader.name] -= 1
            if not missing[reader.name]:
                ready.append(reader)
    _must(len(ready) == len(statements), "the file has a loop")
    return ready


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise NotVerified(f"the circuit does not compute the network in integers: {what}; nothing was written")
