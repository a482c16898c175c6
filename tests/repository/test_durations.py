"""The file of durations: every test once, its phases and its outcome, the slowest first."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import durations
import pytest

HERE = Path(__file__).parents[1] / "helpers"
TESTS = """
import os
import time
import pytest

def test_ends_its_process():
    os._exit(1)

@pytest.mark.parametrize("value", ["a\\tb", "c"])
def test_passes(value):
    pass

def test_fails():
    time.sleep(0.2)
    assert False

@pytest.fixture
def broken():
    raise RuntimeError("no")

def test_has_a_broken_fixture(broken):
    pass

@pytest.mark.skip(reason="not here")
def test_is_skipped():
    pass
"""


@pytest.mark.processes
@pytest.mark.thorough
def test_every_test_is_one_line_with_its_phases_and_outcome_the_slowest_first(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("import durations\n\npytest_configure = durations.register\n")
    kept = tmp_path / "artefacts" / "durations.tsv"
    environment = {**os.environ, durations.VARIABLE: str(kept), "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_some.py"]
    done = subprocess.run(
        [*command, "-n", "1"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    head, *lines = [line.split("\t") for line in kept.read_text().splitlines()]
    assert tuple(head) == durations.COLUMNS
    assert all(len(line) == len(head) for line in lines)
    assert {line[1]: line[-1] for line in lines} == {
        "test_ends_its_process": "failed",
        "test_fails": "failed",
        "test_has_a_broken_fixture": "error",
        "test_is_skipped": "skipped",
        "test_passes[a\\tb]": "passed",
        "test_passes[c]": "passed",
    }
    totals = [float(line[5]) for line in lines]
    assert totals == sorted(totals, reverse=True)
    assert lines[0][1] == "test_fails"
    assert float(lines[0][3]) >= 0.2
    assert "6 tests" in done.stdout
    assert "test_some.py" in done.stdout.partition("seconds of each file")[2]


def test_without_the_variable_nothing_is_kept(monkeypatch, pytestconfig) -> None:
    monkeypatch.delenv(durations.VARIABLE, raising=False)
    before = pytestconfig.pluginmanager.get_plugins()
    durations.register(pytestconfig)
    assert pytestconfig.pluginmanager.get_plugins() == before


@pytest.mark.processes
@pytest.mark.parametrize(("slower", "outcome"), [(1, "1 failed"), (50, "1 passed")])
def test_a_slower_machine_has_more_time_for_a_test(tmp_path: Path, slower: int, outcome: str) -> None:
    (tmp_path / "test_some.py").write_text("import time\n\ndef test_takes_long():\n    time.sleep(0.2)\n")
    conftest = f"""
        import durations
        durations.OTHERS = float("inf")  # whatever else runs beside this test
        durations.yardstick = lambda: {slower} * durations.YARDSTICK
        pytest_configure = durations.register
    """
    (tmp_path / "conftest.py").write_text(textwrap.dedent(conftest))
    environment = {**os.environ, durations.LONGEST: "0.05", "PYTHONPATH": str(HERE)}
    environment.pop(durations.VARIABLE, None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_some.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert outcome in done.stdout
    assert ("make it shorter or mark it slow" in done.stdout) == (slower == 1)


@pytest.mark.processes
@pytest.mark.thorough
def test_the_yardstick_of_this_machine_is_measured() -> None:
    assert 0.3 < durations.yardstick(times=1) < 60, "it imports torch, and is no fork of a process that has"
