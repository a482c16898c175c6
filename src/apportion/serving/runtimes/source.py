"""The place where a member comes from, and what was found out about it before it is served: plain data, sent to its
process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from apportion.serving.protocol.datatypes import Array
from apportion.serving.runtimes.runtime import Runtime

RuntimeName = Literal["onnx", "torch", "remote"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A program that a process can load."""

    name: str
    runtime: RuntimeName
    path: str
    """The path of the ONNX file, of the run, checkpoint or program; or the address of the other server."""
    threads: int = 1
    channels_last: bool = False
    others: tuple[str, ...] = ()
    """The paths of other programs of torch that are run as one with it; then the name has all their names, with +
    between."""
    sample: str | None = None
    """A file (.npz) of one row of each input, in their order, that the net is known to compute."""

    def open(self) -> Runtime:
        """Load the program in this process. Raises ValueError where it cannot be run."""
        if self.runtime == "onnx":
            from apportion.serving.runtimes.onnx_runtime import OnnxRuntime

            return OnnxRuntime(self.path, threads=self.threads)
        if self.runtime == "remote":
            from apportion.serving.runtimes.remote_runtime import RemoteRuntime

            return RemoteRuntime(self.path)
        from apportion.serving.runtimes.torch_runtime import loaded, loaded_together

        if self.others:
            members = dict(zip(self.name.split("+"), (self.path, *self.others), strict=True))
            return loaded_together(members, threads=self.threads, channels_last=self.channels_last)
        return loaded(self.path, threads=self.threads, channels_last=self.channels_last)

    def rows(self) -> list[Array] | None:
        """Return the sample as a list of arrays, one for each input; None where there is none."""
        if self.sample is None:
            return None
        with np.load(self.sample) as file:
            return [file[name] for name in sorted(file.files, key=int)]


def save_rows(path: Path, rows: Sequence[Array]) -> str:
    """Write a sample to the path, as ``Source.rows`` reads it, and return the path."""
    np.savez(path, **{str(n): row for n, row in enumerate(rows)})  # type: ignore[arg-type]
    return str(path)
