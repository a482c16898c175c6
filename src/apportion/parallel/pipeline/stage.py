"""A network in stages, one a rank: each computes some consecutive calls, and hands on what later ones use.

::

    stage 0        stage 1            stage 2
    conv ---- h -> conv - g ------- -> add(g, h) -> loss
         \\--- h ---------- h ------ /                          a skip connection travels through the stages between

    backward, from the last to the first: the gradients of what was handed on, h's from both of its users

Arguments of the network and weights do not travel: each stage that uses an argument loads it itself, and a weight that
several stages use is held by all of them, which sum its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, final

from torch import fx, nn

from apportion.comm.group import broadcast_message
from apportion.comm.world import World
from apportion.core import torch_private, tree
from apportion.core.data.batch import Batch, rows_of
from apportion.core.modes import evaluating
from apportion.core.workload import Workload
from apportion.parallel.ops.factored_linear import Products, plain_layers
from apportion.parallel.partition.equivalence import asked, refuse_untraceable
from apportion.parallel.partition.part import Part
from apportion.parallel.pipeline.cut_points import (
    Places,
    calls,
    changing_buffers,
    cut_places,
    measured,
    names_of,
)
from apportion.parallel.pipeline.eager_stages import OwnStages, has_lists
from apportion.parallel.pipeline.meta_shapes import CannotRun
from apportion.parallel.pipeline.microbatch import MicrobatchPasses, StageLinks
from apportion.parallel.pipeline.single_stage import InParts, checkpointed
from apportion.parallel.pipeline.stage_graph import (
    StageGraph,
    adopt_the_rest,
    prove,
    refuse_elsewhere,
    terms,
    trained_alone,
)
from apportion.parallel.pipeline.staging import StagePart, Staging
from apportion.parallel.pipeline.whole_batch import (
    BatchRows,
    needs_whole_batch,
    refuse_coupled,
    refuse_coupled_stage,
    rows_at,
)
from apportion.parallel.tracing.tracer import Unfollowed, Whole, follow, names, of_torch


def staged(workload: Workload, world: World, staging: Staging) -> Callable[[nn.Module, Any], Part]:
    """A function that makes this rank's part of a model: a stage of it, or all of it where there is one rank."""
    cuts = staging.cuts
    if cuts is not None and len(cuts) != world.size - 1:
        raise ValueError(
            f"cuts={tuple(cuts)} make {len(cuts) + 1} stages, and there are {world.size} workers: use "
            f"workers={len(cuts) + 1}, or name {world.size - 1} layers"
        )
    if world.size > 1:
        refuse_stages(workload.update is not None, workload.carry is not None, world.device.type)

    def make(model: nn.Module, inputs: Any) -> Part:
        if world.size == 1:
            return InParts(model, inputs, staging)
        graph = _traced(model, inputs)
        if isinstance(graph, Unfollowed) or _hides_layers(model, graph) or _hides_hooks(model, graph):
            try:
                return OwnStages(model, inputs, world, partial(_agreed, world, cuts, "own"), staging)
            except CannotRun as error:
                if isinstance(graph, Unfollowed):
                    raise ValueError(
                        f"{_cannot_be_cut(graph)}; nor can it be run in stages as it is written: {error}"
                    ) from error
        return Stages(model, inputs, world, graph, staging)

    return make


def refuse_stages(own_update: bool, carries: bool, device: str, untraceable: str | None = None) -> None:
    """Raise ValueError where a workload cannot be computed by several stages, or not on such devices."""
    if own_update:
        raise ValueError("update= asks for the gradient of a loss that only the last stage has: use data_parallel")
    if carries:
        raise ValueError(
            "a recurrent state that is carried would go back from the last stage to the first: use wavefront_parallel, "
            "or data_parallel"
        )
    if device != "cpu":
        raise ValueError(
            f"stages on {device} devices are not there yet: use launcher=local(device='cpu'), or data_parallel, or "
            "fully_sharded"
        )
    if untraceable is not None:
        raise ValueError(_cannot_be_cut(untraceable))


@final
class Stages(StagePart):
    """This rank's stage of a network, and how micro-batches pass through it."""

    def __init__(self, model: nn.Module, inputs: Any, world: World, graph: fx.Graph, staging: Staging) -> None:
        super().__init__(world, staging)
        self._world, microbatches = world, staging.microbatches
        self._at_once: tuple[Sequence[BatchRows], Sequence[BatchRows]] | None = None
        """The way in which what comes, and what goes, depends on the rows, for a stage that computes a batch at once;
        None for others."""
        refuse_untraceable(asked(model, inputs), model)
        stateful = changing_buffers(model, rows_of(inputs, slice(0, 2)))
        if microbatches > 1 or staging.recompute:
            staging.refuse_state(model, stateful)
        ones = {str(node.target) for node in calls(graph) if node.op == "call_module"}  # a layer may be followed in one
        with evaluating(model.modules()):
            evaluated = _followed(model, inputs, lambda path, module: path in ones or of_torch(path, module))
        refuse_elsewhere(model, graph, evaluated)
        at = self._cut(model, graph, evaluated, inputs, stateful)
        bounds = [0, *at, len(calls(graph))]
        self.cuts = names_of([names(graph)[node] for node in calls(graph)], at)
        at_once = [needs_whole_batch(model, calls(graph)[a:b], stateful) for a, b in pairwise(bounds)]
        if microbatches > 1 and any(at_once):
            self._schedule = "gpipe"  # a stage that waits for the whole batch has to be sent it first
            if at_once[self._rank]:
                self._at_once = self._rows(model, graph, bounds, inputs)
            else:
                refuse_coupled_stage(model, graph, bounds, self._rank, inputs, microbatches)
        elif microbatches > 1:  # every rank, so that all say the same
            refuse_coupled(model, inputs, microbatches)
        if self._rank == 0:
            prove(model, graph, bounds, self._sample(inputs))
        self._arguments = graph
        self._training = StageGraph(model, graph, bounds, self._rank)
        self._evaluation = self._for_evaluation(model, evaluated, graph, at)
        self.model = self._training.module
        self._trained = [module for module in self.model.modules() if module.training]
        self.pieces = terms(model, graph, bounds, self.model)
        if self._rank == 0:
            adopt_the_rest(self.model, model, graph)
        # Of a whole batch they would keep all inputs until the end.
        self._products = Products(plain_layers(self.model) if microbatches > 1 else ())
        self.ends = StageLinks.connect(world.group(), world.device)

    def _cut(
        self, model: nn.Module, graph: fx.Graph, evaluated: fx.Graph, inputs: Any, stateful: Sequence[str]
    ) -> list[int]:
        def places() -> Places:
            alone = {} if str(evaluated) == str(graph) else trained_alone(model, graph, evaluated)
            return measured(model, graph, self._sample(inputs), stateful).without(alone)

        return _agreed(self._world, self._staging.cuts, "", [names(graph)[node] for node in calls(graph)], places)

    def _sample(self, inputs: Any) -> Any:
        """A micro-batch of the inputs, of two rows at least: one alone cannot be normalised."""
        return rows_of(inputs, slice(0, max(2, -(-tree.length(inputs) // self._staging.microbatches))))

    def _rows(
        self, model: nn.Module, graph: fx.Graph, bounds: Sequence[int], inputs: Any
    ) -> tuple[Sequence[BatchRows], Sequence[BatchRows]]:
        first, last = self._rank == 0, self._rank == self._size - 1
        return (
            [] if first else rows_at(model, graph, bounds[self._rank], inputs),
            [] if last else rows_at(model, graph, bounds[self._rank + 1], inputs),
        )

    def _for_evaluation(self, model: nn.Module, evaluated: fx.Graph, graph: fx.Graph, at: Sequence[int]) -> StageGraph:
        """The stage of the network as it is evaluated, which has a graph of its own where the forward asks
        ``self.training``."""
        if str(evaluated) == str(graph):
            return self._training
        found = [node.name for node in calls(evaluated)]
        begins = [found.index(calls(graph)[i].name) for i in at]
        return StageGraph(model, evaluated, [0, *begins, len(found)], self._rank)

    def _make(self, passes: MicrobatchPasses, count: int) -> None:
        if self._at_once is not None and count > 1:
            passes.at_once(*self._at_once)
        else:
            super()._make(passes, count)

    def run(self, received: Sequence[Any], batch: Batch) -> Any:
        given = self._training.takes(self._arguments, batch)
        return checkpointed(self.model, *given, *received) if self._staging.recompute else self.model(*given, *received)

    def evaluated(self, received: Sequence[Any], batch: Batch) -> Any:
        return self._evaluation.module(*self._evaluation.takes(self._arguments, batch), *received)


def _agreed(
    world: World, cuts: Sequence[str] | None, kind: str, own: Sequence[str], measure: Callable[[], Places]
) -> list[int]:
    """The calls that the stages after the first begin with. Rank 0 alone measures, so that all ranks cut at the same
    places, those of other replicas too; ValueError, on every rank, where rank 0 refuses."""
    agreed: Any = None
    everyone = world.outer or world
    if everyone.rank == 0:
        known = Known(world, kind)
        at = known.read()
        agreed = {"calls": list(own), "at": at, "refusal": ""}
        if at is None:
            try:
                places = measure()
                agreed["at"] = cut_places(places, cuts, world.size)
                known.write(agreed["at"])
            except ValueError as refusal:
                agreed["refusal"] = str(refusal)
    agreed = broadcast_message(agreed, everyone.group())
    if agreed["refusal"]:
        raise ValueError(agreed["refusal"])
    assert agreed["calls"] == list(own), "every rank follows the same network"
    return [int(i) for i in agreed["at"]]


class Known:
    """The places where a run has cut the network: a worker that replaces a lost one cuts it there, too."""

    def __init__(self, world: World, kind: str = "") -> None:
        self._memory = None
        if world.members is not None:
            self._memory = world.shared(f"{kind}cuts/{world.size}", 8 * (world.size + 1))

    def read(self) -> list[int] | None:
        if self._memory is None:
            return None
        count, *at = self._memory.cast("q")
        return at[: count - 1] if count else None

    def write(self, at: Sequence[int]) -> None:
        if self._memory is not None:
            words = self._memory.cast("q")
            for i, place in enumerate(at, 1):
                words[i] = place
            words[0] = len(at) + 1  # last: it is all there


def _traced(model: nn.Module, inputs: Any) -> fx.Graph | Unfollowed:
    """The network's graph, or the error that says why it has none."""
    try:
        return follow(model, inputs)
    except Unfollowed as error:
        return error


def _hides_layers(model: nn.Module, graph: fx.Graph) -> bool:
    """Return whether a module that has a list of layers is one call of the graph, within which it cannot be cut."""
    modules = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    return any(has_lists(model.get_submodule(path)) for path in modules)


def _hides_hooks(model: nn.Module, graph: fx.Graph) -> bool:
    """Return whether a module that is one call of the graph has a hook, which may hand what a layer gives to the
    forward. A trace does not run it."""
    calls = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    return any(torch_private.forward_hooks_of(m) for path in calls for m in model.get_submodule(path).modules())


def _followed(model: nn.Module, inputs: Any, whole: Whole = of_torch) -> fx.Graph:
    try:
        return follow(model, inputs, whole=whole)
    except Unfollowed as error:
        raise ValueError(_cannot_be_cut(error)) from error


def _cannot_be_cut(why: object) -> str:
    return (
        f"{why}; so it cannot be cut into stages (layer_placement, pipeline_parallel): put what decides or changes "
        "into a module of its own, or use data_parallel"
    )
