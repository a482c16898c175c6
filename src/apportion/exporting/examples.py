"""The examples of an export: what is wrong with them, found before anything is compiled, and in which sizes they
vary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from apportion.core.torch_private import pytree
from apportion.exporting.target import Examples, Inputs, VaryingDimension, called


def count(inputs: Inputs) -> int:
    """Return the number of examples in inputs."""
    return len(pytree.tree_leaves(inputs)[0])


def rows(inputs: Inputs, which: slice) -> Inputs:
    """Return some examples of inputs."""
    return pytree.tree_map(lambda x: x[which], inputs)


def in_batches(examples: Examples | None, size: int) -> list[Inputs]:
    """Return the inputs of examples, at most ``size`` in each."""
    if examples is None:
        return []
    return [rows(examples.inputs, slice(at, at + size)) for at in range(0, count(examples.inputs), size)]


def at_least_two(sample: Inputs) -> Inputs:
    """Return the sample with two examples at least: torch.export would take a dimension of size 1 for a constant.
    Raises ValueError where the sample is not tensors with as many examples in each."""
    leaves = pytree.tree_leaves(sample)
    sizes = {len(x) if isinstance(x, torch.Tensor) and x.ndim else None for x in leaves}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        raise ValueError(f"sample={sample!r:.60} must be tensors whose dimension 0 is the example, as many in each")
    if sizes != {1}:
        return sample
    return pytree.tree_map(lambda x: torch.cat([x, x]), sample)


def as_in(sample: Inputs, inputs: Inputs) -> Inputs:
    """Return inputs by name in the order of the sample's, which is that of the file. Raises ValueError where names
    differ."""
    if not isinstance(sample, dict):
        return inputs
    if not isinstance(inputs, dict) or inputs.keys() != sample.keys():
        names = sorted(inputs) if isinstance(inputs, dict) else f"no names, but {type(inputs).__name__}"
        raise ValueError(f"inputs have {names}, and those of sample= are {sorted(sample)}: give the same names")
    return {name: inputs[name] for name in sample}


def check_inputs(model: nn.Module, sample: Inputs, inputs: Inputs, name: str) -> None:
    """Raise ValueError, with the argument's name, where inputs are not as the sample's are, and where they have sizes
    of their own that the model cannot compute."""
    expected, shape = pytree.tree_flatten(sample)
    leaves, own = pytree.tree_flatten(inputs)
    if own != shape:
        raise ValueError(f"{name}= has inputs of another structure than sample=: {own}, and {shape}")
    for x, like in zip(leaves, expected, strict=True):
        if not isinstance(x, torch.Tensor) or x.ndim == 0:
            raise ValueError(
                f"{name}= has {x!r:.60} as an input, which must be a tensor with the example in dimension 0"
            )
        if len(x) != len(leaves[0]):
            raise ValueError(f"{name}= has inputs of {len(leaves[0])} and of {len(x)} examples: give as many in each")
        if len(x) == 0:
            raise ValueError(f"{name}= has no examples: give one at least, or leave it out")
        if x.dtype != like.dtype:
            raise ValueError(
                f"{name}= has inputs of {x.dtype}, and sample= has {like.dtype}, which the file takes: convert them "
                f"by .to({like.dtype})"
            )
        if x.ndim != like.ndim:
            raise ValueError(_misshapen(name, x, like))
    other = [(x, like) for x, like in zip(leaves, expected, strict=True) if x.shape[1:] != like.shape[1:]]
    if other:
        try:
            with torch.no_grad():
                called(model, rows(inputs, slice(0, 1)))
        except Exception as error:
            line = next((one.strip() for one in str(error).splitlines() if one.strip()), type(error).__name__)
            raise ValueError(f"{_misshapen(name, *other[0])} (the network raises: {line})") from error


def _misshapen(name: str, x: torch.Tensor, like: torch.Tensor) -> str:
    return (
        f"{name}= has an input of shape {tuple(x.shape)}, and sample= has {tuple(like.shape)}: give examples that the "
        "network takes, with the same dimensions behind that of the example"
    )


def check_examples(model: nn.Module, sample: Inputs, examples: Examples, name: str) -> None:
    """Raise ValueError, with the argument's name, where examples are not as ``check_inputs`` asks, or have another
    number of targets."""
    check_inputs(model, sample, examples.inputs, name)
    targets = examples.targets
    if isinstance(targets, torch.Tensor) and (targets.ndim == 0 or len(targets) != count(examples.inputs)):
        found = f"{len(targets)} targets" if targets.ndim else "one target"
        raise ValueError(f"{name}= has {count(examples.inputs)} inputs and {found}: give a target for each input")


def check_targets(examples: Examples, name: str) -> None:
    """Raise ValueError, with the argument's name, where targets cannot be taken in batches, as metrics ask for."""
    for x in pytree.tree_leaves(examples.targets):
        if np.ndim(x) == 0:
            raise ValueError(
                f"{name}= has {x!r:.60} among its targets, which must be tensors with the example in dimension 0: "
                "convert lists by torch.tensor(...), and give inputs without targets as check=[inputs]"
            )


def check_numbers(examples: Examples, name: str) -> None:
    """Raise ValueError, with the argument's name, the tensor and the row, where a number is not finite."""
    for kind, tree in (("input", examples.inputs), ("target", examples.targets)):
        for x in pytree.tree_leaves(tree):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and not bool(torch.isfinite(x).all()):
                at = tuple(torch.nonzero(~torch.isfinite(x))[0].tolist())
                raise ValueError(
                    f"{name}= has {float(x[at])} in the {kind} of example {at[0]}, and ranges are chosen by numbers: "
                    "give examples whose numbers are finite"
                )


def extreme_value(examples: Examples) -> str:
    """Return a sentence about the number that is furthest beyond the others of its input, or an empty text where none
    is beyond ten times what all but 1 % of the examples stay within."""
    worst, sentence = 10.0, ""
    for x in pytree.tree_leaves(examples.inputs):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.numel():
            continue
        most = x.flatten(1).abs().amax(1) if x.ndim > 1 else x.abs()
        usual = float(most.double().quantile(0.99, interpolation="lower").clamp(min=1e-30))
        if float(most.max()) / usual > worst:
            worst, at = float(most.max()) / usual, int(most.argmax())
            sentence = (
                f"calibration= has an input of magnitude {float(most.max()):g} in example {at}, and all but 1 % of the "
                f"examples stay within {usual:g}: leave it out if it is a mistake, or limit the inputs in forward()"
            )
    return sentence


def varying(sample: Inputs, others: Sequence[Inputs]) -> tuple[VaryingDimension, ...]:
    """Return the dimensions whose size differs between the sample and other inputs."""
    return tuple(_varying(sample, others))


def _varying(sample: Inputs, others: Sequence[Inputs]) -> Iterator[VaryingDimension]:
    every = [pytree.tree_leaves(inputs) for inputs in (sample, *others)]
    for leaf, tensors in enumerate(zip(*every, strict=True)):
        for dim in range(1, tensors[0].ndim):
            sizes = tuple(x.shape[dim] for x in tensors)
            if len(set(sizes)) > 1:
                yield VaryingDimension(leaf=leaf, dim=dim, sizes=sizes)


def resized(model: nn.Module, sample: Inputs, free: Sequence[VaryingDimension]) -> list[Inputs]:
    """Return two examples of the sample in other sizes between the smallest and the largest that were given, of which
    rows and columns are left out or repeated; those that the model computes. What has the same sizes in all inputs,
    such as tokens and their mask, has one size here, too."""
    leaves, shape = pytree.tree_flatten(rows(sample, slice(0, 2)))
    found = []
    for choose in (min, _one_more, _middle, _one_less, max):
        changed = list(leaves)
        for one in free:
            index = torch.arange(choose(one.sizes)).remainder(one.sizes[0])
            changed[one.leaf] = changed[one.leaf].index_select(one.dim, index)
        inputs = pytree.tree_unflatten(changed, shape)
        try:
            with torch.no_grad():
                called(model, inputs)
        except Exception:  # whatever the network raises, it does not take this size
            continue
        found.append(inputs)
    return found


def _one_more(sizes: Sequence[int]) -> int:
    return min(sizes) + 1


def _one_less(sizes: Sequence[int]) -> int:
    return max(sizes) - 1


def _middle(sizes: Sequence[int]) -> int:
    return (min(sizes) + max(sizes)) // 2


@dataclass(frozen=True, kw_only=True)
class FixedDimension:
    """A dimension that the network takes in other sizes, too, and that all inputs have in one."""

    leaf: int
    dim: int
    size: int


def fixed_although_free(model: nn.Module, sample: Inputs, free: Sequence[VaryingDimension]) -> list[FixedDimension]:
    """Return the dimensions, besides those that are ``free``, in which the model computes inputs of another size: each
    by itself, or together with all others of the same size, as the lengths of tokens and of their mask are."""
    leaves, shape = pytree.tree_flatten(rows(sample, slice(0, 2)))
    known = {(one.leaf, one.dim) for one in free}
    dims = [(leaf, dim) for leaf, x in enumerate(leaves) for dim in range(1, x.ndim) if (leaf, dim) not in known]

    def computes(changed: Sequence[tuple[int, int]]) -> bool:
        size = leaves[changed[0][0]].shape[changed[0][1]]
        for other in (size - 1, size + 1, size // 2, 2 * size):
            if other < 1 or other == size:
                continue
            resized = list(leaves)
            for leaf, dim in changed:
                index = torch.arange(other).remainder(size)
                resized[leaf] = resized[leaf].index_select(dim, index)
            try:
                with torch.no_grad():
                    called(model, pytree.tree_unflatten(resized, shape))
            except Exception:  # whatever the network raises, it does not take this size
                continue
            return True
        return False

    found = []
    for leaf, dim in dims:
        size = leaves[leaf].shape[dim]
        together = [(a, b) for a, b in dims if leaves[a].shape[b] == size and a != leaf]
        if computes([(leaf, dim)]) or (together and computes([(leaf, dim), *together])):
            found.append(FixedDimension(leaf=leaf, dim=dim, size=size))
    return found
