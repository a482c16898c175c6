"""The places where a network is cut into stages: between layers, so that the slowest stage is as fast as can be."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from apportion.core import tree
from apportion.core.strategy import RecordedCuts
from apportion.core.torch_private import pytree
from apportion.cost_model import partitioning
from apportion.cost_model.partitioning import SECONDS_PER_BYTE, SECONDS_PER_MESSAGE
from apportion.parallel.replica.initial_model import memory_of
from apportion.parallel.tracing.network import undisturbed
from apportion.parallel.tracing.nodes import used_tensors
from apportion.parallel.tracing.tracer import arguments, names

RUNS = 3
"""The number of runs of which the shortest counts as a layer's time; one more comes before them."""


@dataclass(frozen=True)
class Places:
    """The calls of a network in order, and what a cut before each of them costs."""

    names: tuple[str, ...]
    """The names of the calls."""
    seconds: tuple[float, ...]
    """The seconds that each call takes for a micro-batch, forward and backward."""
    crossing: tuple[float | None, ...]
    """The seconds that a micro-batch takes from one stage to the next, where the next begins with this call; None: no
    cut can be there. The first is 0."""
    because: Mapping[int, str] = field(default_factory=dict)
    """The reason why no cut can be before a call, by call."""

    def without(self, because: Mapping[int, str]) -> Places:
        """The places where in addition no cut can be before these calls."""
        crossing = tuple(None if i in because and i else cost for i, cost in enumerate(self.crossing))
        return replace(self, crossing=crossing, because={**because, **self.because})


def balanced(places: Places, stages: int) -> list[int]:
    """The calls that the stages after the first begin with: the longest stage is as short as can be, what it sends and
    receives included."""
    return partitioning.balanced(places.seconds, places.crossing, stages)


def cut_places(places: Places, cuts: Sequence[str] | None, stages: int) -> list[int]:
    """The calls that the stages after the first begin with: those that are named, or recorded of an earlier start, or
    those that make the longest stage as short as can be. ValueError where no stage can begin where the user says."""
    if cuts is None:
        return balanced(places, stages)
    try:
        return named(places, cuts)
    except ValueError:
        if isinstance(cuts, RecordedCuts):
            return balanced(places, stages)
        raise


def named(places: Places, cuts: Sequence[str]) -> list[int]:
    """The calls that these layers begin with: modules by their path, functions as ``trace`` names them; ``name@2`` is
    the second of several calls of one name."""
    found: list[int] = []
    known = ", ".join(n for n, c in zip(places.names[1:], places.crossing[1:], strict=True) if c is not None)
    for cut in cuts:
        at = place_of(places.names, cut)
        if at is None:
            raise ValueError(f"cuts={tuple(cuts)}: unknown layer {cut!r}; a stage may begin with {known}")
        if at == 0 or places.crossing[at] is None or at in found or at < max(found, default=0):
            why = "the first stage begins with it" if at == 0 else places.because.get(at, "it cannot be cut there")
            why = "the cuts are not in the order of the layers" if at in found or at < max(found, default=0) else why
            raise ValueError(
                f"cuts={tuple(cuts)}: no stage can begin with {cut!r}, since {why}; one may begin with {known}"
            )
        found.append(at)
    return found


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute; the others (arguments, weights, what is returned) are where they are needed."""
    return [node for node in graph.nodes if node.op.startswith("call_")]


def crossing_values(graph: fx.Graph, at: int) -> list[fx.Node]:
    """The values that calls before this one have computed and that calls from it on, or the caller, use."""
    return [node for i, (node, last) in enumerate(_last_uses(graph).items()) if i < at <= last]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """The last call that uses what a call gives, by call in order; the caller comes after all calls."""
    order = {node: i for i, node in enumerate(calls(graph))}
    return {node: max((order.get(user, len(order)) for user in node.users), default=i) for node, i in order.items()}


def place_of(names: Sequence[str], cut: str) -> int | None:
    """Returns the number of the call that a cut names; None where there is none."""
    name, at, number = cut.rpartition("@")
    if at and number.isdecimal():
        alike = [i for i, other in enumerate(names) if other == name]
        return alike[int(number) - 1] if 0 < int(number) <= len(alike) else None
    return next((i for i, other in enumerate(names) if other == cut or other.startswith(f"{cut}.")), None)


def names_of(names: Sequence[str], at: Sequence[int]) -> tuple[str, ...]:
    """Returns the names by which ``named`` finds these calls."""
    return tuple(
        names[i] if place_of(names, names[i]) == i else f"{names[i]}@{names[: i + 1].count(names[i])}" for i in at
    )


def changing_buffers(model: nn.Module, inputs: Any) -> list[str]:
    """The buffers (and numbers) that a forward pass in training changes: the state of a layer that sees parts of a
    batch."""
    with undisturbed(model) as changed:
        tree.call(model, inputs)
        return changed()


def measured(model: nn.Module, graph: fx.Graph, inputs: Any, stateful: Sequence[str]) -> Places:
    """The calls of a graph, timed on these inputs. ``stateful``: buffers that a call changes; all that use the module
    of one have to be in one stage."""
    order = calls(graph)
    with undisturbed(model), torch.enable_grad():
        timer = _Timer(model, graph)
        for _ in range(RUNS + 1):
            timer.again()
            timer.run(*arguments(graph, inputs))
    for p in model.parameters():
        p.grad = None
    named = names(graph)
    because = _tied(model, order, stateful)
    begins, ends = [0] * (len(order) + 1), [0] * (len(order) + 1)
    for i, (node, last) in enumerate(_last_uses(graph).items()):
        if (nbytes := timer.bytes[node]) is None:
            because |= dict.fromkeys(
                range(i + 1, last + 1), f"what {named[node]} gives is not a tree of tensors and numbers"
            )
        elif last > i:
            begins[i + 1] += nbytes
            ends[last] += nbytes
    crossing: list[float | None] = [0.0]
    nbytes = 0
    for at in range(1, len(order)):
        nbytes += begins[at] - ends[at - 1]
        crossing.append(None if at in because else SECONDS_PER_MESSAGE + nbytes * SECONDS_PER_BYTE)
    return Places(tuple(named[n] for n in order), tuple(timer.seconds[n] for n in order), tuple(crossing), because)


def _tied(model: nn.Module, order: Sequence[fx.Node], stateful: Sequence[str]) -> dict[int, str]:
    """The calls before which a cut would put a changing buffer into two stages, and why there can be none."""
    last: dict[int, int] = {}
    found: dict[int, str] = {}
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    changing = {memory_of(tensors[name]) for name in stateful if name in tensors}
    for i, node in enumerate(order):
        for name, tensor in used_tensors(model, node):
            if (memory := memory_of(tensor)) in changing:
                between = range(last.get(memory, i) + 1, i + 1)
                found |= dict.fromkeys(between, f"{name}, which changes, would be used on both sides")
                last[memory] = i
    return found


class _Timer(fx.Interpreter):
    """Runs a graph call by call, each forward and backward."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self.seconds: dict[fx.Node, float] = {}
        self.bytes: dict[fx.Node, int | None] = {}
        """The bytes of what a call gives; None: it is not a tree of tensors and numbers."""
        self._runs = 0

    def again(self) -> None:
        self._runs += 1

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        args, kwargs = tree.map_tensors(_writable, self.fetch_args_kwargs_from_env(n))
        began = time.perf_counter()
        result = getattr(self, n.op)(n.target, args, kwargs)
        outputs = tree.tensors(result)
        with_gradient = [t for t in outputs if t.requires_grad]
        if with_gradient:
            torch.autograd.backward(with_gradient, [torch.ones_like(t) for t in with_gradient])
        seconds = time.perf_counter() - began
        self.seconds[n] = seconds if self._runs <= 2 else min(seconds, self.seconds[n])
        self.bytes[n] = sum(t.nbytes for t in outputs) if can_travel(result) else None
        return tree.map_tensors(_cut_off, result)


def _cut_off(tensor: Tensor) -> Tensor:
    """The tensor without its history, with a gradient where it had one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _writable(tensor: Tensor) -> Tensor:
    """A tensor that may be written to, as inside a network. Some functions take only what has no gradient: running
    statistics have none."""
    return _cut_off(tensor).clone() if tensor.is_floating_point() else tensor


def can_travel(value: Any) -> bool:
    """Return whether a value is a tree of dense tensors and plain numbers."""
    value = tuple(value) if isinstance(value, torch.Size) else value
    try:  # the types that torch can write down: no named tuples
        pytree.treespec_dumps(pytree.tree_structure(value))
    except (NotImplementedError, TypeError):
        return False
    leaves = pytree.tree_leaves(value)
    return all(
        leaf.layout == torch.strided
        if isinstance(leaf, Tensor)
        else leaf is None or isinstance(leaf, int | float | bool)
        for leaf in leaves
    )
