"""How long each test takes: one line a test in a file, and the longest test files at the end of what pytest prints.

``APPORTION_DURATIONS`` names the file; without it nothing is kept.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

VARIABLE = "APPORTION_DURATIONS"
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
        slowest = sorted(self._tests.items(), key=lambda item: (-item[1].total, item[0]))
        lines = [COLUMNS, *(self._line(file, test, found) for (file, test), found in slowest)]
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


def register(config: pytest.Config) -> None:
    """Keep the durations of this run of the tests, where the environment asks for it."""
    path = os.environ.get(VARIABLE)
    if path:
        config.pluginmanager.register(Durations(Path(path)), "durations-of-all-tests")
