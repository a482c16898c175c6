"""What a proof compares of a strategy's steps besides their states: the values that they report, what they predict, and
the step after a state that was loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

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


VALUES, PREDICTIONS = "the values that its steps report", "what it predicts"
RELOADS = "the step after a state that is loaded"
CHECKED = (VALUES, PREDICTIONS, RELOADS)
"""What a step owes besides its states, in words."""


def uncompared(compared: Collection[str], hindered: Mapping[str, str], why: str | None) -> tuple[str, ...]:
    """Returns what a step owes besides its states and was not compared, each with its reason where there is one.
    ``why``: the reason of those that have none of their own."""
    reasons = {name: hindered.get(name, why) for name in CHECKED if name not in compared}
    return tuple(name if reason is None else f"{name} ({reason})" for name, reason in reasons.items())


class ContractChecks:
    """The checks of one round, whose findings are whole clauses; None where there is nothing to say."""

    def __init__(self, pools: ProofWorkers, *, exact: bool, precision: str, eps: float) -> None:
        """``exact``: the strategy is held to one device; ``eps``: the rounding of the arithmetic."""
        self._pools, self._exact, self._wide, self._eps = pools, exact, precision == "float64", eps
        self._noise: dict[str, float] = {}
        self.compared: set[str] = set()
        """What has been compared, by the names in ``CHECKED``."""
        self.hindered: dict[str, str] = {}
        """Why what was to be compared could not be, by the names in ``CHECKED``."""

    @property
    def repeats(self) -> bool:
        """True where the last step is to be made again, from the state before it."""
        return self._exact and self._wide and self._pools.can_repeat

    def values(self, step: int, went: Sequence[Message], one: Message, nudged: Message) -> str | None:
        """Compares the values that ranks report of a step with one device's."""
        if not self._exact or one["values"] is None or nudged["values"] is None:
            return None
        self.compared.add(VALUES)
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
        """Compares what ranks predict for the rows of the first batch, after one step, with what one device does."""
        pools, path = self._pools, str(self._pools.folder / "predicted")
        if not pools.one_folder:
            self.hindered[PREDICTIONS] = "the ranks are on several hosts"
        if not (self._wide and pools.can_repeat and pools.one_folder):
            return None
        state = None
        if not self._exact:  # its reference has no network: one device takes the state that the ranks have come to
            state = f"{path}-state"
            pools.ask(pools.tried, {"kind": "predict", "state": state}, "predicted")
        order = {"kind": "predict", "path": f"{path}-by-one", "state": state}
        (one,) = pools.ask(pools.reference, order, "predicted")
        if self._hindered(one):
            return None
        answers = pools.ask(pools.tried, {"kind": "predict", "path": path}, "predicted")
        if any(self._hindered(answer) for answer in answers if "why" in answer):
            return None
        lacking = _lacking(answers, one["rows"])
        if lacking is not None:
            return f"{lacking}, which one device predicts"
        if one["moves"]:  # then the rows of a rank are not where they are in the whole batch
            rows = [answer["rows"] for answer in answers]
            (moved,) = pools.ask(pools.reference, {**order, "rows": rows}, "predicted")
            if "why" in moved and self._hindered(moved):
                return None
            one = {**one, **moved}
        return self._predicted_apart(answers, one, path)

    def _predicted_apart(self, answers: Sequence[Message], one: Message, path: str) -> str | None:
        self.hindered[PREDICTIONS] = "no output has a row for each example"
        for rank, answer in enumerate(answers):
            if answer["tensors"] is None:
                continue
            if answer["tensors"] != one["tensors"]:
                return f"rank {rank} predicts {answer['tensors']} tensors, and one device {one['tensors']}"
            alone = rank in one.get("alone", ())
            expected = load_file(f"{path}-by-one{rank if alone else ''}")
            every = answer["rows"] if alone else one["rows"]
            found = _apart(load_file(f"{path}{rank}"), expected, answer["rows"], every)
            if found is None:
                continue
            self.compared.add(PREDICTIONS)
            if not found <= PREDICTED:
                by = f"differs from what one device predicts by {found:.2g} of the largest output"
                by = by if math.isfinite(found) else "has not as many rows as they are, or is not finite"
                return f"what rank {rank} predicts for its rows {by}"
        return None

    def _hindered(self, answer: Message) -> bool:
        """Notes why nothing that is predicted can be compared; returns whether that is so."""
        why = answer.get("why", None if answer.get("tensors") else "its outputs have no tensors")
        if why is not None:
            self.hindered[PREDICTIONS] = why
        return why is not None

    def unrepeatable(self) -> str | None:
        """Makes one device's last step again, from the state before it; returns how it is not the same."""
        (one,) = self._pools.ask(self._pools.reference, {"kind": "reload"}, "reloaded")
        if one["unlike"] is None:
            return None
        return not_the_same("one device", one["unlike"], one["by"])

    def reloaded(self, digests: Sequence[str], step: int) -> str | None:
        """Makes the ranks' last step again, from the state before it; returns how it is not the same. ``digests``:
        those of the ranks' states after it."""
        self.compared.add(RELOADS)
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


def _lacking(answers: Sequence[Message], every: Sequence[int]) -> str | None:
    """Returns in words which rows of the batch no rank predicts; None where there are none."""
    if any(answer["whole"] for answer in answers):
        return None if any(a["tensors"] is not None for a in answers) else "no rank has the outputs"
    there = {row for answer in answers if answer["tensors"] is not None for row in range(*answer["rows"])}
    missing = sorted(set(range(*every)) - there)
    return f"no rank has the outputs of row {missing[0]} of the first batch" if missing else None


def _apart(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rows: Sequence[int], every: Sequence[int]
) -> float | None:
    """Returns the largest difference of a rank's outputs from one device's for the same rows, as a share of the largest
    output; infinite where rows are missing; None where nothing could be compared. Outputs that are not by row (the
    loss, where the model computes it) are compared where the rank had the whole batch."""
    worst: float | None = None
    for name, whole in expected.items():
        own, many = found[name], every[1] - every[0]
        whole_by_row = whole.ndim > 0 and len(whole) == many and own.ndim == whole.ndim
        by_row = whole_by_row and len(own) == rows[1] - rows[0]
        if whole_by_row and not by_row and own.shape[1:] == whole.shape[1:] and len(own) != many:
            return math.inf
        if by_row:
            whole = whole[rows[0] - every[0] : rows[1] - every[0]]
        if (by_row or rows == every) and own.shape == whole.shape and own.numel():
            worst = worst or 0.0
            scale = float(expected[name].abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
            apart = torch.where((own == whole) | (own.isnan() & whole.isnan()), 0.0, (own - whole).abs())
            worst = max(worst, float(apart.nan_to_num(nan=float("inf")).max()) / scale)
    return worst
