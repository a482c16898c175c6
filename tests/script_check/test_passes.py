"""A pass over a script, where its records cannot be written and where its ranks leave none."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion.errors import ApportionError
from apportion.script_check import driver, passes
from apportion.script_check.driver import RanksPass, unusable, within_limit
from apportion.script_check.passes import Conditions, PassResult, run_pass
from apportion.script_check.record import RankRecord
from apportion.script_check.script import Script
from apportion.script_check.waiting import WaitOutcome

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


@pytest.mark.thorough
def test_a_disk_that_takes_no_records_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FULL)
    with pytest.raises(ApportionError, match=r"rank 0 could not write its record.* set TMPDIR"):
        run_pass("ranks", Script(str(tmp_path / "train.py")), 1, Conditions(tmp_path / "check"))


@pytest.mark.thorough
def test_a_disk_that_takes_no_records_of_the_second_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import sys\nif sys.argv[1:]:\n    exec({FULL!r})\n")
    script = Script(str(tmp_path / "train.py"), then=("--full",))
    with pytest.raises(ApportionError, match=r"rank 0 could not write its record"):
        run_pass("ranks", script, 1, Conditions(tmp_path / "check"))


def test_a_rank_that_dies_before_it_records_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(passes, "_environment", lambda *_: {"PYTHONHOME": "/nowhere"})  # Python ends at once
    passed = run_pass("ranks", Script(str(tmp_path / "train.py")), 2, Conditions(tmp_path / "check"))
    assert [record.rank for record in passed.failed] == [0, 1]
    assert "failed on rank 0: its process died" in str(unusable(passed, 2))


@pytest.mark.parametrize(("status", "how"), [(0, "ended"), pytest.param(3, "exited", marks=pytest.mark.thorough)])
def test_a_script_that_leaves_without_an_exit_has_ended(tmp_path: Path, status: int, how: str) -> None:
    forked = "import os\npid = os.fork()\nif not pid:\n    os._exit(0)\nos.waitpid(pid, 0)\n"
    (tmp_path / "train.py").write_text(f"{forked}print('left')\nos._exit({status})\n")
    passed = run_pass("ranks", Script(str(tmp_path / "train.py")), 1, Conditions(tmp_path / "check"))
    assert passed.outputs == ["left\n"]
    assert passed.records[0].outcome is not None
    assert (passed.records[0].outcome["how"], passed.waited.how) == (how, "ended")


def _inside_of_a_collective(rank: int, steps: int) -> RankRecord:
    made = ({"kind": "step", "step": number, "number": number, "optimizer": 0} for number in range(1, steps + 1))
    call = {
        "kind": "collective", "step": steps, "call": 0, "op": "all_reduce", "group": "all ranks", "ranks": (0, 1),
        "sequence": 0, "root": None, "inputs": [((1 + rank,), "float32")], "outputs": [], "names": [""],
        "gradient": [False], "pending": False, "site": "train.py:3", "line": "", "thread": 1, "time": 1.0,
    }  # fmt: skip
    return RankRecord(rank, (*made, call))


@pytest.mark.parametrize(("unrecorded", "hangs"), [(0.2, False), (20.0, True)])
def test_ranks_that_still_record_at_the_limit_do_not_wait_for_each_other(unrecorded: float, hangs: bool) -> None:
    records = [_inside_of_a_collective(rank, 7) for rank in range(2)]
    waited = WaitOutcome("limit", (0, 1), unrecorded=unrecorded)
    found = driver._hanging(PassResult(records, ["", ""], waited, 120.0), Script(__file__))
    assert (found is not None) == hangs


@pytest.mark.parametrize(("made", "steps"), [((13, 12), 4), ((1, 9), None)])
def test_a_script_with_slow_steps_runs_again_with_fewer(
    made: tuple[int, int], steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [_inside_of_a_collective(rank, made[rank]) for rank in range(2)]
    late = RanksPass(PassResult(records, ["", ""], WaitOutcome("limit", (0, 1)), 120.0), Conditions(tmp_path, steps=24))
    asked = list[int]()

    def again(name: str, script: Script, ranks: int, conditions: Conditions) -> PassResult:
        asked.append(conditions.steps)
        return PassResult(records, ["", ""], WaitOutcome("ended"), 40.0)

    monkeypatch.setattr(driver, "run_until_port_is_free", again)
    found = within_limit(late, Script("train.py"), 2)
    if steps is None:
        assert (asked, found) == ([], late)
    else:
        assert (asked, found.conditions.steps) == ([steps], steps)
        assert "made 12 of 24 steps in the time of one run, so 4 are compared" in found.about[-1]
