"""What is left of a sandbox that has ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from apportion.script_check.sandbox.sandbox import Command, Sandbox
from apportion.script_check.sandbox.scope import FileScope


@pytest.mark.processes
def test_what_was_recorded_in_a_sandbox_is_there_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed where the process that has started the sandbox dies, and else it is read."""
    project, home, folder = (tmp_path / name for name in ("project", "home", "check"))
    records = folder / "records"
    for path in (project, home, records):
        path.mkdir(parents=True)
    monkeypatch.chdir(project)
    scope, output = FileScope(str(project), str(project), str(home), ("/tmp",)), records / "output"
    with Sandbox(scope, records, folder, "hook") as sandbox:
        (rank,) = sandbox.start([Command([sys.executable, "-m", "this"], os.environ, output)])
        assert rank.wait(60) == 0
    assert "Beautiful is better than ugly." in output.read_text()
