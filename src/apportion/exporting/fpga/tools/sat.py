"""A proof by yosys' SAT solver that each module which limits a number does so for every number."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from apportion.errors import ApportionError, NotVerified
from apportion.exporting.fpga.tools import programs

SECONDS = 20
"""The longest time for the proof of one module; one that takes longer is marked as seen in simulation alone."""
_DISPROVED, _TIMED_OUT = "proof did fail", "proof did time out"
_LIMIT = re.compile(r"module (\w+_limit_(\d+)_(\d+)_(\d+)_(m?)(\d+)_(\d+)) ")


def limits_in(path: Path) -> list[str]:
    """Return the names of the modules in a file that limit a number."""
    return [found[1] for found in _LIMIT.finditer(path.read_text())]


def proved_limits(path: Path) -> dict[str, bool]:
    """Return, for each module of the file that limits a number, whether it is proved to do so for every number; False
    where the solver has not ended in time.

    The specification divides by 2**s with an arithmetic shift, and compares. Raises NotVerified, with the module, where
    the solver has found a number that the module does not limit.
    """
    found = {}
    with tempfile.TemporaryDirectory(prefix="apportion-verilog-") as made:
        folder = Path(made)
        text = path.read_text()
        (folder / "net.v").write_text(text)  # the path to it may have blanks
        for match in _LIMIT.finditer(text):
            name = match[1]
            (folder / "spec.v").write_text(_specification(match))
            script = (
                "read_verilog spec.v; read_verilog net.v; proc; "
                f"miter -equiv -flatten specification {name} compared; "
                f"sat -verify -timeout {SECONDS} -prove trigger 0 compared"
            )
            status, said = programs.run(folder, "yosys", "-q", "-p", script, seconds=15 * SECONDS)
            if status and _DISPROVED in said:
                raise NotVerified(
                    f"the module {name} does not limit every number, by yosys' SAT: this is a defect of the target "
                    "verilog; nothing was written"
                )
            if status and _TIMED_OUT not in said:
                raise ApportionError(f"yosys ended with status {status} at the module {name}: {said.strip()[-200:]}")
            found[name] = status == 0
    return found


def _specification(match: re.Match[str]) -> str:
    width, to, shift = (int(match[n]) for n in (2, 3, 4))
    wide = max(width, to) + 2
    low, high = f"{wide}'sd{match[6]}", f"{wide}'sd{match[7]}"
    low = f"-{low}" if match[5] else low
    return f"""
module specification (input signed [{width - 1}:0] a, output signed [{to - 1}:0] y);
  wire signed [{wide - 1}:0] wide = a;
  wire signed [{wide - 1}:0] divided = wide >>> {shift};
  wire signed [{wide - 1}:0] above = (divided < {low}) ? {low} : divided;
  wire signed [{wide - 1}:0] limited = (above > {high}) ? {high} : above;
  assign y = limited[{to - 1}:0];
endmodule
"""
