"""What a proof compares of a strategy's steps besides their states: the values that they report, what they predict, and
the step after a state that was loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor

from apportion.api.proof_workers import ProofWorkers
from apportion.comm.channel import Message
from apportion.runtime.proof.comparison import NOISE_FACTOR, largest

PREDICTED = 1e-6
"""The share of the largest output by which what ranks predict may differ in float64 from what one device does."""
REPORTED = 2.0**-22
"""The share of itself by which a value that is reported may be off: a number to be read, which a strategy may send in
float32."""
RELOADED = 1e-9
"""The share of the largest value by which a step that is made again may differ."""
ROUNDINGS = 64
"""The number of roundings of a value that a sum in another order may make."""


class ContractChecks:
    """The checks of one round, whose findings are whole clauses; None where there is nothing to say."""

    def __init__(self, pools: ProofWorkers, *, exact: bool, precision: str, eps: float) -> None:
        """``exact``: the strategy is held to one device; ``eps``: the rounding of the arithmetic."""
        self._pools, self._exact, self._wide, self._eps = pools, exact, precision == "float64", eps
        self._noise: dict[str, float] = {}

    @property
    def repeats(self) -> bool:
        """True where the last step is to be made again, from the state before it."""
        return self._exact and self._wide and self._pools.can_repeat

    def values(self, step: int, went: Sequence[Message], one: Message, nudged: Message) -> str | None:
        """Compares the values that ranks report of a step with one device's."""
        if not self._exact or one["values"] is None or nudged["values"] is None:
            return None
        for name, value in one["values"].items():
            if not math.isfinite(value):
                continue
            moved = abs(nudged["values"].get(name, value) - value) / abs(value) if value else 0.0
            self._noise[name] = max(self._noise.get(name, 0.0), moved)
            allowed = max(REPORTED, ROUNDINGS * self._eps, NOISE_FACTOR * self._noise[name]) * abs(value)
            for rank, answer in enumerate(went):
                if not answer["values"]:  # it has made no step
                    continue
                if name not in answer["values"]:
                    return f"rank {rank} reports no {name}, which one device does"
                (reported,) = answer["values"][name]
                if not abs(reported - value) <= max(allowed, self._eps * self._eps):
                    return (
                        f"the {name} that rank {rank} reports of step {step} is {reported:.10g}, and one device's is "
                        f"{value:.10g}"
                    )
        return None

    def predictions(self) -> str | None:
        """Compares what ranks predict for the rows of the first batch with what one device does, after one step."""
        pools, path = self._pools, str(self._pools.folder / "predicted")
        if not (self._exact and self._wide and pools.can_repeat and pools.one_host):
            return None
        (one,) = pools.ask(pools.reference, {"kind": "predict", "path": f"{path}-by-one"}, "predicted")
        if "why" in one or not one["tensors"]:
            return None
        expected = load_file(f"{path}-by-one")
        answers = pools.ask(pools.tried, {"kind": "predict", "path": path}, "predicted")
        if any("why" in answer for answer in answers):
            return None
        if all(answer["tensors"] is None for answer in answers):
            return "no rank has the outputs that one device predicts"
        for rank, answer in enumerate(answers):
            if answer["tensors"] == one["tensors"]:
                found = _apart(load_file(f"{path}{rank}"), expected, answer["rows"], one["rows"])
                if not found <= PREDICTED:
                    return (
                        f"what rank {rank} predicts for its rows differs from what one device predicts by "
                        f"{found:.2g} of the largest output"
                    )
        return None

    def unrepeatable(self) -> str | None:
        """Makes one device's last step again, from the state before it; returns how it is not the same."""
        (one,) = self._pools.ask(self._pools.reference, {"kind": "reload"}, "reloaded")
        if one["unlike"] is None:
            return None
        return not_the_same("one device", one["unlike"], one["by"])

    def reloaded(self, digests: Sequence[str], step: int) -> str | None:
        """Makes the ranks' last step again, from the state before it; returns how it is not the same. ``digests``:
        those of the ranks' states after it."""
        pools, folder = self._pools, self._pools.folder
        order = {"kind": "reload", "path": str(folder / "reloaded"), "ranks": [0]}
        answers = pools.ask(pools.tried, order, "reloaded")
        if [answer["digest"] for answer in answers] == list(digests):
            return None
        found = largest(load_file(folder / "reloaded"), load_file(folder / "rank0"), step)
        if found.relative <= RELOADED:
            return None
        return (
            f"the step after a state was loaded is not the one that follows it undisturbed: {found.name} differs by "
            f"{found.absolute:.3g}, so that a run which is resumed would train another network"
        )


def not_the_same(who: str, name: str, by: float) -> str:
    """Returns in words that ``who`` came to another state when it did the same again: this tensor was so far off."""
    return (
        f"{who} is not the same when it is repeated from the same state, with the same seed and rows "
        f"({name} differs by {by:.2g}): the workload changes by itself, as with a clock, a counter or a generator that "
        "the run does not seed; so nothing is allowed for rounding"
    )


def _apart(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rows: Sequence[int], every: Sequence[int]
) -> float:
    """Returns the largest difference of a rank's outputs from one device's for the same rows, as a share of the largest
    output. Outputs that are not by row (the loss, where the model computes it) are compared where the rank had the
    whole batch."""
    worst = 0.0
    for name, whole in expected.items():
        own, many = found[name], every[1] - every[0]
        by_row = whole.ndim > 0 and len(whole) == many and own.ndim == whole.ndim and len(own) == rows[1] - rows[0]
        if by_row:
            whole = whole[rows[0] - every[0] : rows[1] - every[0]]
        if (by_row or rows == every) and own.shape == whole.shape and own.numel():
            scale = float(expected[name].abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
            apart = torch.where((own == whole) | (own.isnan() & whole.isnan()), 0.0, (own - whole).abs())
            worst = max(worst, float(apart.nan_to_num(nan=float("inf")).max()) / scale)
    return worst
