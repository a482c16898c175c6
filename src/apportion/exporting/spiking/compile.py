"""The compiler: a trained net, the target's parameters, and the graph that is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core.workload import accuracy
from apportion.errors import NotVerified
from apportion.exporting.spiking.calibration.calibrate import EXAMPLES, calibrated
from apportion.exporting.spiking.calibration.fine_tune import fine_tuned
from apportion.exporting.spiking.conversion.assemble import assembled
from apportion.exporting.spiking.conversion.lowering import lowered
from apportion.exporting.spiking.conversion.rate_net import RateNet, computed
from apportion.exporting.spiking.dialects.dialect import Dialect
from apportion.exporting.spiking.graph import Neurons, SpikingGraph
from apportion.exporting.spiking.quantized import integers, quantized
from apportion.exporting.spiking.simulator import Simulated, simulate
from apportion.exporting.target import TrainedNetwork, called

GRID = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The numbers of steps that are tried, from the least."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Chosen:
    """A graph for its number of steps, and what was found on the way to it."""

    graph: SpikingGraph
    accuracies: tuple[tuple[int, float], ...]
    """(number of steps, accuracy on the examples that chose)."""


def chosen(build: Callable[[int], SpikingGraph], judge: Callable[[SpikingGraph], float], *, at_least: float) -> Chosen:
    """The graph with the least number of steps of ``GRID`` whose accuracy is at least so much. Raises ValueError where
    none is."""
    tried: list[tuple[int, float]] = []
    for steps in GRID:
        graph = build(steps)
        tried.append((steps, judge(graph)))
        if tried[-1][1] >= at_least:
            return Chosen(graph=graph, accuracies=tuple(tried))
    steps, best = max(tried, key=lambda one: one[1])
    raise ValueError(
        f"no number of steps up to {GRID[-1]} is right in {at_least:.2%} of the calibration examples: the best is "
        f"{steps} with {best:.2%}; allow more to be lost (most_lost=), or train for few steps (fine_tune_examples=)"
    )


JUDGING = 512
"""The largest number of calibration examples on which accuracies are taken."""
SAME = 1e-3
"""The largest difference of the outputs, relative to the largest of them, that the net's own float32 may make."""
AT_ONCE = 50
"""The number of examples that are simulated at once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SpikingRequest:
    """What the graph is to be."""

    timesteps: int | None
    """None: as few as ``lost`` allows."""
    lost: float
    """The share of the calibration examples that may be lost."""
    fine_tune_examples: int
    """The number of training examples that the net is trained for; 0: none."""
    average_instead_of_max: bool
    levels: int | None
    """The number of levels of a quantised net; None: integrate-and-fire neurons."""
    dialect: Dialect


@dataclass(frozen=True, eq=False, kw_only=True)
class Made:
    """A graph, and what was found on the way."""

    graph: SpikingGraph
    accuracies: tuple[tuple[int, float], ...]
    """(number of steps, accuracy on calibration examples)."""
    own: float | None
    """The accuracy of the net itself on the same; None: the targets are no classes."""
    judged: int
    """The number of those examples."""
    found: tuple[Simulated, ...]
    """What the graph has fired for some of them."""
    training: float = 0.0
    """How long the training has taken, in seconds."""


@dataclass(eq=False, kw_only=True)
class _Compiler:
    """The parts of a compilation that each number of steps needs."""

    request: SpikingRequest
    trained: TrainedNetwork
    net: RateNet
    x: Tensor
    """Calibration examples by which scales are found."""
    judging: Tensor
    targets: Any
    training: float = 0.0
    found: dict[int, tuple[Simulated, ...]] = field(default_factory=dict)

    def build(self, steps: int) -> SpikingGraph:
        """The graph for this number of steps."""
        rule = self.request.dialect
        set_up = partial(calibrated, timesteps=steps, reset=rule.reset, strictly=rule.strictly)
        like = Neurons(name="", shape=(), threshold=torch.ones(()), reset=rule.reset, strictly=rule.strictly)
        start = set_up(self.net, self.x)
        if not self.request.fine_tune_examples:
            return assembled(start.net, start.scales, steps, like=like)
        begun, count = time.perf_counter(), self.request.fine_tune_examples
        assert self.trained.training is not None
        tuned = fine_tuned(
            start,
            steps,
            data=self.trained.training,
            collate=self.trained.collate,
            teacher=self._teacher,
            examples=count,
            like=like,
        )
        self.training += time.perf_counter() - begun
        return assembled(tuned.net, tuned.scales, steps, like=like)

    def _teacher(self, x: Tensor) -> Sequence[Tensor]:
        """What the net itself computes: all activations, where its stages compute the same as it."""
        return [self.trained.module(x)] if self.request.average_instead_of_max else computed(self.net, x)

    def judge(self, graph: SpikingGraph) -> float:
        """The accuracy of a graph."""
        found = tuple(simulate(graph, as_taken(graph, x)) for x in self.judging.split(AT_ONCE))
        self.found[graph.timesteps] = found
        return self.right(torch.cat([one.outputs for one in found]))

    def right(self, outputs: Tensor) -> float:
        """The share of outputs whose largest number is at the target."""
        return float(accuracy(outputs, self.targets))


def as_taken(graph: SpikingGraph, x: Tensor) -> Tensor:
    """The inputs as the graph takes them."""
    return x if graph.units is None else integers(graph, x)


def compiled(trained: TrainedNetwork, request: SpikingRequest) -> Made:
    """Compile a trained net. Raises ValueError, with the layer's name and the cure, where it cannot be."""
    compiler = _compiler(trained, request)
    classes = isinstance(compiler.targets, Tensor) and not compiler.targets.is_floating_point()
    own = compiler.right(_outputs(trained.module, compiler.judging)) if classes else None
    accuracies: tuple[tuple[int, float], ...] = ()
    if request.levels is not None:
        graph = quantized(compiler.net, compiler.x, levels=request.levels)
    elif request.timesteps is not None:
        graph = compiler.build(request.timesteps)
    elif own is None:
        raise ValueError('timesteps="auto" is chosen by accuracy, and the targets are no classes: give a number')
    else:
        made = chosen(compiler.build, compiler.judge, at_least=own - request.lost)
        graph, accuracies = made.graph, made.accuracies
    if not accuracies:
        judge: Callable[[SpikingGraph], float] = compiler.judge
        if own is None:
            compiler.found[graph.timesteps] = (simulate(graph, as_taken(graph, compiler.judging[:AT_ONCE])),)
        else:
            accuracies = ((graph.timesteps, judge(graph)),)
    return Made(
        graph=graph,
        accuracies=accuracies,
        own=own,
        judged=len(compiler.judging),
        found=compiler.found[graph.timesteps],
        training=compiler.training,
    )


def _compiler(trained: TrainedNetwork, request: SpikingRequest) -> _Compiler:
    if request.fine_tune_examples and trained.training is None:
        raise ValueError(
            f"fine_tune_examples={request.fine_tune_examples} needs training examples: give data=Data(training=...)"
        )
    net = lowered(trained.module, trained.sample, average_instead_of_max=request.average_instead_of_max)
    if not request.average_instead_of_max:  # which makes another net
        _hold_to_network(net, trained)
    if trained.calibration is None:
        raise ValueError(
            "thresholds are found by calibration examples, and there are none: give data=Data(calibration=...)"
        )
    x, targets = trained.calibration.inputs, trained.calibration.targets
    apart = len(x) >= 2 * EXAMPLES  # what scales are found by says little about accuracy
    rows = slice(EXAMPLES, EXAMPLES + JUDGING) if apart else slice(0, JUDGING)
    return _Compiler(
        request=request,
        trained=trained,
        net=net.to(torch.float32),
        x=x[:EXAMPLES].float(),
        judging=x[rows].float(),
        targets=targets[rows] if isinstance(targets, Tensor) else targets,
    )


def _hold_to_network(net: RateNet, trained: TrainedNetwork) -> None:
    """Raise NotVerified where the stages, before any of them fires, compute something else than the net: all that comes
    after is held to them."""
    x = trained.sample[:AT_ONCE]
    own = _outputs(trained.module, x).double()
    with torch.no_grad():
        found = computed(net.to(torch.float64), x.double())[-1].reshape(own.shape)
    apart = float((found - own).abs().max() / own.abs().max().clamp(min=1e-12))
    if not apart <= SAME:
        raise NotVerified(
            f"the layers as they were folded compute something else than the net: outputs differ by {apart:.2g} of "
            f"their largest number, of {SAME:g} at most; nothing was written"
        )


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([called(module, part) for part in x.split(AT_ONCE)])
