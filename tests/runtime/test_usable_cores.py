"""How many cores and threads a process may use: its control groups of both versions, and OMP_NUM_THREADS."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion import process
from apportion.process import most_threads, usable_cores
from apportion.runtime.launch.local import Local

CASES = [
    ("0::/\n", {"cpu.max": "max 100000"}, 8),
    ("0::/\n", {"cpu.max": "300000 100000"}, 3),
    ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
    ("0::/a/b\n", {"a/cpu.max": "max 100000", "a/b/cpu.max": "150000 100000"}, 1),
    ("0::/a\n", {"a/cpu.max": "50000 100000"}, 1),
    ("0::/not/seen/here\n", {"cpu.max": "400000 100000"}, 4),
    ("4:cpu,cpuacct:/a\n0::/\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000",
                                  "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2),
    ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ("1:cpu:/\n0::/b\n", {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000",
                          "unified/b/cpu.max": "500000 100000"}, 5),
    ("2:memory:/a\n", {"memory/a/cpu.max": "100000 100000"}, 8),
    ("0::/../..\n", {"cpu.max": "700000 100000"}, 7),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "files", "cores"), CASES)
def test_the_smallest_quota_on_the_way_counts(
    groups: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    monkeypatch.setattr(process, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(process, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cores() == cores


@pytest.mark.parametrize(("text", "most"), [("4", 4), (" 2 ", 2), ("3,1", 3), ("0", None), ("", None), ("many", None)])
def test_the_environment_limits_the_threads_of_a_worker(
    text: str, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    monkeypatch.setattr("apportion.runtime.launch.local.usable_cores", lambda: 16)
    assert most_threads() == most
    assert Local().threads_each(1) == (most or 16)
    assert Local().threads_each(8) == min(2, most or 2)
    assert Local(threads=9).threads_each(1) == 9
