"""The plan of which layers of a network are sliced, and how; and the network with its layers sliced.

====================  ======================================================================================
pair                  Linear by columns, an element-wise function, Linear by rows: one sum
Linear alone          by columns, and the outputs gathered; so is one whose weight is (inputs, outputs)
the output layer      by columns; under cross-entropy the logits stay in slices until the network is asked for them
Embedding             by vocabulary: a sum
MultiheadAttention    by heads: a sum
LSTM, GRU, RNN        by hidden units: a gather at every time step
====================  ======================================================================================

Every sliced layer (or pair) takes whole tensors and gives whole tensors, so every rank does all else that a network
does in the same way, and this is right by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from apportion.comm.group import Group
from apportion.core import torch_private, tree
from apportion.core.data.batch import Batch
from apportion.core.torch_private import parameters_of
from apportion.core.workload import Workload
from apportion.parallel.partition.part import ReplicatedPart
from apportion.parallel.replica.replica import Replica
from apportion.parallel.tensor import attention, embedding, patterns, recurrent
from apportion.parallel.tensor.attention import slice_heads
from apportion.parallel.tensor.cross_entropy import cross_entropy_of, sliced_cross_entropy
from apportion.parallel.tensor.embedding import slice_vocabulary
from apportion.parallel.tensor.linear import is_transposed, slice_columns, slice_dropout, slice_rows, slice_transposed
from apportion.parallel.tensor.patterns import ForwardRecord, Pair, record_forward
from apportion.parallel.tensor.recurrent import slice_units
from apportion.parallel.tensor.slicing import Slicer

_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""The layers of torch that are one node of a graph, with a pair inside."""


@dataclass(frozen=True)
class ShardingPlan:
    """The names of layers, by how they are sliced."""

    pairs: tuple[Pair, ...] = ()
    alone: tuple[str, ...] = ()
    output: str | None = None
    """The layer among ``alone`` whose outputs are the logits of a cross-entropy."""
    embeddings: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    recurrent: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    """Linear layers whose weight is stored as (inputs, outputs)."""

    def layers(self) -> set[str]:
        """The names of all layers that are sliced."""
        paired = {name for pair in self.pairs for name in (*pair.columns, pair.row)}
        return paired | {*self.alone, *self.embeddings, *self.attention, *self.recurrent, *self.transposed}


def plan(
    model: nn.Module, inputs: Any, workload: Workload, *, min_width: int, within: Sequence[str] = ("",)
) -> ShardingPlan:
    """The plan of what can be sliced of a workload's network, of the layers under these names. A Linear or an embedding
    that stands alone is sliced where both its sides are ``min_width`` or more."""
    state = _state(workload, inputs)
    seen = record_forward(model, inputs, *state)
    layers = {name: m for name, m in model.named_modules() if any(_under(name, prefix) for prefix in within)}
    whole = _must_stay_whole(model, layers, seen)
    layers = {name: m for name, m in layers.items() if name not in whole}
    attentions = [name for name, m in layers.items() if attention.can_be_sliced(m)]
    linear, pairs = _linear(model, layers, attentions)
    tied = {id(p) for p, held in _owners(model) if len(held) > 1}
    hooked = {name for name in linear if torch_private.hooked(layers[name])}  # they would see slices
    single = {name for name in linear if id(layers[name].weight) not in tied} - hooked
    traced = patterns.trace(model, inputs if not state else None)
    pairs += patterns.pairs(traced, single, seen)
    paired = {name for pair in pairs for name in (*pair.columns, pair.row)}
    alone = [name for name in linear if name not in paired and min(_shape(layers[name])) >= min_width]
    embeddings = [n for n, m in layers.items() if embedding.can_be_sliced(m) and min(_shape(m)) >= min_width]
    known = cross_entropy_of(workload.loss) is not None
    output = patterns.output(traced, set(alone) - hooked, seen, carried=bool(state)) if known else None
    recurrents = [n for n, m in layers.items() if recurrent.can_be_sliced(m) and n not in seen.packed]
    transposed = [n for n, m in layers.items() if is_transposed(m) and min(_shape(m)) >= min_width]
    return ShardingPlan(
        tuple(pairs), tuple(alone), output, tuple(embeddings), tuple(attentions), tuple(recurrents), tuple(transposed)
    )


def _state(workload: Workload, inputs: Any) -> tuple[Any, ...]:
    """The carried state to begin with, as a tuple; empty where none is carried."""
    if workload.carry is None:
        return ()
    device = tree.tensors(inputs)[0].device
    return (tree.cast(workload.carry(tree.length(inputs)), device, workload.dtype),)


def _linear(
    model: nn.Module, layers: Mapping[str, nn.Module], attentions: Sequence[str]
) -> tuple[list[str], list[Pair]]:
    """The Linear layers that may be sliced, and the pairs of them that are inside of torch's own blocks."""
    linear = [name for name, m in layers.items() if type(m) is nn.Linear and "weight" in parameters_of(m)]
    pairs = []
    for name, block in model.named_modules():
        if isinstance(block, _BLOCKS):
            inside = [_join(name, child) for child in ("linear1", "linear2")]
            linear = [other for other in linear if other not in inside]
            # Evaluated, a block with whole attention goes through one kernel of torch's that wants all weights.
            parts = [(block.linear1, nn.Linear), (block.linear2, nn.Linear), (block.dropout, nn.Dropout)]
            made = all(type(part) is kind and not torch_private.hooked(part) for part, kind in parts)
            usual = type(block) in _BLOCKS and made and patterns.is_elementwise(block.activation)
            if usual and _join(name, "self_attn") in attentions and all(n in layers for n in inside):
                pairs.append(Pair((inside[0],), inside[1], (_join(name, "dropout"),)))
    return linear, pairs


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _shape(layer: Any) -> tuple[int, ...]:
    return tuple(layer.weight.shape)


def _owners(model: nn.Module) -> list[tuple[nn.Parameter, list[tuple[str, str]]]]:
    """The parameters, each with the layers that have it and its name there."""
    held: dict[int, tuple[nn.Parameter, list[tuple[str, str]]]] = {}
    for name, module in model.named_modules():
        for what, p in module.named_parameters(recurse=False, remove_duplicate=False):
            held.setdefault(id(p), (p, []))[1].append((name, what))
    return list(held.values())


def _must_stay_whole(model: nn.Module, layers: Mapping[str, nn.Module], seen: ForwardRecord) -> set[str]:
    """The layers whose weights something else uses, or that share one with a layer which is not cut the same way."""
    owners, whole, before = _owners(model), set[str](), -1
    while len(whole) > before:
        before = len(whole)
        for p, held in owners:
            names = {name for name, _ in held}
            hooks = torch_private.gradient_hooked(p)
            if id(p) in seen.outside or hooks or names & whole or not _cut_alike(layers, held):
                whole |= names
        whole |= {name.removesuffix(".out_proj") for name in whole if name.endswith(".out_proj")}
    return whole


def _cut_alike(layers: Mapping[str, nn.Module], held: Sequence[tuple[str, str]]) -> bool:
    """Return whether a parameter is one layer's alone, or the weight of embeddings and of Linear layers, which are both
    cut by their rows."""
    return len(held) == 1 or all(
        what == "weight"
        and name in layers
        and (type(layers[name]) is nn.Linear or embedding.can_be_sliced(layers[name]))
        for name, what in held
    )


class TensorParallelModel(ReplicatedPart):
    """A rank's slices of a network, run on whole batches by all ranks together."""

    def __init__(self, model: nn.Module, plan: ShardingPlan, group: Group, workload: Workload) -> None:
        slicer = Slicer(model, group)
        _slice(model, plan, slicer)
        super().__init__(model, slicer.pieces)
        self._group, self._cross_entropy = group, cross_entropy_of(workload.loss)
        self._output: Any = model.get_submodule(plan.output) if plan.output is not None else None

    def backward(self, replica: Replica, batch: Batch) -> Tensor:
        with replica.autocast():
            loss = self.loss(replica, lambda: replica.outputs(batch), batch.targets)
        replica.backward(loss, 1.0)
        return loss.detach()

    def loss(self, replica: Replica, outputs: Callable[[], Any], targets: Any) -> Tensor:
        """The mean loss, of logits that stay in slices where it can take them so."""
        if self._output is None or self._cross_entropy is None:
            return replica.loss(outputs(), targets)
        self._output.gathers = False
        try:
            logits = outputs()
        finally:
            self._output.gathers = True
        return sliced_cross_entropy(logits, targets, self._group, self._output.sizes, self._cross_entropy)


def _slice(model: nn.Module, plan: ShardingPlan, slicer: Slicer) -> None:  # noqa: C901 (a loop for each kind)
    get: Callable[[str], Any] = model.get_submodule
    for pair in plan.pairs:
        for name in pair.columns:
            slice_columns(get(name), slicer, gathers=False)
        slice_rows(get(pair.row), slicer)
    for number, name in enumerate(sorted({name for pair in plan.pairs for name in pair.dropouts})):
        slice_dropout(get(name), slicer, number)
    for name in plan.alone:
        slice_columns(get(name), slicer, gathers=True)
    for name in plan.transposed:
        slice_transposed(get(name), slicer)
    for name in plan.embeddings:
        slice_vocabulary(get(name), slicer)
    for number, name in enumerate(plan.attention):
        slice_heads(get(name), slicer, -1 - number)
    for name in plan.recurrent:
        slice_units(get(name), slicer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):  # its nested tensors are for kernels that want whole weights
            module.use_nested_tensor = False
