"""One stage of a network's graph, as a module that holds what its calls use, under the plain names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, final

from torch import fx, nn

from apportion.core import tree
from apportion.core.data.batch import Batch
from apportion.core.torch_private import buffers_of, persists_no_more
from apportion.parallel.partition.equivalence import copied, same_outputs
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.pipeline.cut_points import calls, crossing_values
from apportion.parallel.tracing.network import undisturbed
from apportion.parallel.tracing.nodes import used_tensors
from apportion.parallel.tracing.tracer import arguments


@final
class StageGraph:
    """The calls from ``bounds[number]`` to the next bound; ``module`` takes the arguments of the network that they use,
    then what the stage before hands on, and gives what this one does (the last: the network's outputs)."""

    def __init__(self, model: nn.Module, graph: fx.Graph, bounds: Sequence[int], number: int) -> None:
        order, last = calls(graph), number == len(bounds) - 2
        own = order[bounds[number] : bounds[number + 1]]
        (output,) = (node for node in graph.nodes if node.op == "output")
        needed = {source for node in (*own, *((output,) if last else ())) for source in node.all_input_nodes}
        holders = [node for node in graph.nodes if node.op == "placeholder"]
        new, place = fx.Graph(), dict[fx.Node, fx.Node]()
        self._takes = [i for i, node in enumerate(holders) if node in needed]
        for i in self._takes:
            place[holders[i]] = new.placeholder(str(holders[i].target))
        for node in crossing_values(graph, bounds[number]) if number else ():
            place[node] = new.placeholder(f"received_{node.name}")
        for node in graph.nodes:
            if node.op == "get_attr" and node in needed:
                place[node] = new.get_attr(str(node.target))
        for node in own:
            place[node] = new.node_copy(node, place.__getitem__)
        handed_on: Any = output.args[0] if last else crossing_values(graph, bounds[number + 1])
        new.output(fx.map_arg(handed_on, place.__getitem__))
        self.module = fx.GraphModule(model, new)
        _keep_what_persists(self.module, set(model.state_dict()))

    def takes(self, graph: fx.Graph, batch: Batch) -> list[Any]:
        """The arguments of the network that the stage uses; where it uses none, nothing is loaded."""
        return self.select_arguments(graph, batch.inputs) if self._takes else []

    def select_arguments(self, graph: fx.Graph, inputs: Any) -> list[Any]:
        whole = arguments(graph, inputs)
        return [whole[i] for i in self._takes]


def _keep_what_persists(module: nn.Module, keys: set[str]) -> None:
    """Take constants, and buffers that are not saved, out of the state of a graph's module."""
    for path, owner in module.named_modules():
        for name in buffers_of(owner):
            if (f"{path}.{name}" if path else name) not in keys:
                persists_no_more(owner, name)


def used(model: nn.Module, nodes: Iterable[fx.Node]) -> set[int]:
    """The parameters and buffers of some calls, by identity."""
    return {id(t) for node in nodes for _, t in used_tensors(model, node)}


def refuse_elsewhere(model: nn.Module, graph: fx.Graph, evaluated: fx.Graph) -> None:
    """Raise ValueError where the network as it is evaluated uses parameters or buffers that no stage would have."""
    if used(model, calls(evaluated)) - used(model, calls(graph)):
        raise ValueError(
            f"{type(model).__name__} calls other layers in evaluation than in training, which no stage has: let it "
            "call the same, or use data_parallel"
        )


def trained_alone(model: nn.Module, graph: fx.Graph, evaluated: fx.Graph) -> dict[int, str]:
    """The calls that no stage begins with, and why: the network as it is evaluated has no such call, or other layers
    before it."""
    trains, evaluates = ([used(model, [node]) for node in calls(each)] for each in (graph, evaluated))
    ours, theirs = _before_and_after(trains), _before_and_after(evaluates)
    place = {node.name: j for j, node in enumerate(calls(evaluated))}
    found: dict[int, str] = {}
    for i, node in enumerate(calls(graph)):
        j = place.get(node.name)
        if j is None or not all(b <= a for a, b in zip(ours[i], theirs[j], strict=True)):
            found[i] = "the network that is evaluated is not cut by it into the same layers"
    return found


def _before_and_after(uses: Sequence[set[int]]) -> list[tuple[frozenset[int], frozenset[int]]]:
    """The parameters and buffers that the calls before each one use, and those that it and the calls after it use."""
    first = list(itertools.accumulate(uses, frozenset[int].union, initial=frozenset[int]()))
    last = list(itertools.accumulate(reversed(uses), frozenset[int].union, initial=frozenset[int]()))
    return list(zip(first[:-1], reversed(last[1:]), strict=True))


def terms(model: nn.Module, graph: fx.Graph, bounds: Sequence[int], module: nn.Module) -> dict[str, TensorShard]:
    """The shards of the stage's parameters that other stages use, too: each stage has one term of their gradient."""
    order = calls(graph)
    stages = [used(model, order[begin:end]) for begin, end in itertools.pairwise(bounds)]
    return {
        name: TensorShard(tuple(p.shape), partial=True)
        for name, p in module.named_parameters(remove_duplicate=False)
        if sum(id(p) in held for held in stages) > 1
    }


def adopt_the_rest(module: nn.Module, model: nn.Module, graph: fx.Graph) -> None:
    """Register the weights and buffers that no call uses in the module of a stage, so that they are held by one."""
    held = used(model, calls(graph))
    tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    for key in model.state_dict():
        if id(tensors[key]) in held:
            continue
        owner, (*path, name) = module, key.split(".")
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = getattr(owner, step)
        if isinstance(tensors[key], nn.Parameter):
            owner.register_parameter(name, tensors[key])
        else:
            owner.register_buffer(name, tensors[key])


def prove(model: nn.Module, graph: fx.Graph, bounds: Sequence[int], inputs: Any) -> None:
    """Check that the stages one after the other, each on copies, give what the model gives; a ValueError where they do
    not, as with writing in place to what another stage uses."""
    with undisturbed(model):
        expected = tree.call(model, copied(inputs))
    with undisturbed(model):
        values: Any = []
        for number in range(len(bounds) - 1):
            stage = StageGraph(model, graph, bounds, number)
            values = copied(stage.module(*stage.select_arguments(graph, copied(inputs)), *values))
    if not same_outputs(values, expected):
        raise ValueError(
            f"in stages {type(model).__name__} gives other outputs than as a whole: it writes in place to what another "
            "stage uses, or changes with every call; give cuts= elsewhere, or use data_parallel"
        )
