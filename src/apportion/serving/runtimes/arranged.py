"""A program whose inputs and outputs are given other names, or another order, than it has itself: those of the ensemble
that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

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
