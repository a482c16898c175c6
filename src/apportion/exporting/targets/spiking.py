"""The target spiking: integrate-and-fire neurons in a NIR file, for neuromorphic chips and the programs beside them.

::

    nn.Module -- torch.export --> stages -- scales, biases --> graph of neurons -- a dialect of NIR --> net.nir

It wins where a chip adds a weight only when a spike arrives, and few arrive. It loses nearly everywhere else: a net
that was trained with rectifiers needs several steps, and more additions than it had multiplications. The report says
which of both it is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from apportion.errors import NotVerified
from apportion.exporting.examples import check_numbers
from apportion.exporting.spiking import nir_file, report
from apportion.exporting.spiking.compile import (
    AT_ONCE,
    Made,
    SpikingRequest,
    as_taken,
    compiled,
    integers,
    quantized_outputs,
)
from apportion.exporting.spiking.dialects.dialect import dialect
from apportion.exporting.spiking.graph import SpikingGraph
from apportion.exporting.spiking.readers.reading import by_program
from apportion.exporting.spiking.simulator import simulate
from apportion.exporting.target import Compiled, Inputs, Reading, Table, Target, TrainedNetwork

_LAST: dict[str, Tensor] = {}


def remembered(graph: SpikingGraph, inputs: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` gives, which must depend on the graph and the inputs alone."""
    key = fingerprint(graph, inputs)
    if key not in _LAST:
        found = compute()
        _LAST.clear()
        _LAST[key] = found
    return _LAST[key]


def fingerprint(graph: SpikingGraph, inputs: Tensor) -> str:
    """A hash of every number and name of a graph and of the inputs."""
    made = hashlib.sha256(repr((graph.edges, graph.timesteps, graph.current, graph.units)).encode())
    for node in graph.nodes:
        for one in fields(node):
            _add(made, one.name, getattr(node, one.name))
    _add(made, "inputs", inputs)
    return made.hexdigest()


def _add(made: hashlib._Hash, name: str, value: object) -> None:
    made.update(name.encode())
    if isinstance(value, Tensor):
        made.update(repr((value.shape, value.dtype)).encode())
        made.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        made.update(repr(value).encode())


EXACT = "exact"
LIMIT = 1e-4
"""The limit of the outputs' difference, of float32 sums in another order."""


@final
@dataclass(frozen=True, repr=False)
class Spiking(Target):
    """A net of integrate-and-fire neurons, as a NIR file."""

    timesteps: int | Literal["auto"] = "auto"
    """The number of steps; "auto": as few as ``most_lost`` allows on calibration examples."""
    dialect: str = "nir"
    """The program that is to read the file, by whose rules neurons fire: nir, sinabs, spikingjelly or norse."""
    neuron: Literal["integrate_and_fire", "exact"] = "integrate_and_fire"
    """exact: neurons that take spikes back, and compute a net of integers to the bit; only apportion runs them."""
    most_lost: float = 0.01
    """The accuracy that "auto" may lose: 0.01 is one point. The steps are chosen on calibration examples, and no file
    is left where more is lost on those that are held out."""
    levels: int = 15
    """The number of levels of an activation above 0, where the neurons are exact."""
    fine_tune_examples: int = 0
    """The number of training examples that the net is trained for, to compute well in few steps; 0: none."""
    max_pool: Literal["refuse", "average"] = "refuse"
    """average: max pools become average pools, for which the net is trained again (``fine_tune_examples``)."""

    suffix = ".nir"

    def write(self, trained: TrainedNetwork, path: Path) -> Compiled:
        """Write the file as ``Target.write`` says."""
        nir_file.version()  # raises ModuleNotFoundError first of all
        request = self._request()
        if trained.calibration is not None:
            check_numbers(trained.calibration, "calibration")
        made = compiled(trained, request)
        written = nir_file.write(made.graph, path, request.dialect.name)
        sample = as_taken(made.graph, trained.sample[:AT_ONCE])
        _hold_equal(made.graph, written, sample)
        cost = report.cost(made.graph, made.found, trained.module, trained.sample)
        return Compiled(
            about=self._about(made, cost),
            reference=_reference(written),
            limit=0.0 if self.neuron == EXACT else LIMIT,
            most_lost=self.most_lost if self.timesteps == "auto" else None,
            blamed=lambda: (
                f"{made.graph.timesteps} steps lose no more on calibration examples: give a larger number of "
                "timesteps, or fine_tune_examples"
            ),
            tables=(_accuracies(made), *report.tables(made.graph, cost)),
            conclusion=report.conclusion(cost),
        )

    def read(self, path: Path, batches: Sequence[Inputs]) -> Sequence[Reading]:
        """Run the file with apportion's simulator by the dialect's rules, and with the program itself where it is
        installed, as ``Target.read`` says."""
        spoken = self._request().dialect
        graph = nir_file.read(path, spoken.name)
        by = f"apportion {importlib.metadata.version('apportion')}"
        own = Reading(reader=spoken.program, simulated_by=by, outputs=_outputs(graph, batches))
        return [own, *by_program(path, spoken.name, batches)]

    def _request(self) -> SpikingRequest:
        """The parameters, checked."""
        if self.timesteps != "auto":
            self._must_be_whole("timesteps")
        self._must_be_whole("levels")
        self._must_be_whole("fine_tune_examples", least=0)
        for name, allowed in (("neuron", ("integrate_and_fire", EXACT)), ("max_pool", ("refuse", "average"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if not 0 <= self.most_lost < 1:
            raise ValueError(
                f"most_lost={self.most_lost!r} is the share that may be lost: give 0 to 1, 0.01 for a point"
            )
        exact, averages = self.neuron == EXACT, self.max_pool == "average"
        if exact and (self.dialect != "nir" or self.timesteps != "auto" or self.fine_tune_examples or averages):
            raise ValueError(
                'neuron="exact" has a number of steps of its own, no training, and only apportion runs it: leave '
                "timesteps, fine_tune_examples, max_pool and dialect out"
            )
        if self.dialect == EXACT:
            raise ValueError('dialect="exact" is that of neuron="exact": give that, and leave dialect out')
        if averages and not self.fine_tune_examples:
            raise ValueError(
                'max_pool="average" makes another net, which must be trained again: give fine_tune_examples, the '
                "number of examples"
            )
        return SpikingRequest(
            timesteps=None if self.timesteps == "auto" else self.timesteps,
            lost=self.most_lost,
            fine_tune_examples=self.fine_tune_examples,
            average_instead_of_max=averages,
            levels=self.levels if exact else None,
            dialect=dialect(EXACT if exact else self.dialect),
        )

    def _about(self, made: Made, cost: report.SpikingCost) -> dict[str, Any]:
        graph = made.graph
        return {
            "timesteps": graph.timesteps,
            "dialect": self._request().dialect.name,
            "neuron": self.neuron,
            "reset": graph.neurons[0].reset if graph.neurons else None,
            "neurons": sum(neurons for _, neurons, _, _ in cost.layers),
            "silent_neurons": sum(cost.silent),
            "inputs": list(graph.source.shape),
            "outputs": list(graph.readout.shape),
            "current": graph.current,
            "units": list(graph.units) if graph.units else None,
            "spikes": cost.spikes,
            "synaptic_operations": cost.operations,
            "multiplications_of_the_net": cost.macs,
            "training_seconds": round(made.training, 1),
        }


def _accuracies(made: Made) -> Table:
    steps = max(one.steps for one in made.found)
    early = f" Nothing fires after step {steps}." if steps < made.graph.timesteps else ""
    return Table(
        title="Accuracy over the number of steps",
        columns=("steps", "accuracy", "accuracy of the net"),
        rows=tuple((number, round(right, 4), round(made.own or 0.0, 4)) for number, right in made.accuracies),
        note=f"On {made.judged} calibration examples, by which the number of steps is chosen; what is held out is in "
        f"the verification.{early}",
    )


def _reference(graph: SpikingGraph) -> Any:
    """The function that computes what the file is to compute."""

    def arrays(inputs: Inputs) -> list[Any]:
        if graph.units is None:
            return [_simulated(graph, inputs)]
        whole = [quantized_outputs(graph, integers(graph, x)) for x in inputs.split(AT_ONCE)]
        return [torch.cat(whole).double().mul(graph.units[1]).numpy()]

    return arrays


def _outputs(graph: SpikingGraph, batches: Sequence[Inputs]) -> Iterator[Sequence[Any]]:
    for inputs in batches:
        yield [_simulated(graph, inputs)]


def _simulated(graph: SpikingGraph, inputs: Tensor) -> Any:
    """The outputs of the graph, which are computed once for the same graph and the same inputs."""

    def compute() -> Tensor:
        outputs = torch.cat([simulate(graph, as_taken(graph, x)).outputs for x in inputs.split(AT_ONCE)])
        return outputs if graph.units is None else outputs.double() * graph.units[1]

    return remembered(graph, inputs, compute).numpy()


def _hold_equal(graph: SpikingGraph, written: SpikingGraph, x: Tensor) -> None:
    """Raise NotVerified where the file's graph, rewritten for its dialect, is not the compiled one, in float64."""
    wide = [simulate(one.to(torch.float32).to(torch.float64), x).outputs for one in (graph, written)]
    apart = float((wide[0] - wide[1]).abs().max() / wide[0].abs().max().clamp(min=1e-12))
    if not apart <= LIMIT:
        raise NotVerified(f"the graph of the file differs from the compiled one by {apart:.2g}: nothing was written")
