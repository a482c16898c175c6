"""The place where a member comes from, and what was found out about it before it is served: plain data, sent to its
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from apportion.serving.protocol.datatypes import Array
from apportion.serving.runtimes.runtime import Runtime, Spec


@dataclass(frozen=True)
class ServedTensor:
    """An input or output as it is served. ``own``: its name in the program. ``place``: its place among the program's
    inputs or outputs, from 0 on."""

    own: str
    place: int
    spec: Spec

    @staticmethod
    def from_json(data: dict[str, Any]) -> ServedTensor:
        """Return the tensor of which ``dataclasses.asdict`` gave a dict."""
        return ServedTensor(data["own"], data["place"], Spec.from_json(data["spec"]))


def as_they_are(specs: Sequence[Spec]) -> tuple[ServedTensor, ...]:
    """Return the tensors of a program with the names and in the order that they have."""
    return tuple(ServedTensor(spec.name, place, spec) for place, spec in enumerate(specs))


@final
class Arranged(Runtime):
    """A program with the inputs and outputs as they are served. Raises ValueError where it has other ones."""

    def __init__(self, program: Runtime, inputs: Sequence[ServedTensor], outputs: Sequence[ServedTensor]) -> None:
        for what, tensors, specs in (("inputs", inputs, program.inputs), ("outputs", outputs, program.outputs)):
            if (wanted := sorted(t.own for t in tensors)) != (found := sorted(spec.name for spec in specs)):
                raise ValueError(f"it has the {what} {', '.join(found)} now, and had {', '.join(wanted)}")
        self._program = program
        self.runtime = program.runtime
        self.inputs, self.outputs = (tuple(t.spec for t in tensors) for tensors in (inputs, outputs))
        # The place among the served inputs of each of the program's inputs, and the other way round for its outputs.
        served = {tensor.own: at for at, tensor in enumerate(inputs)}
        self._inputs = [served[spec.name] for spec in program.inputs]
        own = {spec.name: at for at, spec in enumerate(program.outputs)}
        self._outputs = [own[tensor.own] for tensor in outputs]

    def run(self, inputs: Sequence[Array], deadline: float) -> list[Array]:
        """Compute the outputs for these inputs, as ``Runtime.run`` says."""
        found = self._program.run([inputs[at] for at in self._inputs], deadline)
        return [found[at] for at in self._outputs]

    def close(self) -> None:
        """Give back what the program holds."""
        self._program.close()


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
