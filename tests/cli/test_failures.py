"""What the command line prints where something goes wrong."""

from __future__ import annotations

import signal

import click
import pytest

from apportion.cli.failures import INTERRUPTED, guarded


def test_what_an_interrupted_run_reports_names_flags_and_not_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    interrupt = KeyboardInterrupt()
    interrupt.add_note("interrupted; step 3 is saved; what followed is not (the disk is full; use run_dir= elsewhere)")
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(click.exceptions.Exit) as left, guarded():
            raise interrupt
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err.endswith("(the disk is full; use --run-dir elsewhere)\n")
