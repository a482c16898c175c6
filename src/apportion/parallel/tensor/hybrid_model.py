"""A network whose first layers each rank computes for a share of the examples, and whose last ones it has slices of.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: what crosses is exchanged between
the two, all of it at once, or one rank's share after the other.

The network is cut in two parts, one after the other::

    inputs -- features -- flatten --|-- classifier -- outputs
                  front             cut      back

Both call the network's own layers, and between them go tensors whose dimension 0 is the example. The rotation over the
ranks' shares is scheme (b) of the paper: while the ranks work on one share, the next one is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from apportion.comm.differentiable import gather_from
from apportion.comm.group import Group, Work
from apportion.core import tree
from apportion.core.data.batch import Batch, rows_of
from apportion.core.loss_terms import examples, terms_of
from apportion.core.modes import evaluating
from apportion.core.sampler import DataShard
from apportion.core.workload import Workload
from apportion.parallel.batch_coupling import sync_batch_functions
from apportion.parallel.ops.sync_batch_norm import NonEmptyRanks, use_whole_batch
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.replica.replica import Replica
from apportion.parallel.tensor.linear import OwnDraws
from apportion.parallel.tensor.sharding_plan import ShardingPlan, TensorParallelModel
from apportion.parallel.tracing.network import undisturbed
from apportion.parallel.tracing.nodes import attribute
from apportion.parallel.tracing.tracer import Unfollowed, follow


@final
class HybridModel(TensorParallelModel):
    """A network whose front runs on this rank's rows, and whose back runs on all of them."""

    def __init__(  # noqa: PLR0913 (what it is made of)
        self,
        model: nn.Module,
        plan: ShardingPlan,
        group: Group,
        workload: Workload,
        *,
        trains: HybridParts,
        evaluates: HybridParts,
        rotates: bool,
        channels_last: bool,
    ) -> None:
        super().__init__(model, plan, group, workload)
        self._trains, self._evaluates, self._rotates = trains, evaluates, rotates
        self._channels_last = channels_last
        self._count = workload.terms
        self._attendance = NonEmptyRanks(group)
        for name in trains.front_calls | evaluates.front_calls:
            use_whole_batch(model.get_submodule(name), self._attendance)
        terms = trains.front_uses
        for name, p in model.named_parameters(remove_duplicate=False):
            if p in terms:
                self.pieces = {**self.pieces, name: TensorShard(tuple(p.shape), partial=True)}
        self._draws = OwnDraws(group.rank, 1 << 20)

    def use_whole_functions(self, names: Sequence[str]) -> None:
        """Make these modules of the front take their batch statistics over all ranks."""
        for parts in (self._trains, self._evaluates):
            known = dict(parts.front.named_modules())
            sync_batch_functions.use_whole_functions(parts.front, [n for n in names if n in known], self._attendance)

    def backward(self, replica: Replica, batch: Batch) -> Tensor:
        with self._draws(replica.device), replica.autocast():
            values, shares = self._front(self._trains, batch)
        if self._rotates:
            return self._rotate(replica, batch, values, shares)
        with replica.autocast():
            whole = self._gathered(values, shares)
            loss = self.loss(replica, lambda: self._trains.back(*whole), batch.targets)
        replica.backward(loss, 1.0)
        return loss.detach()

    def _front(self, parts: HybridParts, batch: Batch) -> tuple[list[Tensor], list[slice]]:
        """The values that cross, for this rank's rows, and every rank's rows. A rank without rows computes the first
        one, and uses nothing of it."""
        size = self._group.size
        shares = [DataShard(rank, size).rows(len(batch)) for rank in range(size)]
        own = shares[self._group.rank]
        self._attendance.present = own.stop > own.start
        rows = own if self._attendance.present else slice(0, 1)
        inputs = rows_of(batch.inputs, rows, len(batch))
        values = tree.call(parts.front, channels_last(inputs) if self._channels_last else inputs)
        return [value[: own.stop - own.start] for value in values], shares

    def _gathered(self, values: Sequence[Tensor], shares: Sequence[slice]) -> list[Tensor]:
        sizes = [share.stop - share.start for share in shares]
        return [gather_from(value, self._group, 0, sizes) for value in values]

    def _rotate(self, replica: Replica, batch: Batch, values: Sequence[Tensor], shares: Sequence[slice]) -> Tensor:
        """Compute loss and gradient of one rank's rows after the other; then this rank's gradients go back through the
        front."""
        total = self._terms(batch.targets, slice(0, len(batch))) or 1.0
        mean = torch.zeros((), dtype=replica.workload.dtype, device=replica.device)
        gradients = [torch.zeros_like(value) for value in values]
        own = [value.detach().contiguous() for value in values]
        for rank, given in rotation(own, [share.stop - share.start for share in shares], self._group):
            weight = self._terms(batch.targets, shares[rank]) / total
            leaves = [t.requires_grad_(v.requires_grad) for t, v in zip(given, values, strict=True)]
            with replica.autocast():
                copies = [leaf.clone() for leaf in leaves]  # what the back does in place, it does to them
                outputs = partial(self._trains.back, *copies)
                # Of no terms the mean is a NaN, and 0 times NaN is one too: zero, through the same layers.
                targets = rows_of(batch.targets, shares[rank], len(batch), "targets")
                loss = self.loss(replica, outputs, targets) if weight else _zero(outputs())
            replica.backward(loss, weight)
            mean += loss.detach() * weight
            if rank == self._group.rank:
                gradients = [g if leaf.grad is None else leaf.grad for g, leaf in zip(gradients, leaves, strict=True)]
        wanted = [(v, g) for v, g in zip(values, gradients, strict=True) if v.requires_grad]
        if wanted:
            torch.autograd.backward([v for v, _ in wanted], [g for _, g in wanted])
        return mean

    def _terms(self, targets: Any, rows: slice) -> float:
        """The number of loss terms in these rows."""
        assert self._count is not None
        if self._count is examples:
            return float(rows.stop - rows.start)
        return terms_of(self._count, rows_of(targets, rows))

    @torch.no_grad()
    def predict(self, replica: Replica, batch: Batch) -> Any:
        with evaluating(self.model.modules()), replica.autocast():
            values, shares = self._front(self._evaluates, batch)
            return self._evaluates.back(*self._gathered(values, shares))


def _zero(outputs: Any) -> Tensor:
    return torch.stack([(t * 0.0).sum() for t in tree.tensors(outputs) if t.is_floating_point()]).sum()


# The two parts


@dataclass(frozen=True)
class HybridParts:
    """The two parts, as the network trains or as it evaluates."""

    front: fx.GraphModule
    """The part that is called as the network is; it gives a tuple of tensors."""
    back: fx.GraphModule
    """The part that is called with these tensors; it gives the network's outputs."""
    front_calls: frozenset[str]
    """The names of the layers that the front calls."""
    back_calls: frozenset[str]
    front_uses: frozenset[nn.Parameter]
    back_uses: frozenset[nn.Parameter]


def cut(model: nn.Module, graph: fx.Graph, is_back: Callable[[str], bool]) -> HybridParts:
    """Cut a network into two parts. ``is_back``: a function of a layer's name; what depends on such a layer is in the
    back."""
    back: set[fx.Node] = set()
    fixed = _fixed(graph)
    for node in graph.nodes:
        begins = node.op == "call_module" and is_back(str(node.target))
        if begins or node.op == "output" or any(given in back for given in node.all_input_nodes):
            back.add(node)
    back -= fixed
    front = set(graph.nodes) - back - fixed
    crossing = [node for node in graph.nodes if node in front and any(user in back for user in node.users)]
    return HybridParts(
        front=fx.GraphModule(model, _front(graph, _with_fixed(front, fixed), crossing), type(model).__name__),
        back=fx.GraphModule(model, _back(graph, _with_fixed(back, fixed), crossing)),
        front_calls=_calls(front),
        back_calls=_calls(back),
        front_uses=_uses(model, _with_fixed(front, fixed)),
        back_uses=_uses(model, _with_fixed(back, fixed)),
    )


def unfollowed(model: nn.Module, inputs: Any) -> str:
    """The reason why no graph does all that the network does, with the layer that is in the way."""
    try:
        follow(model, inputs, opaque=lambda _: False, writes=False)
    except Unfollowed as error:
        return str(error)
    return f"the forward of {type(model).__name__} cannot be followed: it does something else when it evaluates"


def _fixed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no inputs: weights, and what is made of them; they are wherever they are used."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        made = node.op in ("get_attr", "call_function", "call_method")
        if made and all(given in found for given in node.all_input_nodes):
            found.add(node)
    return found


def _with_fixed(nodes: set[fx.Node], fixed: set[fx.Node]) -> set[fx.Node]:
    found, waiting = set(nodes), list(nodes)
    while waiting:
        needed = [given for given in waiting.pop().all_input_nodes if given in fixed and given not in found]
        found.update(needed)
        waiting += needed
    return found


def _calls(nodes: Iterable[fx.Node]) -> frozenset[str]:
    return frozenset(str(node.target) for node in nodes if node.op == "call_module")


def _uses(model: nn.Module, nodes: Iterable[fx.Node]) -> frozenset[nn.Parameter]:
    found: set[nn.Parameter] = set()
    for node in nodes:
        if node.op == "call_module":
            found |= set(model.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            value = attribute(model, node.target)
            found |= {value} if isinstance(value, nn.Parameter) else set()
    return frozenset(found)


def _front(graph: fx.Graph, nodes: set[fx.Node], crossing: Sequence[fx.Node]) -> fx.Graph:
    made = fx.Graph()
    of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in nodes:
            of[node] = made.node_copy(node, of.__getitem__)
    made.output(tuple(of[node] for node in crossing))
    return made


def _back(graph: fx.Graph, nodes: set[fx.Node], crossing: Sequence[fx.Node]) -> fx.Graph:
    made = fx.Graph()
    of = {node: made.placeholder(f"crossing_{number}") for number, node in enumerate(crossing)}
    for node in graph.nodes:
        if node in nodes:
            of[node] = made.node_copy(node, of.__getitem__)
    return made


@torch.no_grad()
def what_crosses(parts: HybridParts, inputs: Any) -> str | None:
    """The first value that crosses the cut of a network that evaluates and that is not a tensor of one row an example;
    None: all are."""
    for rows in (1, 2):
        few = rows_of(inputs, slice(0, rows))
        for value in tree.call(parts.front, few):
            if not isinstance(value, Tensor):
                return f"a value of type {type(value).__name__}"
            if value.dim() == 0 or len(value) != tree.length(few):
                return f"a tensor of shape {tuple(value.shape)} of {tree.length(few)} examples"
    return None


# The rotation


def rotation(own: Sequence[Tensor], sizes: Sequence[int], group: Group) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields (rank, its tensors), for every rank that has rows. ``own``: this rank's, contiguous and left alone until
    the end; ``sizes``: every rank's rows, dimension 0; the other dimensions and the types are the same on all ranks."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    sent = [group.send(t, to) for to in others for t in own if sizes[group.rank]]
    turns = [rank for rank in range(group.size) if sizes[rank]]
    arriving = _receive(own, sizes, group, turns[0])
    for rank, after in zip(turns, [*turns[1:], None], strict=True):
        tensors, works = arriving
        if after is not None:
            arriving = _receive(own, sizes, group, after)
        for work in works:
            work.wait()
        yield rank, tensors
    for work in sent:
        work.wait()


def _receive(own: Sequence[Tensor], sizes: Sequence[int], group: Group, rank: int) -> tuple[list[Tensor], list[Work]]:
    if rank == group.rank:
        return [t.detach() for t in own], []
    into = [t.new_empty((sizes[rank], *t.shape[1:])) for t in own]
    return into, [group.receive(t, rank) for t in into]


# Images with their channels last in memory, where a network computes the same that way.
#
# A CPU's convolutions and poolings are a tenth faster on them, and a maximum is taken at several times the speed.
# Shapes stay (n, c, h, w); but for the order of the sums, so does every number.


def channels_last(inputs: Any) -> Any:
    """Return the inputs with images (n, c, h, w) laid out with the channels last in memory."""

    def laid_out(t: Tensor) -> Tensor:
        return t.contiguous(memory_format=torch.channels_last) if _is_images(t) else t

    return tree.map_tensors(laid_out, inputs)


def takes_channels_last(model: nn.Module, calls: Sequence[Callable[..., Any]], inputs: Any) -> bool:
    """Return whether these calls of a model's layers give the same on images with the channels last. They do not where
    a forward pass calls ``view`` on what its last convolution gives, for one; and only a plain convolution gains."""
    if not any(_is_images(t) and t.device.type == "cpu" for t in tree.tensors(inputs)) or not _convolves(model):
        return False
    few = rows_of(inputs, slice(0, 2))
    try:
        for call in calls:
            with undisturbed(model):
                expected = tree.tensors(tree.call(call, few))
            with undisturbed(model):
                found = tree.tensors(tree.call(call, channels_last(few)))
            pairs = zip(found, expected, strict=True)
            if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs):
                return False
    except (RuntimeError, ValueError):  # ValueError: batch normalisation of a single value
        return False
    return True


def _is_images(t: Tensor) -> bool:
    return t.dim() == 4 and t.is_floating_point()


def _convolves(model: nn.Module) -> bool:
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return bool(found) and all(module.groups == 1 for module in found)
