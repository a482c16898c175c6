"""What was found about a script: findings, the names by which they can be accepted, and the answer."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any, Literal

FINDING_NAMES: Mapping[str, str] = {
    "accumulation_divided_twice": "the micro-batches of a window are divided by their number more than once",
    "accumulation_undivided": "the gradients of several micro-batches are summed and not divided by their number",
    "batch_statistics": "a layer normalises over the rows of each rank alone",
    "clipped_before_average": "gradients are clipped on each rank before they are averaged",
    "clipped_scaled": "gradients are clipped while a GradScaler's scale is in them",
    "different_beginnings": "ranks begin with different weights",
    "different_lists": "ranks reduce different lists of tensors with each other",
    "differs": "gradients or weights differ from those of one process, for a reason that is not known",
    "diverged_collectives": "ranks call different collectives",
    "dropped_micro_batches": "some micro-batches of a window are not in the gradient",
    "evaluation": "a figure of an evaluation counts rows twice, or weights batches of unequal size alike",
    "fixed_order": "each epoch has the same order of rows, and no sampler shuffles",
    "flags": "modules are in training mode on some ranks and in evaluation mode on others",
    "gather_without_gradient": "a collective in the forward has no backward",
    "hang": "ranks wait for others that do not arrive",
    "inputs_differ": "the ranks of one tensor-parallel group are given different inputs",
    "learning_rates": "learning rates differ between ranks",
    "loaded_weights": "ranks load other weights, or another state of an optimizer, than were saved",
    "loss_statistics": "the loss uses statistics of the rows of each rank alone",
    "micro_batch_statistics": "a step's gradient depends on which rows share a micro-batch",
    "micro_batches_unequal": "the micro-batches of a window have unequal weights in the gradient",
    "micro_batches_weighted_alike": "micro-batches with unequally many tokens have equal weights in the gradient",
    "not_averaged": "gradients are not averaged over the ranks",
    "not_resumed": "a run that is to resume begins with other weights than any earlier step has left",
    "rank_died": "a rank ended without an error of the script",
    "rank_ended_early": "a rank left the script while others waited for it",
    "rank_raised": "a rank raised an error while others waited for it",
    "ranks_weighted": "ranks with equally many rows have unequal weights in the gradient",
    "ranks_weighted_alike": "ranks with unequally many rows or tokens have equal weights in the gradient",
    "reference_differs": "gradients differ from those of the function that is given as a reference",
    "resumed_rows": "after a resume, rows are read again or left out",
    "resumed_state": "an optimizer loses its state at a resume",
    "same_draws": "ranks draw the same random numbers for different rows",
    "same_order": "each epoch has the same order of rows although the sampler shuffles",
    "scale": "gradients are a multiple of those of one process",
    "scaled_apart": "gradients are a multiple of those of one process that differs between ranks",
    "scaled_rate": "learning rates are a multiple of those of one process",
    "scaler": "the scale of a GradScaler differs between ranks",
    "schedule": "the learning rate changes faster or slower than in one process",
    "shape_mismatch": "ranks call a collective with tensors of different shapes",
    "shards_scaled_apart": "the shards of one tensor are multiples of it that differ between ranks",
    "shared_rows": "rows are read by several ranks",
    "short_window": "a step at the end of an epoch has fewer micro-batches than it is divided by",
    "skipped_steps": "some ranks make optimizer steps that others leave out",
    "stale_optimizer": "an optimizer holds tensors that are no longer those of the network",
    "tied_apart": "one parameter of one process is several on the ranks",
    "trained_parameters": "ranks train different parameters",
    "uneven_batches": "ranks read unequally many batches in an epoch",
    "uneven_micro_batches": "micro-batches of unequal size have equal weights in the gradient",
    "unlike_draws": "ranks draw different random numbers for the same activations",
    "unmatched_receive": "a rank waits for a message that no rank sends",
    "unmatched_send": "a rank sends a message that no rank receives",
    "unread_rows": "some rows are read by no rank",
    "unused_parameters": "DistributedDataParallel waits for gradients of parameters that are not used",
    "weight_decay": "the weight decay differs between ranks",
    "weights_differ": "weights differ after a step whose gradients agree",
    "zero_gradients": "all gradients are zero",
}
"""What each finding is about, by its name."""
_WHERE = "each finding prints its name, and docs/check_scripts.md lists them all"


def check_finding_names(given: Iterable[str]) -> None:
    """Raise ValueError for a name that no finding has, with those that are most like it."""
    for name in given:
        if name not in FINDING_NAMES:
            close = difflib.get_close_matches(name.lower().replace("-", "_"), FINDING_NAMES, 3, 0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else _WHERE
            raise ValueError(f"{name!r} is not the name of a finding, and cannot be accepted: {hint}")


Severity = Literal["difference", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    name: str
    """The name of the finding, which ``--accept`` takes."""
    severity: Severity
    """The weight of the finding: "difference" (another network is trained), "warning" (the step is right and something
    beside it is wrong) or "note"."""
    sentence: str
    """What was observed, with its values."""
    remedy: str = ""
    """What to change; empty where that is not known."""
    tensors: tuple[str, ...] = ()
    """The names of the tensors concerned, the first one first."""
    ranks: tuple[int, ...] = ()
    """The ranks that are concerned."""
    step: int | None = None
    """The first optimizer step at which it shows, counted from 1."""
    site: str = ""
    """The file and line of the script."""
    factor: float | None = None
    """The factor by which a gradient or a loss is wrong, where it is one."""
    accepted: bool = False
    """True where the finding is intended, as ``--accept`` says."""


@dataclass(frozen=True)
class ScriptAnswer:
    """The answer about a script."""

    verdict: str
    """The verdict: "another network", "the same network, but", "the same network", "undecided", "could not run" or "the
    ranks wait for each other"."""
    findings: tuple[Finding, ...] = ()
    """What was found, the most important first."""
    compared: Mapping[str, Any] = field(default_factory=dict)
    """What was compared, in numbers, by name."""
    about: tuple[str, ...] = ()
    """Sentences on how the script was run: shortened loaders, the reference, the sandbox."""
    reason: str = ""
    """The reason why nothing was answered, or why the script could not run; else empty."""
    ranks: tuple[str, ...] = ()
    """Lines on what each rank was doing when all waited."""
    hang: Mapping[str, Any] = field(default_factory=dict)
    """The whole of what each rank was doing when all waited, with the stacks."""

    @property
    def status(self) -> int:
        """The exit status: 0 the same network, 1 not so or undecided, 3 the script could not be run."""
        return {"the same network": 0, "could not run": 3}.get(self.verdict, 1)

    def as_json(self) -> dict[str, Any]:
        """Returns the answer as plain values, of which each number is finite, as JSON has no others."""
        findings = tuple(asdict(finding) | {"factor": _finite(finding.factor)} for finding in self.findings)
        return {"status": self.status, **asdict(self), "findings": findings}


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def answer(
    findings: Sequence[Finding],
    accept: Collection[str] = (),
    *,
    undecided: str = "",
    compared: Mapping[str, Any] | None = None,
    about: Sequence[str] = (),
) -> ScriptAnswer:
    """Returns the answer that findings amount to, of which those named in ``accept`` count as notes.

    ``undecided``: why a script whose numbers do not differ is not called the same network; empty where it can be. A
    warning states that each step is right, so it does not decide about an undecided script.
    """
    judged = [replace(finding, accepted=finding.name in accept) for finding in findings]
    counting = [finding for finding in judged if not finding.accepted]
    rank = {"difference": 0, "warning": 1, "note": 2}
    ordered = tuple(sorted(judged, key=lambda finding: (finding.accepted, rank[finding.severity])))
    if any(finding.severity == "difference" for finding in counting):
        verdict = "another network"
    elif undecided:
        verdict = "undecided"
    elif any(finding.severity == "warning" for finding in counting):
        verdict = "the same network, but"
    else:
        verdict = "the same network"
    return ScriptAnswer(
        verdict, ordered, dict(compared or {}), tuple(about), undecided if verdict == "undecided" else ""
    )
