"""The values that pass between stages, put together from micro-batches and taken apart again: a stage that computes a
batch at once, as batch normalisation asks for, receives and sends in micro-batches like any other.

::

    micro-batches      | rows 0-2 | rows 3-5 | rows 6-7 |      each as the stage before computed it
    the whole batch    | rows 0-7                       |      forward, with the statistics of all rows
    micro-batches      | rows 0-2 | rows 3-5 | rows 6-7 |      the stage after goes on with each

Both are differentiable, so gradients go back the same way. Which dimension has the rows is found out by computing few
rows and more of them: it is the one that grows with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from apportion.core import tree
from apportion.core.modes import evaluating
from apportion.core.torch_private import BatchNormBase, DropoutBase, pytree
from apportion.parallel.partition.equivalence import difference
from apportion.parallel.pipeline.cut_points import calls
from apportion.parallel.pipeline.stage_graph import StageGraph
from apportion.parallel.tracing.network import undisturbed
from apportion.parallel.tracing.nodes import used_tensors

SAMPLE = 2, 3
"""The numbers of rows that are computed apart and together, to see what becomes of them."""
ROUNDING = 1e-3
"""The part of the largest number by which the same row may differ when it is computed among others."""


@dataclass(frozen=True)
class BatchRows:
    """The way in which a tensor or number that passes a cut depends on the rows."""

    each: int = 0
    """The number of places of the dimension that are one row, or the part of the number that is one row's; 0: it is the
    same for any rows."""
    dim: int | None = None
    """The dimension of a tensor that has the rows; None where no dimension does."""


def needs_whole_batch(model: nn.Module, nodes: Sequence[fx.Node], stateful: Sequence[str]) -> bool:
    """Return whether one of these calls normalises by the batch's statistics, or changes a buffer or number of its
    own."""
    for node in nodes:
        if node.op == "call_module":
            path = str(node.target)
            if any(normalises(layer) for layer in model.get_submodule(path).modules()):
                return True
            if any(name.startswith(f"{path}.") for name in stateful):
                return True
        elif any(name in stateful for name, _ in used_tensors(model, node)):
            return True
    return False


def normalises(layer: nn.Module) -> bool:
    """Return whether a layer is a batch normalisation that takes its statistics from the batch."""
    return isinstance(layer, BatchNormBase) and (layer.training or layer.running_mean is None)


def rows_at(model: nn.Module, graph: fx.Graph, at: int, inputs: Any) -> list[BatchRows]:
    """The dependence on the rows of each tensor and number that passes a cut before this call."""
    stage = StageGraph(model, graph, [0, at, len(calls(graph))], 0)
    with evaluating(model.modules()), undisturbed(model):
        found = [_leaves(stage.module(*stage.select_arguments(graph, sample)))[0] for sample in _samples(inputs)]
    return [_rows(*leaves) for leaves in zip(*found, strict=True)]


def _samples(inputs: Any) -> list[Any]:
    """Few rows of the inputs, more of them, and all of these together."""
    few, more = SAMPLE
    ranges = range(few), range(few, few + more), range(few + more)
    return [tree.map_tensors(lambda t, rows=rows: t[[i % len(t) for i in rows]], inputs) for rows in ranges]  # type: ignore[misc]


def refuse_coupled(model: nn.Module, inputs: Any, microbatches: int) -> None:
    """Raise ValueError where what a network gives for a row depends on the rows beside it, as a normalisation of its
    own makes it: unlike with ``normalises`` this is seen by what is computed. A network that draws as it computes is
    not refused."""
    dropout = [layer for layer in model.modules() if isinstance(layer, DropoutBase)]
    with evaluating(dropout), undisturbed(model):
        try:
            few, more, together, again = (
                tree.tensors(tree.call(model, rows)) for rows in (*_samples(inputs), _samples(inputs)[-1])
            )
        except Exception:  # of so few rows: what it wants to be called with is its own affair
            return
    rows = [(a, b, t) for a, b, t in zip(few, more, together, strict=True) if t.dim() and len(a) + len(b) == len(t)]
    if all(a.shape[1:] == b.shape[1:] for a, b, _ in rows) and difference(again, together) == 0.0:
        _refuse_apart([torch.cat([a, b]) for a, b, _ in rows], [t for _, _, t in rows], model, microbatches)


def refuse_coupled_stage(
    model: nn.Module, graph: fx.Graph, bounds: Sequence[int], number: int, inputs: Any, microbatches: int
) -> None:
    """Raise ValueError where what one stage gives for a row depends on the rows beside it, and another stage is to see
    the whole batch."""
    n, begin, end = len(calls(graph)), bounds[number], bounds[number + 1]
    try:
        before, after = rows_at(model, graph, begin, inputs) if number else [], rows_at(model, graph, end, inputs)
    except ValueError:  # no stage joins values whose rows are unknown
        return
    first, stage = StageGraph(model, graph, [0, begin, n], 0), StageGraph(model, graph, [0, begin, end, n], 1)
    few, more, together = _samples(inputs)

    def run(rows: Any, values: Any) -> Any:
        rows, values = tree.map_tensors(Tensor.clone, (rows, values))
        return stage.module(*stage.select_arguments(graph, rows), *values)

    with evaluating(model.modules()), undisturbed(model):
        values = first.module(*first.select_arguments(graph, together)) if number else []
        parts = [run(*own) for own in zip((few, more), split_microbatches(values, before, SAMPLE), strict=True)]
        whole, again = (tree.tensors(run(together, values)) for _ in range(2))
    if difference(again, whole) == 0.0:
        _refuse_apart(tree.tensors(join_microbatches(parts, after)), whole, model, microbatches)


def _refuse_apart(found: Sequence[Tensor], expected: Sequence[Tensor], model: nn.Module, microbatches: int) -> None:
    apart = difference(found, expected)
    if apart > ROUNDING:
        raise ValueError(
            f"microbatches={microbatches} would change what {type(model).__name__} computes, which gives a row other "
            f"outputs beside other rows (by {apart:.2g} of the largest): use microbatches=1, or layer_placement"
        )


def _rows(few: Any, more: Any, together: Any) -> BatchRows:
    counts = (*SAMPLE, sum(SAMPLE))
    if isinstance(together, Tensor):
        shapes = few.shape, more.shape, together.shape
        grown = [d for d in range(together.dim()) if len({shape[d] for shape in shapes}) > 1]
        if not grown:
            return BatchRows()
        sizes = [shape[grown[0]] for shape in shapes]
        each = sizes[0] // counts[0]
        if (
            len(grown) == 1
            and sizes == [each * n for n in counts]
            and (
                # Where a row is several places, are these next to each other?
                each == 1 or difference([torch.cat([few, more], grown[0])], [together]) <= ROUNDING
            )
        ):
            return BatchRows(each, grown[0])
    elif few == more == together:
        return BatchRows()
    elif isinstance(few, int) and [few, more, together] == [few // counts[0] * n for n in counts]:
        return BatchRows(few // counts[0])
    raise ValueError(
        "what passes from stage to stage does not have its rows one after the other, and so batch normalisation cannot "
        "be given the whole batch of it: give cuts= elsewhere, or use microbatches=1, or data_parallel"
    )


def join_microbatches(parts: Sequence[Any], rows: Sequence[BatchRows]) -> Any:
    """The values of a batch, joined from those of its micro-batches in order."""
    leaves = [_leaves(part)[0] for part in parts]
    whole = [_join_leaf(own, how) for own, how in zip(zip(*leaves, strict=True), rows, strict=True)]
    return pytree.tree_unflatten(whole, _leaves(parts[0])[1])


def _join_leaf(parts: Sequence[Any], how: BatchRows) -> Any:
    if how.dim is not None:
        return torch.cat(list(parts), how.dim)
    return sum(parts) if how.each else parts[0]  # whose gradient then is that of all


def split_microbatches(whole: Any, rows: Sequence[BatchRows], counts: Sequence[int]) -> list[Any]:
    """The values of micro-batches, each with its number of rows."""
    leaves, spec = _leaves(whole)
    parts = [_parts(leaf, how, counts) for leaf, how in zip(leaves, rows, strict=True)]
    return [pytree.tree_unflatten([own[i] for own in parts], spec) for i in range(len(counts))]


def _parts(leaf: Any, how: BatchRows, counts: Sequence[int]) -> Sequence[Any]:
    if how.dim is not None:
        parts: Sequence[Tensor] = leaf.split([how.each * n for n in counts], how.dim)
        return parts
    return [how.each * n if how.each else leaf for n in counts]


def _leaves(values: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten([tuple(v) if isinstance(v, torch.Size) else v for v in values])
