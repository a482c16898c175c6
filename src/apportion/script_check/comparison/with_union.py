"""The ranks against the script as one process on the union of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apportion.script_check.comparison.table import Parting, parting
from apportion.script_check.comparison.tensors import Bounds, shown
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


def findings(
    ranks: Sequence[RankRecord], union: RankRecord, bounds: Mapping[tuple[int, int], Bounds] | None = None
) -> list[Finding]:
    """Returns how the ranks' gradients and weights differ from those of one process, by more than ``bounds`` (see
    ``table.parting``)."""
    found, _ = parting(ranks, union, bounds)
    return [] if found is None else [_explained(found, len(ranks))]


def _explained(found: Parting, ranks: int) -> Finding:
    first = found.of(found.names[0])
    names = tuple(shown(name, found.compared) for name in found.names)
    alike = len(first) == ranks and max(d.ratio for d in first) - min(d.ratio for d in first) < 1e-9
    if alike and all(d.scaled for d in found.differences):
        sentence = (
            f"Every gradient that differs is {first[0].ratio:.6g} times that of one process, from step {found.step}."
        )
        return Finding("scale", "difference", sentence, "", names, (), found.step, found.site, first[0].ratio)
    sentence = (
        f"From step {found.step} on, {len(names)} of {len(found.compared)} {found.what} differ from those of one "
        f"process, {names[0]} first."
    )
    return Finding("differs", "difference", sentence, "", names, (), found.step, found.site, first[0].ratio)
