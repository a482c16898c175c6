"""Which ranks keep checkpoints, and whether a run directory is another host's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from apportion.runtime.checkpoint.validation import mark_of
from apportion.runtime.worker.training.restore import keepers


@pytest.mark.parametrize(
    ("hosts", "copies", "kept"),
    [
        ([0, 0, 1, 1], 1, [0]),
        ([0, 0, 1, 1], 2, [0, 2]),
        ([0, 0, 1, 1, 2], 3, [0, 2, 4]),
        ([0, 1, 2], 2, [0, 1]),
        ([0, 0], 2, [0]),
        ([2, 2, 0], 2, [0, 2]),  # the numbers are those that the hosts began with
    ],
)
def test_the_first_rank_of_each_of_the_first_hosts_keeps_the_checkpoints(
    hosts: list[int], copies: int, kept: list[int]
) -> None:
    assert keepers(hosts, copies) == kept


def test_a_run_directory_is_known_by_the_file_that_it_begins_with(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert mark_of(one) is None
    for folder in (one, other):
        folder.mkdir()
        (folder / "run.json").write_text("{}")
    linked = tmp_path / "linked"
    os.symlink(one, linked)
    assert mark_of(one) == mark_of(linked) != mark_of(other)
