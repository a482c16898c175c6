"""The training step of a file, run by jax on the CPU and held against torch.

A gradient that is zero but for rounding (that of a bias before a batch normalisation) is noise in both. What rounding
does is therefore measured, by torch in float64, and no tensor is held to less than ten times of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apportion.core.torch_private import pytree
from apportion.errors import NotVerified
from apportion.exporting.target import Examples, called
from apportion.exporting.tpu.archive import Archive
from apportion.exporting.tpu.lowering import first_names, leaves_of, trained_names

LIMIT = 1e-5
"""The largest difference of a tensor, relative to the largest number in it."""
ROUNDINGS = 10.0
"""How many times the rounding of torch itself a tensor may differ."""
LEARNING_RATE = 0.1
_GRADIENT = "gradient of "


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """How far the training step is from torch's."""

    loss: float
    """The difference of the loss, relative to it."""
    gradients: float
    """The largest difference in any gradient, relative to the largest number in all of them."""
    weights: float
    """The same of the weights and buffers after the step."""
    tensors: int
    """The number of tensors, each of which is also held by itself, relative to the largest number in it."""
    worst: float
    """The largest difference of those that rounding does not hide."""
    where: str
    """The tensor that differs so much."""
    rounded: int
    """The number of tensors of which torch's own rounding is above a tenth of the limit."""
    roundings: float
    """The largest difference of these, as a multiple of torch's own rounding."""


def checked(
    archive: Archive, step: Callable[..., Any], network: nn.Module, loss: Callable[[Any, Any], Any], examples: Examples
) -> StepDifference:
    """Run the training step of a file beside torch on these examples. ``step``: the step, compiled for the CPU and
    this number of examples. ``network``: in training mode; it is left as it is. Raises NotVerified where a tensor
    differs by more than the limit."""
    batch = [*leaves_of(examples.inputs, "inputs"), *leaves_of(examples.targets, "targets")]
    value, gradients, weights = step(dict(archive.weights), np.float32(LEARNING_RATE), *batch)
    found = _joined(np.asarray(value), _arrays(gradients), _arrays(weights))
    expected = _by_torch(network, loss, examples)
    exact = _by_torch(_in_float64(network), loss, _in_float64(examples))
    worst, where, rounded, roundings = 0.0, "", 0, 0.0
    for name, own in found.items():
        apart, rounding = _apart(own, expected[name]), _apart(expected[name], exact[name])
        most = max(LIMIT, ROUNDINGS * rounding)
        if not apart <= most:
            raise NotVerified(
                f"the training step computes another {name} than torch: it differs by {apart:.2g} of its largest "
                f"number, of {most:.2g} at most; nothing was written"
            )
        if most > LIMIT:
            rounded, roundings = rounded + 1, max(roundings, apart / rounding)
        elif apart >= worst:
            worst, where = apart, name
    return StepDifference(
        loss=_apart(found["loss"], expected["loss"]),
        gradients=_apart_together(found, expected, [_GRADIENT + name for name in gradients]),
        weights=_apart_together(found, expected, list(weights)),
        tensors=len(found),
        worst=worst,
        where=where,
        rounded=rounded,
        roundings=roundings,
    )


def _joined(loss: Any, gradients: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss": loss, **{_GRADIENT + name: x for name, x in gradients.items()}, **weights}


def _arrays(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(x) for name, x in given.items()}


def _by_torch(network: nn.Module, loss: Callable[[Any, Any], Any], examples: Examples) -> dict[str, Any]:
    """Return the loss, the gradients, and the weights after a step of SGD as arrays."""
    made = copy.deepcopy(network)
    trained = trained_names(made)
    parameters = {name: p for name, p in made.named_parameters() if name in trained}
    optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE)
    value = loss(called(made, examples.inputs), examples.targets)
    value.backward()
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad.clone()).numpy() for name, p in parameters.items()
    }
    optimizer.step()
    tensors = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    weights = {name: tensors[name].detach().numpy() for name in set(first_names(made).values())}
    return _joined(value.detach().numpy(), gradients, weights)


def _apart_together(found: Mapping[str, Any], expected: Mapping[str, Any], names: Sequence[str]) -> float:
    """Return the largest difference in any of these, relative to the largest number in all of them."""
    both = [np.concatenate([np.ravel(each[name]) for name in names] or [np.zeros(1)]) for each in (found, expected)]
    return _apart(*both)


def _apart(one: Any, other: Any) -> float:
    """Return the largest difference, relative to the largest number of the other; infinite where the shapes differ."""
    if np.shape(one) != np.shape(other):
        return float("inf")
    a, b = np.asarray(one).astype(np.float64), np.asarray(other).astype(np.float64)
    apart = float(np.abs(a - b).max(initial=0.0))
    return apart / float(np.abs(b).max(initial=1e-30)) if apart else 0.0


def _in_float64(given: Any) -> Any:
    """Return a copy of a network or of examples in float64."""
    if isinstance(given, nn.Module):
        return copy.deepcopy(given).double()
    wide = pytree.tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, (given.inputs, given.targets)
    )
    return Examples(*wide)
