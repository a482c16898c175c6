"""The sizes of inputs that an ONNX file takes: any in the dimensions in which the examples vary, and one in the others,
which is stated where the network takes more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from apportion.core.torch_private import pytree
from apportion.exporting.blamed_layer import blamed_layer, first_cause, first_line, named
from apportion.exporting.examples import fixed_although_free
from apportion.exporting.target import Inputs, TrainedNetwork, VaryingDimension

_UNBOUNDED = 2
"""The least size at which torch.export traces a dimension: a lower bound up to it says nothing of the network."""


def free_dimensions(sample: Inputs, varying: Sequence[VaryingDimension]) -> Any:
    """Return the dimensions that are free, as torch.export takes them: that of the examples, and those that vary."""
    leaves, shape = pytree.tree_flatten(sample)
    free = [{0: torch.export.Dim.DYNAMIC} if isinstance(x, torch.Tensor) and x.ndim else None for x in leaves]
    for one in varying:
        dims = free[one.leaf]
        assert dims is not None
        dims[one.dim] = torch.export.Dim.DYNAMIC
    return pytree.tree_unflatten(free, shape)


def refusal(module: nn.Module, varying: Sequence[VaryingDimension], error: BaseException) -> str:
    """Return why a network cannot be exported for inputs of several sizes, and what to do instead."""
    cause = first_cause(error)
    lines = [line.strip(" -\t") for line in str(cause).splitlines()]
    why = next((line for line in lines if "static shape" in line or "specialized" in line), first_line(cause))
    return (
        f"{named(module, blamed_layer(module, error))} cannot be exported to ONNX for inputs that differ in "
        f"{', '.join(map(str, varying))}: it fixes the size ({why}); compute the layer by operations that do not loop "
        "or decide over that size in Python, or pad all examples to one size"
    )


def hold_bounds(module: nn.Module, program: Any, trained: TrainedNetwork) -> None:
    """Raise ValueError where the program that was exported is that of other sizes than the examples have, since the
    network decides by a size."""
    for one, (low, high) in _bounds(program, trained):
        outside = [size for size in one.sizes if size < low or (high is not None and size > high)]
        if outside:
            raise ValueError(
                f"{type(module).__name__} cannot be exported to ONNX for inputs that differ in {one}: it decides by "
                f"that size, so that a file would be right for {_range(low, high)} alone, and the examples have "
                f"{outside[0]}; compute the same for every size, or pad all examples to one size"
            )


def sizes_sentence(program: Any, trained: TrainedNetwork, described: Sequence[Mapping[str, Any]]) -> str:
    """Return what is to be known of the sizes that a file takes: which the network takes besides, and how to free
    them; empty where there is nothing. ``described``: the inputs of the file, with their names and shapes."""
    sentences = []
    for one, (low, high) in _bounds(program, trained):
        if low > _UNBOUNDED or high is not None:
            sentences.append(
                f"Dimension {one.dim} of {described[one.leaf]['name']} may be of {_range(low, high)}: the network "
                "computes something else beyond, or nothing."
            )
    fixed = fixed_although_free(trained.module, trained.sample, trained.varying)
    if fixed:
        found = ", ".join(f"{one.size} in dimension {one.dim} of {described[one.leaf]['name']}" for one in fixed)
        sentences.append(
            f"The file takes inputs of one size alone ({found}), as all examples have it, though the network computes "
            "others: to leave it free, give inputs of another size, apportion.export(..., check=[inputs]), or data "
            "that vary."
        )
    return " ".join(sentences)


def _bounds(program: Any, trained: TrainedNetwork) -> Iterator[tuple[VaryingDimension, tuple[int, int | None]]]:
    """The least and the largest size of each dimension that varies; None: the largest is not limited."""
    names = list(program.graph_signature.user_inputs)
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    for one in trained.varying:
        value = values[names[one.leaf]]
        size = value.shape[one.dim]
        if isinstance(size, int):
            yield one, (size, size)
            continue
        limits = program.range_constraints.get(size.node.expr)
        if limits is None:
            continue
        high = int(limits.upper) if limits.upper.is_Integer and int(limits.upper) < 2**31 else None
        yield one, (int(limits.lower), high)


def _range(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} or more"
    return f"{low}" if low == high else f"{low} to {high}"
