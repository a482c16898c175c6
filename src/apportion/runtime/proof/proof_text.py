"""A proof as lines of words, and as a notebook shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from apportion.core.html_table import html_section, html_table, html_text

if TYPE_CHECKING:
    from apportion.runtime.proof.proof import Proof, Round

_OF_A_ROUND = {"equal": "equal", "different": "DIFFERENT", "undecided": "UNDECIDED"}
_VERDICTS = {
    "equal": "the same network in its first steps",
    "different": "NOT the same network",
    "undecided": "UNDECIDED",
}


def proof_lines(proof: Proof, words: Callable[[str], str] = str) -> Iterator[str]:
    """Yields what ``check`` found, as the terminal shows it. ``words``: what is made of the sentence, as its arguments
    written as flags."""
    yield f"{proof.strategy} on {proof.workers} workers against {_reference(proof)}:"
    shown = list(_rounds(proof))
    for what, found in shown[: len(proof.rounds)]:
        yield _round_line(found, what)
    for line in proof.by_design:
        yield f"  by design: {line}"
    for what, found in shown[len(proof.rounds) :]:
        yield _round_line(found, what)
    if proof.first is not None:
        yield f"  {proof.first}"
    for line in proof.causes:
        yield f"  likely: {line}"
    yield words(proof.sentence)
    yield _VERDICTS[proof.verdict]


def proof_html(proof: Proof) -> str:
    """Returns what ``check`` found, as a notebook shows it."""
    heads = [
        "against " + _reference(proof),
        "verdict",
        "steps",
        "tensors",
        "worst",
        "by",
        "of",
        "bound",
        "rounding noise",
    ]
    rows = [
        [
            f"{what}{found.precision}",
            _OF_A_ROUND[found.verdict],
            str(found.steps),
            str(found.tensors),
            f"{found.worst.name} after step {found.worst.step}",
            f"{found.worst.relative:.2g}",
            found.worst.scale,
            f"{found.bound:.2g}",
            f"{found.noise:.2g}",
        ]
        for what, found in _rounds(proof)
    ]
    return "".join((
        html_text(_VERDICTS[proof.verdict], bold=True),
        html_text(proof.sentence),
        html_table(heads, rows),
        html_section("by design", proof.by_design),
        html_section("where it begins", [] if proof.first is None else [proof.first]),
        html_section("likely", proof.causes),
    ))  # fmt: skip


def _reference(proof: Proof) -> str:
    return "one device" if proof.exact else "its own reference (it is approximate by design)"


def _rounds(proof: Proof) -> Iterator[tuple[str, Round]]:
    """Yields each round with what it is of; those of the proof itself first."""
    yield from (("", found) for found in proof.rounds)
    if proof.gradients is not None:
        yield "gradients in ", proof.gradients
    if proof.rare is not None:
        yield from (("rare rows in ", found) for found in proof.rare.rounds)
        if proof.rare.gradients is not None:
            yield "gradients of rare rows in ", proof.rare.gradients


def _round_line(found: Round, what: str = "") -> str:
    worst = found.worst
    line = (
        f"  {what}{found.precision}: {_OF_A_ROUND[found.verdict]} over {found.steps} steps and {found.tensors} "
        f"tensors; worst is {worst.name} after step {worst.step}, by {worst.absolute:.2g}, {worst.relative:.2g} of "
        f"{worst.scale} (bound {found.bound:.2g}, rounding noise {found.noise:.2g})"
    )
    return line if found.disagreement is None else f"{line}\n    {found.disagreement}"
