"""``apportion check FILE:NAME --strategy S``: the proof of a strategy, as a command."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

import apportion
from apportion.cli.begin import begin
from apportion.cli.failures import NO
from apportion.cli.launchers import is_first, launcher_of

STEPS = 8
"""The updates after which a proof compares where their number is not given."""


def check_strategy_command(
    workload: str, strategy: str, steps: int | None, where: tuple[str | None, int | None, str | None], as_json: bool
) -> int:
    """Prove a strategy, print the proof, and return the exit status. ``where``: launcher, workers and hosts."""
    launcher, workers, hosts = where
    begin(workload, [strategy], launcher, hosts)
    from apportion.cli.tables import show_proof

    place = launcher_of(launcher, workers, hosts)
    proof = apportion.check(workload, strategy, steps=STEPS if steps is None else steps, launcher=place)
    if not is_first(launcher):
        pass
    elif as_json:
        click.echo(json.dumps({"holds": proof.holds, **asdict(proof)}, indent=1, default=str))
    else:
        show_proof(proof)
    return 0 if proof.holds else NO
