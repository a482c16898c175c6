"""How long each test takes: one line a test in a file, and the longest test files at the end of what pytest prints.

``APPORTION_DURATIONS`` names the file; without it nothing is kept. A later run adds its tests to those of the file.
``APPORTION_LONGEST`` is the number of seconds that a test may take on the machine of reference when it has nothing else
to do: one that takes longer fails. A slower machine has as much more time as it takes longer for the yardstick, which
is two processes that import torch. ``python durations.py FILE SECONDS`` prints the tests of the file that took longer
than so many seconds of the machine of reference.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

VARIABLE = "APPORTION_DURATIONS"
LONGEST = "APPORTION_LONGEST"
OTHERS = 0.2
"""The share of the processors that other programs may have while a test is timed: above it the time says nothing."""
YARDSTICK = 1.5
"""Seconds that the yardstick takes on the machine of reference, which has two cores."""
_start_cold = subprocess.Popen
"""Kept from before programs of the tests are forked from a warm Python."""
PHASES = ("setup", "call", "teardown")
COLUMNS = ("file", "test", *PHASES, "total", "outcome")
_WORST = ("passed", "skipped", "failed", "error")
"""The outcome of a test is the worst outcome of its phases."""


@dataclass
class _Test:
    """What is known of one test: the seconds of its phases, and its outcome so far."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    outcome: str = "passed"

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def take(self, phase: str, seconds: float, outcome: str) -> None:
        if phase not in PHASES:  # the process that ran it has ended, in which phase pytest-xdist cannot say
            phase = "call"
        if outcome == "failed" and phase != "call":
            outcome = "error"
        self.seconds[phase] += seconds
        self.outcome = max(self.outcome, outcome, key=_WORST.index)


class Durations:
    """The plugin: gathers the durations while the tests run, and writes them to the file at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[tuple[str, str], _Test] = defaultdict(_Test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.partition("::")
        self._tests[file, test].take(str(report.when), report.duration, report.outcome)

    def pytest_sessionfinish(self) -> None:
        """The slowest test comes first."""
        new = [self._line(file, test, found) for (file, test), found in self._tests.items()]
        names = {line[:2] for line in new}
        old = [line for line in read(self._path) if line[:2] not in names]
        lines = [COLUMNS, *sorted([*old, *new], key=lambda line: (-float(line[5]), line[:2]))]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")

    def _line(self, file: str, test: str, found: _Test) -> tuple[str, ...]:
        name = test.replace("\t", " ").replace("\n", " ")  # a parameter may hold either
        phases = (f"{found.seconds[phase]:.3f}" for phase in PHASES)
        return file, name, *phases, f"{found.total:.3f}", found.outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The seconds of each test file, the slowest file first."""
        files: dict[str, list[_Test]] = defaultdict(list)
        for (file, _), found in self._tests.items():
            files[file].append(found)
        terminalreporter.section(f"seconds of each file (of each test: {self._path})")
        for file, tests in sorted(files.items(), key=lambda item: -sum(t.total for t in item[1])):
            longest = max(t.total for t in tests)
            terminalreporter.write_line(
                f"{sum(t.total for t in tests):8.1f} s  {len(tests):4} tests, the longest {longest:5.1f} s  {file}"
            )


class Longest:
    """The plugin that fails a test which takes longer than ``seconds`` though nothing else keeps the machine busy."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        began, others = time.monotonic(), _spent_by_others()
        yield
        took = time.monotonic() - began
        share = (_spent_by_others() - others) / took / (os.cpu_count() or 1)
        if took <= self._seconds or share > OTHERS:
            return
        slower = slowness()
        if took > self._seconds * slower:
            pytest.fail(
                f"took {took:.1f} s: a test that is not marked slow may take {self._seconds:g} s on the machine of "
                f"reference, than which this one is {slower:.1f} times as slow; make it shorter or mark it slow",
                pytrace=False,
            )


def slowness() -> float:
    """Returns how much longer the yardstick takes here than on the machine of reference, from 1."""
    return max(1.0, yardstick() / YARDSTICK)


def yardstick(times: int = 3) -> float:
    """Returns the seconds that two processes that import torch at once take on this machine, at best."""
    return min(_import_torch_twice() for _ in range(times))


def _import_torch_twice() -> float:
    began = time.monotonic()
    processes = [_start_cold([sys.executable, "-c", "import torch"]) for _ in range(2)]
    for process in processes:
        process.wait(timeout=60)
    return time.monotonic() - began


def _spent_by_others() -> float:
    """Returns the processor seconds that processes other than this one and its descendants have spent."""
    times = psutil.cpu_times()
    ours = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            ours += sum(process.cpu_times()[:4])
    stolen = getattr(times, "steal", 0.0)  # by other virtual machines on the same host
    return sum(times[:3]) + stolen - ours


def read(path: Path) -> list[tuple[str, ...]]:
    """Returns the lines of a file of durations, without the columns' names; none where there is no such file."""
    if not path.exists():
        return []
    return [tuple(line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def register(config: pytest.Config) -> None:
    """Keeps the durations of this run of the tests, and holds each test to the longest, if the environment says so."""
    path, longest = os.environ.get(VARIABLE), os.environ.get(LONGEST)
    if path and not hasattr(config, "workerinput"):  # of several processes that run tests, the first hears of all
        config.pluginmanager.register(Durations(Path(path)), "durations-of-all-tests")
    if longest:
        config.pluginmanager.register(Longest(float(longest)), "longest-of-all-tests")


if __name__ == "__main__":
    allowed = float(sys.argv[2]) * slowness()
    for line in read(Path(sys.argv[1])):
        if float(line[3]) > allowed and line[-1] == "passed":
            print("::".join(line[:2]))
