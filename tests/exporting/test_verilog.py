"""Circuits in Verilog: bit for bit the network in integers, in somebody else's simulators and for every input."""

from __future__ import annotations

import re
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

from apportion.errors import NotVerified, ProgramMissing
from apportion.exporting.exporter import export
from apportion.exporting.fpga.fixed_point import FixedNet
from apportion.exporting.fpga.float_layers import imported
from apportion.exporting.fpga.netlist import Netlist
from apportion.exporting.fpga.proof import proved
from apportion.exporting.fpga.quantizer import quantized
from apportion.exporting.fpga.tools.sat import proved_limits
from apportion.exporting.fpga.verilog_reader import circuit_in
from apportion.exporting.targets.verilog import Verilog

pytest.importorskip("alkaid")
NETS: dict[str, Any] = {
    "dense": digits_nets.dense,
    "convolutional": digits_nets.convolutional,
    "pooled": digits_nets.pooled,
    "residual": digits_nets.Residual,
}
SIMULATED = Verilog(bits=4, place=False, verify="simulated", most_lost=None)


def needs(*programs: str) -> Any:
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def sample() -> Tensor:
    return digits_nets.digits()[0][:3]


@pytest.mark.parametrize(("name", "bits"), [("dense", 4), ("convolutional", 6), ("pooled", 4), ("residual", 5)])
@pytest.mark.thorough
def test_the_circuit_is_the_network_in_integers_for_every_input(name: str, bits: int, tmp_path: Path) -> None:
    net = digits_nets.trained(NETS[name])
    target = replace(SIMULATED, bits=bits)
    made = export(net, sample(), tmp_path / "net.v", target=target, data=digits_nets.data())
    (seen,) = made.verifications
    assert (seen.difference, seen.limit, seen.held_out) == (0.0, 0.0, 500)
    assert seen.simulated_by == "apportion"
    shown = {row[0]: row[3] for row in made.tables[0].rows}
    assert [shown[x["name"]] for x in made.about["layers"]] == ["for every input"] * len(made.about["layers"])
    assert [file.name for file in tmp_path.iterdir()] == ["net.v"]


@needs("iverilog", "verilator")
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.processes
@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("name", ["dense", "convolutional"])
def test_icarus_and_verilator_compute_500_held_out_examples_to_the_bit(name: str, bits: int, tmp_path: Path) -> None:
    net = digits_nets.trained(NETS[name])
    target = Verilog(bits=bits, place=False, fine_tune_epochs=5)
    made = export(net, sample(), tmp_path / "net.v", target=target, data=digits_nets.data())
    assert [one.reader.split()[0] for one in made.verifications] == ["Icarus", "Verilator"]
    for one in made.verifications:
        assert (one.difference, one.held_out, one.simulated_by) == (0.0, 500, None)
        assert one.before["accuracy"] - one.after["accuracy"] <= 0.02


@needs("iverilog")
@pytest.mark.processes
@pytest.mark.thorough
def test_icarus_sees_what_our_own_simulation_sees(tmp_path: Path) -> None:
    net = digits_nets.trained(digits_nets.pooled)
    export(net, sample(), tmp_path / "net.v", target=SIMULATED, data=digits_nets.data())
    from apportion.exporting.fpga.tools import simulators

    circuit = circuit_in(tmp_path / "net.v")
    integers = simulators.integers_in(digits_nets.digits()[0][:40], circuit.ports)
    integers[20:] = np.random.default_rng(0).integers(circuit.ports.input_low, circuit.ports.input_high + 1, (20, 64))
    found = simulators.icarus(tmp_path / "net.v", circuit.ports, integers)
    np.testing.assert_array_equal(found, circuit.run(integers))


def fixed(bits: int = 4) -> FixedNet:
    inputs = digits_nets.digits()[0]
    return quantized(imported(digits_nets.trained(digits_nets.dense), inputs[:3]), inputs[500:], bits)


def shifted(text: str) -> str:
    """One operand is shifted by another bit, and its sign repeated once less."""

    def more(found: re.Match[str]) -> str:
        return f"{{{int(found[1]) - 1}{{{found[2]}}}}}, {found[3]}, 2'd0"

    return re.sub(r"\{([2-9])\{(\w+\[\d+\])\}\}, (\w+), 1'd0", more, text, count=1)


def swapped(text: str) -> str:
    """The first output is an input."""
    found = re.search(r"wire signed \[(\d+):0\] out0", text)
    assert found is not None
    return re.sub(r"out0 = .+;", f"out0 = $signed({{{{{int(found[1]) - 4}{{n3[4]}}}}, n3}});", text, count=1)


WRONG: dict[str, Callable[[str], str]] = {
    "a shift": shifted,
    "a sign": lambda text: re.sub(r"(wire signed \[\d+:0\] n\d+ = [^?\n]*?) \+ ", r"\1 - ", text, count=1),
    "a limit": lambda text: re.sub(r"limit_(\d+)_5_(\d+)_0_15 ", r"limit_\1_5_\2_0_7 ", text),
    "a stage": lambda text: re.sub(r"\(valid\[1\]\)", "(valid[2])", text, count=1),
    "an input": lambda text: re.sub(r"buffer\[7:4\]", "buffer[3:0]", text, count=1),
    "an output": swapped,
}


def moved_up(text: str) -> str:
    """A register that is read above its declaration."""
    lines = text.splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if " reg signed " in line)
    return "".join([*lines[:at], *lines[at + 1 : -1], lines[at], lines[-1]])


@pytest.mark.parametrize(
    "wrong", [moved_up, lambda text: re.sub(r"wire signed \[9:0\] n", "wire signed [7:0] n", text, count=1)]
)
@pytest.mark.cases(2)
def test_a_name_that_is_declared_later_or_has_other_bits_is_no_statement(
    wrong: Callable[[str], str], tmp_path: Path
) -> None:
    net = digits_nets.trained(digits_nets.dense)
    path = export(net, sample(), tmp_path / "net.v", target=SIMULATED, data=digits_nets.data()).path
    text = path.read_text()
    assert wrong(text) != text
    path.write_text(wrong(text))
    with pytest.raises(ValueError, match="is not a statement of the target verilog"):
        circuit_in(path)


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.cases(2)
def test_the_proof_finds_what_is_wrong(what: str, tmp_path: Path) -> None:
    net = digits_nets.trained(digits_nets.dense)
    export(net, sample(), tmp_path / "net.v", target=SIMULATED, data=digits_nets.data())
    text = (tmp_path / "net.v").read_text()
    assert len(proved(circuit_in(tmp_path / "net.v"), fixed())) == 4
    wrong = WRONG[what](text)
    assert wrong != text
    (tmp_path / "net.v").write_text(wrong)
    with pytest.raises(NotVerified, match="the circuit does not compute the network in integers"):
        proved(circuit_in(tmp_path / "net.v"), fixed())


@needs("yosys")
@pytest.mark.processes
@pytest.mark.thorough
def test_sat_shows_that_limits_are_limits_and_finds_one_that_is_not(tmp_path: Path) -> None:
    net = digits_nets.trained(digits_nets.pooled)
    export(net, sample(), tmp_path / "net.v", target=SIMULATED, data=digits_nets.data())
    found = proved_limits(tmp_path / "net.v")
    assert found
    assert all(found.values())
    text = (tmp_path / "net.v").read_text()
    wrong = re.sub(r"\? (\d+)'sb[01]+ : t", r"? \1'sd3 : t", text).replace("{~s[", "{s[")
    assert wrong != text
    (tmp_path / "net.v").write_text(wrong)
    with pytest.raises(NotVerified, match=r"the module \w+_limit_\w+ does not limit every number, by yosys' SAT"):
        proved_limits(tmp_path / "net.v")


def test_a_circuit_of_another_network_is_not_given_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Netlist.clamp
    monkeypatch.setattr(Netlist, "clamp", lambda self, n, shift, low, high: right(self, n, shift, low, high - 1))
    with pytest.raises(NotVerified, match="does not compute the network in integers"):
        export(digits_nets.trained(digits_nets.dense), sample(), tmp_path / "net.v", target=SIMULATED)
    assert list(tmp_path.iterdir()) == []


def test_fewer_bits_than_the_accuracy_needs_leave_no_file(tmp_path: Path) -> None:
    target = Verilog(bits=2, place=False, verify="simulated", most_lost=0.01)
    with pytest.raises(NotVerified, match="1 points less at most were allowed"):
        export(
            digits_nets.trained(digits_nets.dense), sample(), tmp_path / "n.v", target=target, data=digits_nets.data()
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_fine_tuning_and_pruning_leave_the_network_alone_and_the_weights_at_zero(tmp_path: Path) -> None:
    net = digits_nets.trained(digits_nets.dense)
    before = {name: x.clone() for name, x in net.state_dict().items()}
    found = {}
    for name, target in (
        ("all", SIMULATED),
        ("pruned", replace(SIMULATED, prune=0.5, fine_tune_epochs=3, most_lost=0.05)),
    ):
        made = export(net, sample(), tmp_path / f"{name}.v", target=target, data=digits_nets.data())
        found[name] = dict(made.tables[1].rows)["products of a weight and an input"]
    assert found["pruned"] <= 0.51 * 888
    assert found["pruned"] < found["all"]
    assert all(torch.equal(before[name], x) for name, x in net.state_dict().items())


class Ending(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.odd = nn.Linear(8, 8), layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.odd(self.first(x))
        return found


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0]
        return found[:, 0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x[:, None])[0]
        return found[:, -1]


class Dynamic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0][:3]


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + x, x


class Across(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1)


REFUSED: dict[str, tuple[Any, str]] = {
    "softmax": (lambda: Ending(nn.Softmax(1)), r"layer odd \(Softmax\) .* needs a division; leave it out"),
    "sigmoid": (lambda: Ending(nn.Sigmoid()), r"layer odd \(Sigmoid\) .*; train with ReLU"),
    "gelu": (lambda: Ending(nn.GELU()), r"layer odd \(GELU\) .*; train with ReLU"),
    "layer norm": (lambda: Ending(nn.LayerNorm(8)), r"layer odd \(LayerNorm\) .*; use batch normalisation"),
    "lstm": (Recurrent, r"layer lstm \(LSTM\) .* recurrent .*; use convolutions"),
    "attention": (
        Attending,
        r"layer attention \(MultiheadAttention\) cannot be a circuit: attention multiplies activations",
    ),
    "dynamic": (Dynamic, r"Dynamic cannot be a circuit"),
    "two outputs": (TwoOutputs, "returns 2 outputs, and a circuit gives one"),
    "across examples": (Across, "has no dimension 0 for the example"),
    "embedding": (lambda: nn.Embedding(4, 4), "takes torch.int64, and a circuit takes one tensor of floating-point"),
    "average of 3": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 1, 8)), nn.AvgPool2d((1, 3)), nn.Flatten()),
        r"layer 1 \(AvgPool2d\) .* over 3 numbers is not a shift of bits; use windows of 2, 4",
    ),
    "padding": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.AvgPool2d((1, 2)), nn.ZeroPad2d(1), nn.AvgPool2d(3)),
        r"layer 2 \(ZeroPad2d\) cannot be a circuit",
    ),
    "outputs without end": (lambda: nn.Linear(8, 200), r"has 200 outputs of .* 206 pins"),
    "too large": (
        lambda: nn.Sequential(nn.Linear(8, 800), nn.ReLU(), nn.Linear(800, 2)),
        "times too large at the least",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_circuit_is_refused_by_its_layer_with_the_cure(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    inputs = torch.randint(0, 4, (3, 8)) if case == "embedding" else torch.randn(3, 8)
    with pytest.raises(ValueError, match=words):
        export(make(), inputs, tmp_path / "net.v", target=SIMULATED)
    assert list(tmp_path.iterdir()) == []


def test_programs_that_are_missing_are_named_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramMissing, match="iverilog or verilator, and neither is installed: apt-get install"):
        export(digits_nets.dense(), sample(), tmp_path / "net.v", target=Verilog(place=False))
    made = export(digits_nets.dense(), sample(), tmp_path / "net.v", target="verilog(verify='simulated')")
    assert made.about["placement"] is None
    assert "not shown: no simulator of Verilog has run it" in {
        row[3] for row in made.tables[0].rows if row[1] == "rounds and limits"
    }


def test_wrong_parameters_say_the_rule() -> None:
    for wrong, words in (
        ({"bits": 1}, "bits=1 must be a whole number of at least 2"),
        ({"bits": 20}, "bits=20 must be at most 8"),
        ({"device": "ice40"}, "device='ice40' must be one of 'ecp5-25k', 'ice40-hx8k'"),
        ({"clock_mhz": -1.0}, "clock_mhz=-1.0 must be a number from 0 to 1000"),
        ({"clock_mhz": "60"}, "clock_mhz='60' must be a number or None"),
        ({"prune": 1.0}, "prune=1.0 must be a number of at least 0 and less than 1"),
        ({"prune": None}, "prune=None must be a number"),
        ({"most_lost": "2 %"}, "most_lost='2 %' must be a number or None"),
        ({"most_lost": -0.1}, "most_lost=-0.1 must be the accuracy that may be lost, from 0 to 1, or None for any"),
        ({"place": "no"}, "place='no' must be True or False"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            Verilog(**wrong)  # type: ignore[arg-type]
