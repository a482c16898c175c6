"""A file run by the program that it was written for, in a process of its own with a deadline.

A reader brings a package of its own and all that this imports; it logs, warns and changes what is global in torch. None
of that reaches the process that asks. In the process, ``main`` runs the module of the reader's name, beside this one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apportion.errors import NotVerified, ProgramMissing

READERS = ("sinabs", "spikingjelly", "norse")
"""The readers, which are the dialects that a program has."""
DEADLINE = 600.0
"""How long a reader may take, in seconds."""
OUTPUTS = "outputs"
"""The key of the outputs among the arrays that a reader's process writes; the others are counts by names of layers."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """What a reader has computed for some examples, in float64."""

    reader: str
    """The program and its version."""
    outputs: Tensor
    """(examples, ...): what comes out, summed over the steps and divided by their number."""
    counts: Mapping[str, Tensor]
    """For each layer of neurons how often each has fired in all steps: (examples, *shape)."""


def version(reader: str, *, folders: Sequence[Path] = ()) -> str | None:
    """Return the version of the reader that is installed, here or in one of these folders; None: it is not."""
    found = next(iter(importlib.metadata.distributions(name=reader, path=[*map(str, folders), *sys.path])), None)
    return None if found is None else found.version


def run(
    reader: str,
    path: Path,
    inputs: Tensor,
    *,
    timesteps: int,
    folders: Sequence[Path] = (),
    seconds: float = DEADLINE,
) -> Run:
    """Run the file for inputs (examples, ...), which flow in every step. ``folders``: where else packages lie.

    Raises ProgramMissing where the reader is not installed, and NotVerified where it does not run the file, or not
    within ``seconds``.
    """
    found = version(reader, folders=folders)
    if found is None:
        raise ProgramMissing(f"{reader} is not installed, which was to run {path.name}: install it, or do without it")
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "inputs.npy", Path(folder) / "made.npz"
        np.save(given, inputs.double().numpy())
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *filter(None, sys.path)])
        command = [sys.executable, "-m", __name__, reader, str(path.absolute()), str(given), str(made), str(timesteps)]
        command.append(str(torch.get_num_threads()))
        try:
            subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=seconds, check=True)
        except subprocess.TimeoutExpired:
            raise NotVerified(
                f"{reader} has not run {path.name} within {seconds:g} s: give it fewer examples"
            ) from None
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
            raise NotVerified(f"{reader} {found} cannot run {path.name}: {said[-1]}") from error
        if not made.exists():
            raise NotVerified(f"{reader} {found} has ended without a word about {path.name}")
        with np.load(made) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return Run(reader=f"{reader} {found}", outputs=tensors.pop(OUTPUTS), counts=tensors)


def main(arguments: Sequence[str]) -> None:
    """Run the file in this process: the reader, the file, the inputs, where the arrays go, the steps, the threads."""
    reader, path, given, made, timesteps, threads = arguments
    torch.set_num_threads(int(threads))
    module = importlib.import_module(f"apportion.exporting.spiking.readers.{reader}")
    with torch.no_grad():
        outputs, counts = module.run(path, torch.from_numpy(np.load(given)), int(timesteps))
    np.savez(made, **{OUTPUTS: outputs.numpy()}, **{name: x.numpy() for name, x in counts.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
