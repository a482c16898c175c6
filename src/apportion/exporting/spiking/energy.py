"""What chips are said to take for a synaptic operation, and what a multiplication takes in ordinary hardware.

The figures are published ones, each from a design of another year and process, measured with another network: they tell
orders of magnitude. They hold the operation and its memory, not the chip at rest nor the input and output.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A neuromorphic chip."""

    name: str
    joules: float
    """For a synaptic operation, in joules."""
    source: str


CHIPS = (
    Chip(name="Loihi (14 nm)", joules=23.6e-12, source="Davies et al., IEEE Micro 38(1), 2018"),
    Chip(name="TrueNorth (28 nm)", joules=26e-12, source="Merolla et al., Science 345, 2014"),
    Chip(name="ODIN (28 nm)", joules=12.7e-12, source="Frenkel et al., IEEE TBioCAS 13(1), 2019"),
    Chip(name="SpiNNaker2 (22 nm)", joules=10e-12, source="Höppner et al., arXiv 2103.08392, 2021"),
    Chip(name="SENECA (22 nm)", joules=2.8e-12, source="Tang et al., Frontiers in Neuroscience 17, 2023"),
)
FLOAT_MAC, FLOAT_ADD = 4.6e-12, 0.9e-12
"""A multiplication and an addition of float32 in 45 nm, in joules: 3.7 and 0.9 pJ; and the addition alone."""
INT8_MAC, INT_ADD = 0.3e-12, 0.1e-12
"""A multiplication of int8 and an addition of int32 in 45 nm, in joules: 0.2 and 0.1 pJ; and the addition alone."""
MAC_SOURCE = "Horowitz, ISSCC 2014"
