"""Runs one of several shards of the tests: ``APPORTION_SHARD=3/8 pytest -p shards``.

The tests of each file are spread over all shards by a hash of their names, so that a shard has as many of a file as
every other one, give or take one, and a test stays in its shard while others are added to other files. At the end it
says what it ran of each file, and what was skipped and why.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from hashlib import sha256

import pytest

VARIABLE = "APPORTION_SHARD"


def shard_of(text: str) -> tuple[int, int]:
    """Returns (3, 8) for "3/8": the third of eight shards. Raises ValueError for another text."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f'{VARIABLE}={text!r} must be a shard and the number of shards, like "3/8"')
    return int(match[1]), int(match[2])


def _hash(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def in_shard(names: Iterable[str], shard: int, shards: int) -> set[str]:
    """Returns the names of tests that belong to a shard, counted from 1."""
    files: dict[str, set[str]] = defaultdict(set)
    for name in names:
        files[name.partition("::")[0]].add(name)
    found = set()
    for file, tests in files.items():
        ordered = sorted(tests, key=lambda name: (_hash(name), name))
        found |= {name for at, name in enumerate(ordered) if (at + _hash(file)) % shards == shard - 1}
    return found


class Summary:
    """The plugin that says at the end what was run of each file, and what was skipped and why."""

    def __init__(self) -> None:
        self._files: dict[str, Counter[str]] = defaultdict(Counter)
        self._skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._files[report.nodeid.partition("::")[0]][report.outcome] += 1
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"what was run of each file (shard {os.environ.get(VARIABLE) or '1/1'})")
        for file, outcomes in sorted(self._files.items()):
            told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            terminalreporter.write_line(f"{file}: {told}")
        for reason, count in self._skipped.most_common():
            terminalreporter.write_line(f"skipped {count}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    try:
        shard_of(os.environ.get(VARIABLE) or "1/1")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(), "summary-of-the-shard")


@pytest.hookimpl(trylast=True)  # after those were left out that have another mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = in_shard((item.nodeid for item in items), *shard_of(os.environ.get(VARIABLE) or "1/1"))
    left_out = [item for item in items if item.nodeid not in wanted]
    items[:] = [item for item in items if item.nodeid in wanted]
    config.hook.pytest_deselected(items=left_out)
