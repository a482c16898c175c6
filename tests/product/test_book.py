"""Every row of docs/book.md prints what it says, in less than a minute."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (\d+) \| ([^|]+) \|[^|]*\| `([^`]+)` \| `([^`]+)` \|$",
    (ROOT / "docs" / "book.md").read_text(),
    re.MULTILINE,
)
SECONDS = 60
BY_DAY = {"4", "17"}
"""The rows that take least."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "pyproject.toml").touch()
    return folder


def test_the_rows_are_numbered_and_there_are_enough_of_them() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) >= 27
    assert len({term for _, term, *_ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        pytest.param(command, printed, id=number, marks=[] if number in BY_DAY else pytest.mark.slow)
        for number, _, command, printed in ROWS
    ],
)
def test_a_row_prints_what_it_says(command: str, printed: str, clone: Path) -> None:
    began = time.monotonic()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        command, shell=True, cwd=clone, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=110
    )
    assert printed in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == (1 if "digits_ddp" in command else 0), ran.stderr
    assert time.monotonic() - began < SECONDS or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
