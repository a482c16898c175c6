"""The file: programs of jax.export and the weights that they take, in numpy's format of several arrays.

::

    forward, step      bytes that jax.export.deserialize takes
    weights/NAME       a parameter or buffer
    about              what is in the file, as JSON

numpy and jax read it, and nothing else is needed: neither torch nor apportion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apportion.exporting.tpu.jax_packages import jax_package

FOLDER = "weights/"
FORWARD, STEP = "forward", "step"
"""The names of the programs."""


@dataclass(frozen=True, eq=False)
class Archive:
    """What a file holds."""

    programs: Mapping[str, Any]
    """``jax.export.Exported`` by name."""
    weights: Mapping[str, Any]
    about: Mapping[str, Any]

    def write(self, path: Path) -> None:
        """Write the file."""
        arrays = {name: np.frombuffer(each.serialize(), np.uint8) for name, each in self.programs.items()}
        arrays |= {FOLDER + name: np.asarray(each) for name, each in self.weights.items()}
        with open(path, "wb") as file:
            np.savez(file, about=np.asarray(json.dumps(self.about)), allow_pickle=False, **arrays)

    @classmethod
    def read(cls, path: Path) -> Archive:
        """Read a file."""
        jax = jax_package()
        with np.load(path) as file:
            return cls(
                programs={
                    name: jax.export.deserialize(bytearray(file[name])) for name in (FORWARD, STEP) if name in file
                },
                weights={name.removeprefix(FOLDER): file[name] for name in file if name.startswith(FOLDER)},
                about=json.loads(str(file["about"])),
            )
