"""The neuromorphic chips that the README of NIR names, with the program that takes files to each of them.

The loader of a chip's own program has read no file here: the programs that read them are simulators, ours or others'.
"""

from __future__ import annotations

from dataclasses import dataclass

SIMULATED = "simulated"
"""What the table states of a chip whose own loader has not read the file."""


@dataclass(frozen=True, kw_only=True)
class ChipLoader:
    """A chip, and the program by which NIR files come to it."""

    chip: str
    loader: str
    """The program that takes NIR files for it."""
    dialect: str
    """The dialect that comes nearest to its neurons."""


LOADERS = (
    ChipLoader(
        chip="Speck (SynSense)", loader="sinabs with its driver, sinabs-dynapcnn", dialect="sinabs",
    ),
    ChipLoader(
        chip="Xylo (SynSense)", loader="rockpool", dialect="nir",
    ),
    ChipLoader(
        chip="Loihi 2 (Intel)", loader="lava-dl", dialect="nir",
    ),
    ChipLoader(
        chip="SpiNNaker2 (SpiNNcloud)", loader="py-spinnaker2", dialect="nir",
    ),
)  # fmt: skip
