"""What the compiler of circuits chooses and reads, piece by piece: exponents, stages, tools' logs, who has to agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import digits_nets
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from apportion.errors import NotVerified
from apportion.exporting.exporter import export
from apportion.exporting.fpga import compiler
from apportion.exporting.fpga.compiler import compiled
from apportion.exporting.fpga.devices import DEVICES
from apportion.exporting.fpga.fine_tuning import fine_tuned
from apportion.exporting.fpga.fixed_point import FixedLayer, FixedNet, IntegerFormat
from apportion.exporting.fpga.float_layers import FloatLayer, imported
from apportion.exporting.fpga.netlist import IntegerRange, Op
from apportion.exporting.fpga.proof import proved
from apportion.exporting.fpga.quantizer import quantized, weights
from apportion.exporting.fpga.tools import programs, simulators
from apportion.exporting.fpga.tools.sat import proved_limits
from apportion.exporting.fpga.tools.synthesis import PlacedCircuit, placed
from apportion.exporting.fpga.verilog_reader import circuit_in
from apportion.exporting.fpga.verilog_text import clamp_module, limit_name
from apportion.exporting.target import TrainedNetwork
from apportion.exporting.targets import verilog
from apportion.exporting.targets.verilog import Verilog

pytest.importorskip("alkaid")
HX8K = DEVICES["ice40-hx8k"]


def test_numbers_are_rounded_to_the_nearest_integer_halves_up_and_limited() -> None:
    numbers = torch.tensor([0.24, 0.25, -0.25, -0.26, 0.75, 100.0, -100.0])
    assert IntegerFormat(-8, 7, 1).of(numbers).tolist() == [0, 1, 0, -1, 2, 7, -8]


@pytest.mark.parametrize(("low", "by_hand"), [(0, [0, 0, 0, 0, 0, 2, 2, 2, 7]), (-8, [-8, -1, -1, -1, 0, 2, 2, 2, 7])])
def test_the_integers_are_those_that_are_worked_out_by_hand(low: int, by_hand: list[int], tmp_path: Path) -> None:
    given = torch.tensor([-34.0, -4, -3, -2, 1, 4, 5, 6, 34])
    # times 3, divided by 8:  -12.75, -1.5, -1.125, -0.75, 0.375, 1.5, 1.875, 2.25, 12.75
    net = FixedNet(
        (
            FixedLayer(name="input", kind="input", inputs=(), shape=(1,), exponent=0, low=-64, high=63),
            FixedLayer(
                name="linear", kind="linear", inputs=(0,), shape=(1,), exponent=2, weight=np.array([[3]]),
                bias=np.array([0]),
            ),
            FixedLayer(
                name="limit", kind="requantise", inputs=(1,), shape=(1,), exponent=-1, low=low, high=7, shift=3
            ),
        )
    )  # fmt: skip
    circuit = compiled(net, tmp_path / "net.v", HX8K, 60, place=False, module="net")
    assert circuit.ports.output_exponent == -1
    integers = circuit_in(tmp_path / "net.v").run(given.long().numpy()[:, None])
    assert integers[:, 0].tolist() == by_hand
    assert net.integers(given[:, None])[-1][:, 0].tolist() == by_hand
    assert net.outputs(given[:, None])[:, 0].tolist() == [2 * q for q in by_hand]


def test_each_output_channel_has_the_exponent_of_its_own_least_error() -> None:
    integers, exponents = weights(torch.tensor([[7.0, -3.0], [0.875, 0.25], [0.0, 0.0]]), 4)
    assert exponents[:2].tolist() == [0, 3]
    assert integers.tolist() == [[7, -3], [7, 2], [0, 0]]


def test_a_clipped_relu_never_gives_more_than_its_limit() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU6())
    with torch.no_grad():
        net[0].weight.copy_(10 * torch.eye(4))
        net[0].bias.zero_()
    inputs = torch.linspace(0, 1, 40).reshape(10, 4)
    assert quantized(imported(net, inputs), inputs, 5).outputs(inputs).max() == 6.0


def test_fine_tuning_learns_with_the_integers_of_few_bits() -> None:
    data, net = digits_nets.data(), digits_nets.trained(digits_nets.dense)
    inputs, targets = (x[digits_nets.HELD_OUT :] for x in digits_nets.digits())
    layers = imported(net, inputs[:3])
    trained = TrainedNetwork(module=net, sample=inputs[:3], training=data.training, loss=data.loss)
    learned = fine_tuned(layers, inputs[:512], trained, 2, 2)

    def error(of: list[FloatLayer]) -> float:
        outputs = torch.from_numpy(quantized(of, inputs[:512], 2).outputs(inputs))
        return float(nn.functional.cross_entropy(outputs, targets))

    assert error(learned) < 0.7 * error(layers)


class Skipping(nn.Module):
    """A number of its first layer is read again many stages later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        found: Tensor = self.last((self.second(x) + x).relu())
        return found


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="not installed: iverilog")
@pytest.mark.processes
@pytest.mark.parametrize(("pins", "beats"), [(206, 1), (35, 2), (27, 6)])
def test_examples_never_meet_in_many_stages_however_often_they_come(pins: int, beats: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.rand(60, 6)
    net = quantized(imported(Skipping(), inputs), inputs, 4)
    path = tmp_path / "net.v"
    ports = compiled(net, path, replace(HX8K, pins=pins), 1000, place=False, module="net").ports
    assert (ports.beats, ports.stages > 12) == (beats, True)
    circuit = circuit_in(path)
    assert len(proved(circuit, net)) == len(net.layers)
    integers = simulators.integers_in(inputs, ports)
    found = simulators.icarus(path, ports, integers)
    np.testing.assert_array_equal(found, net.integers(inputs)[-1].numpy())


@pytest.mark.skipif(shutil.which("yosys") is None, reason="not installed: yosys")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("width", "shift", "low", "high"),
    [(12, 3, 0, 15), (8, 3, 0, 15), (6, 0, 0, 7), (9, 2, 0, 11), (9, 2, -8, 7), (4, 1, -8, 7), (3, 5, 0, 15)],
)
def test_modules_limit_every_number(width: int, shift: int, low: int, high: int, tmp_path: Path) -> None:
    to, op = IntegerRange(low, high).width, Op("clamp", (0,), (shift, low, high))
    lines = clamp_module("net", width, to, op)
    (tmp_path / "net.v").write_text("\n".join(lines))
    assert proved_limits(tmp_path / "net.v") == {limit_name("net", width, to, op): True}


def circuit_at(mhz: float) -> PlacedCircuit:
    return PlacedCircuit(
        yosys="yosys", placer="nextpnr", luts=10, flip_flops=5, cells_used=10, cells=7680, pins_used=9, mhz=mhz,
        logic_ns=4.0, routing_ns=9.0,
    )  # fmt: skip


def placing(monkeypatch: pytest.MonkeyPatch, *reached: float) -> list[str]:
    """Circuits are placed at these clocks, one after the other; returns what was placed."""
    texts: list[str] = []

    def fake(path: Path, module: str, device: Any, clock_mhz: float) -> PlacedCircuit:
        texts.append(path.read_text())
        return circuit_at(reached[len(texts) - 1])

    monkeypatch.setattr(compiler, "placed", fake)
    return texts


def small() -> FixedNet:
    inputs = digits_nets.digits()[0]
    return quantized(imported(digits_nets.trained(digits_nets.dense), inputs[:3]), inputs[500:], 3)


def test_stages_are_made_shorter_until_the_clock_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = placing(monkeypatch, 40.0, 61.0)
    made = compiled(small(), tmp_path / "net.v", HX8K, 60, place=True, module="net")
    assert made.placement == circuit_at(61.0)
    assert len(texts) == 2
    assert texts[1] == (tmp_path / "net.v").read_text()
    assert [text.count("  reg signed ") for text in texts] == sorted({text.count("  reg signed ") for text in texts})


def test_a_clock_that_is_not_reached_is_refused_with_the_best_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placing(monkeypatch, 40.0, 50.0, 45.0)
    with pytest.raises(ValueError, match=r"reaches 50.0 MHz on ice40-hx8k, and clock_mhz=60 was asked for.*=50, fewer"):
        compiled(small(), tmp_path / "net.v", HX8K, 60, place=True, module="net")


def tools_say(monkeypatch: pytest.MonkeyPatch, stat: str, used: dict[str, Any], said: str, status: int = 0) -> None:
    def synthesised(folder: Path, *command: str, **others: Any) -> str:
        (folder / "stat.txt").write_text(stat)
        return ""

    def routed(folder: Path, *command: str, **others: Any) -> tuple[int, str]:
        report = {"utilization": used, "fmax": {"clk": {"achieved": 81.5}, "other": {"achieved": 99.0}}}
        (folder / "report.json").write_text(json.dumps(report))
        return status, said

    monkeypatch.setattr(programs, "must_run", synthesised)
    monkeypatch.setattr(programs, "run", routed)
    monkeypatch.setattr(programs, "needed", lambda what, cure, *names: names[0])
    monkeypatch.setattr(programs, "version", lambda program, question="": program)


STAT = """
   Number of cells:               1377
     CCU2C                         100
     LUT4                           20
     PFUMX                           3
     TRELLIS_FF                      7
"""
LONGEST = "Critical path report for clock 'clk'\nInfo: 4.97 ns logic, 6.60 ns routing\n"


def test_what_the_tools_of_an_ecp5_say_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"TRELLIS_COMB": {"used": 321, "available": 24288}, "TRELLIS_IO": {"used": 12, "available": 197}}
    tools_say(monkeypatch, STAT, used, "Info: 1.00 ns logic, 2.00 ns routing\n" + LONGEST)
    (tmp_path / "net.v").write_text("")
    found = placed(tmp_path / "net.v", "net", DEVICES["ecp5-25k"], 80)
    assert (found.luts, found.flip_flops, found.cells_used, found.cells, found.pins_used) == (220, 7, 321, 24288, 12)
    assert (found.mhz, found.logic_ns, found.routing_ns, found.limited_by) == (81.5, 4.97, 6.6, "routing")


@pytest.mark.parametrize(
    ("stat", "status", "said", "words"),
    [
        (STAT.replace("100\n", "90000\n"), 0, "", r"needs 180020 look-up tables, and ecp5-25k has 24288: it is 155732"),
        (STAT, 1, "Info: TRELLIS_COMB: 30000/24288   123%\nERROR: failed", r"needs 30000 logic cells, .* 5712 \(24%\)"),
    ],
)
def test_what_does_not_fit_says_by_how_much(
    stat: str, status: int, said: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools_say(monkeypatch, stat, {}, said, status)
    (tmp_path / "net.v").write_text("")
    with pytest.raises(ValueError, match=words):
        placed(tmp_path / "net.v", "net", DEVICES["ecp5-25k"], 80)


@pytest.mark.parametrize("wrong", [0, 1])
def test_every_simulator_has_to_agree_to_the_bit(wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulator(number: int) -> Callable[..., Any]:
        def run(path: Path, ports: Any, integers: Any) -> Any:
            found = circuit_in(path).run(integers)
            found[-1, -1] += number == wrong
            return found

        return run

    monkeypatch.setattr(verilog, "SIMULATORS", {f"simulator{n}": ("-V", simulator(n)) for n in range(2)})
    monkeypatch.setattr(programs, "found", lambda *names: names[0] if names[0].startswith("simulator") else None)
    monkeypatch.setattr(programs, "version", lambda program, question: f"{program} 1.0")
    target = Verilog(bits=3, place=False, most_lost=None)
    with pytest.raises(NotVerified, match=f"outputs by simulator{wrong} 1.0 differ"):
        export(nn.Linear(4, 2), torch.rand(3, 4), tmp_path / "net.v", target=target)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(verilog, "SIMULATORS", {f"simulator{n}": ("-V", simulator(9)) for n in range(2)})
    made = export(nn.Linear(4, 2), torch.rand(3, 4), tmp_path / "net.v", target=replace(target, bits=4))
    assert [one.reader for one in made.verifications] == ["simulator0 1.0", "simulator1 1.0"]
