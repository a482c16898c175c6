"""The place where a member comes from, and what was found out about it before it is served: plain data, sent to its
process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from apportion.serving.protocol.datatypes import Array
from apportion.serving.runtimes.arranged import Arranged, ServedTensor
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
    """A file (.npz) of one row of each input, in the program's order, that the net is known to compute."""
    batched: bool = False
    """Whether requests may be computed together: each row of the outputs is known to depend on its own row of the
    inputs alone."""
    inputs: tuple[ServedTensor, ...] | None = None
    """The inputs as they are served: in the order of the ensemble's, with the names that they have there; None takes
    the program's own."""
    outputs: tuple[ServedTensor, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the source as it is sent between processes."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Source:
        """Return the source that ``to_json`` gave as a dict."""
        tensors = {
            what: None if data[what] is None else tuple(map(ServedTensor.from_json, data[what]))
            for what in ("inputs", "outputs")
        }
        return Source(**{**data, "others": tuple(data["others"]), **tensors})

    def open(self) -> Runtime:
        """Load the program in this process. Raises ValueError where it cannot be run."""
        program = self._program()
        if self.inputs is None or self.outputs is None:
            return program
        try:
            return Arranged(program, self.inputs, self.outputs)
        except BaseException:
            program.close()
            raise

    def _program(self) -> Runtime:
        if self.runtime == "onnx":
            from apportion.serving.runtimes.onnx_runtime import OnnxRuntime

            return OnnxRuntime(self.path, threads=self.threads)
        if self.runtime == "remote":
            from apportion.serving.runtimes.remote_runtime import RemoteRuntime

            return RemoteRuntime(self.path)
        from apportion.serving.runtimes.torch_runtime import loaded, loaded_together

        if self.others:
            members = dict(zip(self.name.split("+"), (self.path, *self.others), strict=True))
            each = None if self.outputs is None else len(self.outputs) // len(members)
            own = None if self.outputs is None else [t.own.partition("/")[2] for t in self.outputs]
            outputs = None if own is None or each is None else [own[n : n + each] for n in range(0, len(own), each)]
            return loaded_together(members, outputs=outputs, threads=self.threads, channels_last=self.channels_last)
        return loaded(self.path, threads=self.threads, channels_last=self.channels_last)

    def rows(self) -> list[Array] | None:
        """Return the sample as a list of arrays, one for each input as it is served; None where there is none."""
        if self.sample is None:
            return None
        with np.load(self.sample) as file:
            rows = [file[name] for name in sorted(file.files, key=int)]
        rows = [row.astype(object) if row.dtype.kind == "S" else row for row in rows]
        return rows if self.inputs is None else [rows[tensor.place] for tensor in self.inputs]


def save_rows(path: Path, rows: Sequence[Array]) -> str:
    """Write a sample to the path, as ``Source.rows`` reads it, and return the path."""
    # Objects would be pickled: values of BYTES are written as bytes of one length.
    plain = [row.astype("S") if row.dtype == object else row for row in rows]
    np.savez(path, **{str(n): row for n, row in enumerate(plain)})  # type: ignore[arg-type]
    return str(path)
