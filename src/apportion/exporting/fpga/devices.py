"""The devices that a circuit is placed on: what they hold, and how long a signal takes in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FpgaDevice:
    """A device and its package. Times are estimates that pipelines are cut by; only the tools' own are reported."""

    name: str
    luts: int
    """The number of cells of a look-up table with four inputs and a flip-flop."""
    pins: int
    """The number of pins for signals that the package has."""
    package: str
    synthesis: str
    """The command of yosys."""
    placer: str
    """The program that places and routes."""
    debian: str
    """The Debian package of that program; "" where there is none."""
    options: tuple[str, ...]
    """What the placer is called with."""
    step_ns: float
    """The delay from the output of a cell to that of the next one, routing included."""
    carry_ns: float
    """The time of one bit of a carry chain."""
    clock_mhz: float
    """The clock that is aimed at where the user names none."""


DEVICES = {
    device.name: device
    for device in (
        FpgaDevice(
            name="ice40-hx8k", luts=7680, pins=206, package="ct256", synthesis="synth_ice40", placer="nextpnr-ice40",
            debian="nextpnr-ice40", options=("--hx8k", "--package", "ct256", "--pcf-allow-unconstrained"),
            step_ns=1.9, carry_ns=0.19, clock_mhz=60,
        ),
        FpgaDevice(
            name="ecp5-25k", luts=24288, pins=197, package="CABGA256", synthesis="synth_ecp5", placer="nextpnr-ecp5",
            debian="", options=("--25k", "--package", "CABGA256", "--lpf-allow-unconstrained"),
            step_ns=1.6, carry_ns=0.06, clock_mhz=80,
        ),
    )
}  # fmt: skip
