"""Why ranks may train another network than one device: what is known to do it, looked for in what was found."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apportion.tap_differences import TOLERANCE, Relation, related
from apportion.workload import Workload

_STATISTICS = frozenset(("batch_norm", "instance_norm"))
"""Functions of torch that take statistics over a batch, or keep running ones."""


def likely_causes(
    workload: Workload,
    network: nn.Module,
    *,
    ranks: int,
    gradients: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    named: str | None = None,
    draws: Sequence[str] = (),
) -> list[str]:
    """Sentences, the likeliest cause first; none where nothing is known.

    ``gradients``: by parameter, what the ranks have and what one device has; ``named``: the submodule that
    ``first_difference`` named; ``draws``: what ``draws_of`` has found to be drawn from in a step.
    """
    causes = []
    factor = common_factor(list((gradients or {}).values()))
    if factor is not None and _is_off_by(factor, ranks):
        why = "the loss may give a sum, and not the mean" if factor > 1.0 else "the loss may be divided twice"
        causes.append(
            f"all gradients are {factor:.4g} times one device's, on {ranks} ranks: {why}, or count= may count "
            "otherwise than the loss; give a loss that is the mean over what count= counts"
        )
    statistics = batch_statistics(network)
    if named is not None and statistics:  # the one that was found to differ stands first
        statistics = sorted(statistics, key=lambda name: name != named)
    causes += [
        f"{name or 'the model'} ({type(network.get_submodule(name)).__name__}) takes statistics of a batch in a "
        "forward of its own, and sees the rows of one rank: use torch's batch normalisation, or one that looks at one "
        "example"
        for name in statistics
    ]
    if draws:
        where = "update" if workload.update is not None else "the model or the loss"
        causes.append(
            f"{where} draws from {', '.join(sorted(draws))}, each rank its own numbers: draw in augment, which is "
            "keyed by example"
        )
    return causes


def common_factor(pairs: Sequence[tuple[Tensor, Tensor]], *, tolerance: float = TOLERANCE) -> float | None:
    """The one number by which all of these (found, expected) differ; None where they differ otherwise, or not."""
    factors = []
    for found, expected in pairs:
        if found.shape != expected.shape:
            return None
        if not expected.count_nonzero() and not found.count_nonzero():
            continue
        relation: Relation = related(found, [expected], tolerance=tolerance)
        if relation.kind == "differs":
            return None
        factors.append(relation.factor)
    if not factors or any(abs(f - factors[0]) > 10 * tolerance * abs(factors[0]) for f in factors):
        return None
    return None if factors[0] == 1.0 else factors[0]


def _is_off_by(factor: float, ranks: int) -> bool:
    return any(abs(factor - known) <= 1e-6 * known for known in (ranks, 1 / ranks))


def batch_statistics(network: nn.Module) -> list[str]:
    """Submodules whose own forward takes statistics of a batch: those of torch's batch normalisation are known, and
    taken over all ranks."""
    found = []
    for name, module in network.named_modules():
        forward = type(module).forward
        torchs = forward is _BatchNorm.forward or str(type(module).__module__).startswith("torch.nn.modules.")
        instance = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if instance or (not torchs and isinstance(forward, types.FunctionType) and _calls(forward.__code__)):
            found.append(name)
    return found


def _calls(code: types.CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return not _STATISTICS.isdisjoint(code.co_names) or any(map(_calls, inner))


def draws_of(function: Callable[[], Any]) -> set[str]:
    """What calling this draws from: the generators whose state it has moved. It is called once."""
    before = _states()
    function()
    after = _states()
    return {name for name in before if before[name] != after[name]}


def _states() -> dict[str, Any]:
    keys = np.random.get_state(legacy=False)
    found: dict[str, Any] = {
        "torch's generator": torch.default_generator.get_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy.random": repr(keys["state"]["pos"]) + keys["state"]["key"].tobytes().hex(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number, generator in enumerate(torch.cuda.default_generators):
            found[f"torch's generator of cuda:{number}"] = generator.get_state().numpy().tobytes()
    return found
