"""All that gradients, weights and their scales tell about a script: the findings of each file, and which further passes
can change the answer."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.script_check.comparison import accumulation, beginnings, gathers, held, with_union
from apportion.script_check.comparison.causes import restart
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


def findings(
    ranks: Sequence[RankRecord],
    union: RankRecord | None,
    split: RankRecord | None = None,
    joined: RankRecord | None = None,
) -> list[Finding]:
    """Returns what the ranks' numbers tell, compared with each other and with one process.

    ``union``: of the pass of one process; None where there is none. ``split``, ``joined``: of further passes of one
    process, which split rows in each module and join the graphs of collectives, where they were run.
    """
    own = [*held.findings(ranks), *restart.findings(ranks), *beginnings.findings(ranks, union)]
    if union is None:
        return [*own, *accumulation.findings(ranks[0])]
    own += [*gathers.findings(union, joined), *accumulation.findings(union)]
    # what begins or goes on with other weights also has other gradients, and says nothing more
    until = [f.step for f in own if f.name in ("different_beginnings", "loaded_weights") and f.step is not None]
    return [*own, *with_union.findings(ranks, union, split, min(until, default=None))]
