"""The one place where jax and torchax are imported, without what they change in torch and without what they report."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

UPTIME_REPORTS = "ENABLE_RUNTIME_UPTIME_TELEMETRY"
"""The environment variable by which libtpu reports how long it has run; torchax turns it on."""


def jax_package() -> Any:
    """Import the package jax, for the CPU alone unless the user has said otherwise, and return it."""
    first = "jax" not in sys.modules
    os.environ.setdefault(UPTIME_REPORTS, "0")
    import jax
    import jax.export

    if first:
        if "JAX_PLATFORMS" not in os.environ:  # with libtpu installed, the search for a TPU would take a minute
            jax.config.update("jax_platforms", "cpu")
        # A program says where in the source each operation comes from: paths of this machine do not belong there.
        jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    return jax


def chip_of(topology: str) -> Any:
    """Return the first chip of a topology of TPUs that need not be there: libtpu compiles for it."""
    jax_package()
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology, "tpu").devices[0]


def torchax_package() -> Any:
    """Import the package torchax with its table of operators, and return it."""
    jax_package()
    fast = torch.backends.mha.get_fastpath_enabled()
    import torchax
    import torchax.decompositions
    import torchax.export
    import torchax.ops.ops_registry

    torch.backends.mha.set_fastpath_enabled(fast)  # torchax turns it off for the whole process
    torchax.default_env()  # fills the table
    return torchax


def versions() -> dict[str, str]:
    """Return the versions of the packages that lower a network."""
    return {"jax": jax_package().__version__, "torchax": torchax_package().__version__, "torch": torch.__version__}
