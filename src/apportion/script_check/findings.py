"""What was found about a script: findings, each with the name by which it can be accepted, and the answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any, Literal

Severity = Literal["difference", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    ``name``: what ``--accept`` takes. ``severity``: "difference" (another network is trained), "warning" (the step is
    right and something beside it is wrong) or "note". ``sentence``: what was observed, with its values; ``remedy``:
    what to change. ``tensors``: names of the tensors concerned, the first one first. ``ranks``: the ranks concerned.
    ``step``: the first optimizer step at which it shows, counted from 1. ``site``: file and line of the script.
    """

    name: str
    severity: Severity
    sentence: str
    remedy: str = ""
    tensors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    step: int | None = None
    site: str = ""
    factor: float | None = None
    accepted: bool = False


@dataclass(frozen=True)
class ScriptAnswer:
    """The answer about a script.

    ``verdict``: "another network", "the same network, but", "the same network", "undecided", "could not run" or "the
    ranks wait for each other".
    ``findings``: what was found, the most important first. ``compared``: what was compared, in numbers, by name.
    ``about``: sentences on how the script was run (shortened loaders, the reference, the sandbox). ``ranks``: lines
    on what each rank was doing when all waited, and ``hang`` the whole of it, with the stacks.
    """

    verdict: str
    findings: tuple[Finding, ...] = ()
    compared: Mapping[str, Any] = field(default_factory=dict)
    about: tuple[str, ...] = ()
    reason: str = ""
    ranks: tuple[str, ...] = ()
    hang: Mapping[str, Any] = field(default_factory=dict)

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
