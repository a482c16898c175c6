"""A pass over a script, where its records cannot be written and where its ranks leave none."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion.errors import ApportionError
from apportion.script_check import passes
from apportion.script_check.failures import unusable
from apportion.script_check.passes import Conditions, run_pass
from apportion.script_check.script import Script

pytestmark = pytest.mark.processes
FULL = """
import os
for name in os.listdir("/proc/self/fd"):
    if os.path.realpath(f"/proc/self/fd/{name}").endswith(".pkl"):
        os.dup2(os.open("/dev/full", os.O_WRONLY), int(name))
try:
    import torch
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.sum().backward()
    optimizer.step()
except Exception:
    pass
"""
"""A script whose record is on a disk that is full, and which catches what its steps raise."""


def test_a_disk_that_takes_no_records_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FULL)
    with pytest.raises(ApportionError, match=r"rank 0 could not write its record.* set TMPDIR"):
        run_pass("ranks", Script(str(tmp_path / "train.py")), 1, Conditions(tmp_path / "check"))


def test_a_rank_that_dies_before_it_records_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(passes, "_environment", lambda *_: {"PYTHONHOME": "/nowhere"})  # Python ends at once
    passed = run_pass("ranks", Script(str(tmp_path / "train.py")), 2, Conditions(tmp_path / "check"))
    assert [record.rank for record in passed.failed] == [0, 1]
    assert "failed on rank 0: its process died" in str(unusable(passed, 2))


@pytest.mark.parametrize(("status", "how"), [(0, "ended"), (3, "exited")])
def test_a_script_that_leaves_without_an_exit_has_ended(tmp_path: Path, status: int, how: str) -> None:
    forked = "import os\npid = os.fork()\nif not pid:\n    os._exit(0)\nos.waitpid(pid, 0)\n"
    (tmp_path / "train.py").write_text(f"{forked}print('left')\nos._exit({status})\n")
    passed = run_pass("ranks", Script(str(tmp_path / "train.py")), 1, Conditions(tmp_path / "check"))
    assert passed.outputs == ["left\n"]
    assert passed.records[0].outcome is not None
    assert (passed.records[0].outcome["how"], passed.waited.how) == (how, "ended")
