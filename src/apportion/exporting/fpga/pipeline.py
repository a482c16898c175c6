"""The stages of a circuit: which operations are computed between two edges of the clock.

A new example comes every few cycles, as its numbers enter in several beats. A register that holds a stage's result
is therefore stable for as many cycles, and later stages read it there: it is copied only where one reads it later.
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.exporting.fpga.devices import FpgaDevice
from apportion.exporting.fpga.netlist import Netlist

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
        return None if stage == made else (op, made + self.beats * ((stage - made - 1) // self.beats))


def pipelined(netlist: Netlist, device: FpgaDevice, period_ns: float, beats: int) -> CircuitPipeline:
    """Return the stages in which, by the device's estimates, no way between two registers is longer than the period.

    ``beats``: the number of cycles between two examples, at the least.
    """
    stages: list[int] = []
    times: list[float] = []  # from the beginning of its stage until the value is there, in ns
    for op, extent in zip(netlist.ops, netlist.ranges, strict=True):
        carried = device.carry_ns * extent.width if op.kind in ("sum", "larger") else 0.0
        takes = device.step_ns * STEPS[op.kind] + carried
        if op.kind == "sum" and not op.operands:
            takes = 0.0
        stage = max((stages[x] for x in op.operands), default=0)
        begins = max((times[x] for x in op.operands if stages[x] == stage), default=device.step_ns)
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
