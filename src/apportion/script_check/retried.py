"""Runs a pass again where another program has taken the port that was chosen for it before the ranks opened it."""

from __future__ import annotations

from apportion.script_check.feed import Feed
from apportion.script_check.passes import Conditions, PassResult, run_pass
from apportion.script_check.script import Script

ATTEMPTS = 3


def run_until_port_is_free(
    name: str, script: Script, ranks: int, conditions: Conditions, feed: Feed | None = None
) -> PassResult:
    """Run a pass as ``run_pass`` does, at most ``ATTEMPTS`` times."""
    passed = run_pass(name, script, ranks, conditions, feed)
    for attempt in range(2, ATTEMPTS + 1):
        if not port_was_taken(passed):
            break
        passed = run_pass(f"{name}-{attempt}", script, ranks, conditions, feed)
    return passed


def port_was_taken(passed: PassResult) -> bool:
    """Whether a rank failed as it could not listen on the port of its group."""
    return any(
        record.outcome is not None
        and record.outcome["how"] == "raised"
        and ("EADDRINUSE" in str(record.outcome["message"]) or "failed to listen" in str(record.outcome["message"]))
        for record in passed.records
    )
