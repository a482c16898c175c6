"""Who may write a run directory: one start of a run, and in it rank 0 of the newest generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.core.strategy import State
from apportion.errors import CheckpointError, Superseded
from apportion.runtime.checkpoint.async_writer import Saver
from apportion.runtime.checkpoint.run_directory import RunDirectory


def state(step: int) -> State:
    return State(step=step, model={"weight": torch.full((2,), float(step))}, optimizer={}, settings={})


def save(directory: RunDirectory, step: int) -> None:
    directory.save(state(step), epoch=0.0, strategy="data_parallel", keep=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    RunDirectory(tmp_path / "run").start({"fingerprint": {"seed": 0}})
    return tmp_path / "run"


def term(path: Path) -> Any:
    return json.loads((path / "run.json").read_text()).get("term")


def begun(path: Path, start: str, generation: int = 0) -> RunDirectory:
    directory = RunDirectory(path)
    directory.claim(start, generation)
    return directory


def test_each_start_takes_a_higher_term_in_run_json(path: Path) -> None:
    assert term(path) is None
    begun(path, "a")
    assert term(path) == {"number": 1, "start": "a", "generation": 0}
    begun(path, "b")
    assert term(path) == {"number": 2, "start": "b", "generation": 0}
    assert RunDirectory(path).read_run()["fingerprint"] == {"seed": 0}


def test_a_start_that_was_overtaken_writes_nothing_more(path: Path) -> None:
    old = begun(path, "a")
    save(old, 1)
    new = begun(path, "b")
    with pytest.raises(Superseded, match=r"started again elsewhere \(that start has term 2, and this one 1\)"):
        save(old, 2)
    assert new.steps() == [1]
    save(new, 2)
    assert new.steps() == [1, 2]
    with pytest.raises(Superseded):
        old.claim("a", 2)


def test_rank_0_of_an_older_generation_writes_nothing_more(path: Path) -> None:
    old = begun(path, "a")
    save(old, 3)
    new = begun(path, "a", 2)
    assert term(path) == {"number": 1, "start": "a", "generation": 2}
    save(new, 6)
    with pytest.raises(Superseded, match="the others go on without this rank"):
        save(old, 4)
    assert new.restore().step == 6


def test_a_run_on_one_host_has_no_term(path: Path) -> None:
    directory = RunDirectory(path)
    save(directory, 1)
    assert term(path) is None


def test_the_run_ends_with_the_next_checkpoint_after_it_was_overtaken(path: Path) -> None:
    saver = Saver(begun(path, "a"), 2, "data_parallel")
    begun(path, "b")
    saver.submit(state(1), 0.0, best=False, seconds=0.0)
    saver.flush()
    with pytest.raises(Superseded):
        saver.submit(state(2), 0.0, best=False, seconds=0.0)
    saver.finish()
    assert RunDirectory(path).steps() == []


def test_a_term_that_is_none_is_refused(path: Path) -> None:
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**run, "term": {"number": -1}}))
    with pytest.raises(CheckpointError, match=r"its term is .* and must be an object with number, start"):
        begun(path, "a")
