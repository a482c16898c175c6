"""The names on a command line are checked in milliseconds, before what a command needs is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from apportion.comm.network import launched_ranks
from apportion.runtime.spawn.template import template

_ELSEWHERE = re.compile(r"(ssh|slurm|ray)(\(|$)")
"""A launcher by which ranks are started on other hosts, and none here."""


def begin(
    workload: str | None,
    strategies: Sequence[str | None],
    launcher: str | None,
    hosts: str | None,
    policy: str | None = None,
) -> None:
    """Checks the names on the command line, which takes milliseconds, and then starts what workers are forked from: it
    imports torch while this process does. Raises ValueError for a name that is not there."""
    from apportion.core.place_names import check_place
    from apportion.core.value import check_written

    if workload is not None:
        check_place(workload)
    for strategy in strategies:
        if strategy is not None:
            check_written(strategy, "apportion.strategies")
    if policy is not None:
        from apportion.api.arguments import policy_of

        policy_of(policy)
    if launcher is not None:
        check_written(launcher, "apportion.runtime.launch")
    on_others = hosts is not None or (launcher is not None and _ELSEWHERE.match(launcher.strip()) is not None)
    launched = "WORLD_SIZE" in launched_ranks.given(os.environ)  # the ranks run already, and a proof may be remembered
    if not on_others and not launched:
        template()
