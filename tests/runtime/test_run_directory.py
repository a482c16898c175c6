"""A run directory has one writer, and whatever it holds is either what apportion wrote or refused by a sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
from conftest import Eventually
from torch import nn

from apportion.api.train import train
from apportion.core.strategy import State
from apportion.errors import CheckpointError
from apportion.reporting.journal import read_events
from apportion.runtime.checkpoint import durable_files, run_directory
from apportion.runtime.checkpoint import single_writer as single_writer_module
from apportion.runtime.checkpoint.load import load
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.checkpoint.single_writer import LOCK, single_writer
from apportion.runtime.launch.local import Local

PROGRAM = Path(sys.executable).with_name("apportion")
WORKLOADS = Path(__file__).parents[1] / "helpers" / "fault_workloads.py"
SECONDS = 60.0


# One writer


def start(folder: Path, *more: str) -> psutil.Popen:
    return psutil.Popen(
        [sys.executable, PROGRAM, "train", f"{WORKLOADS}:good", "--strategy", "single_device", *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "FAULT_PACE": "0.05"},
    )


@pytest.fixture
def trainer(tmp_path: Path, eventually: Eventually) -> Iterator[psutil.Popen]:
    process = start(tmp_path, "--run-dir", "run")
    there = (tmp_path / "run" / "run.json").exists
    eventually(lambda: there() or process.poll() is not None, within=SECONDS, what="the run")
    assert there(), process.stderr.read()
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.processes
@pytest.mark.thorough
def test_the_second_trainer_of_a_run_directory_is_refused_until_the_first_has_ended(
    trainer: psutil.Popen, tmp_path: Path, eventually: Eventually
) -> None:
    second = start(tmp_path, "--run-dir", "run", "--seed", "7")
    _, err = second.communicate(timeout=SECONDS)
    assert second.returncode == 2
    assert [line for line in err.splitlines() if line.startswith("error")] == [
        f"error: {tmp_path / 'run'} is being written by another training (process {trainer.pid}): wait for its end, or "
        "give each run its own --run-dir"
    ]
    assert trainer.poll() is None
    workers = trainer.children(recursive=True)
    trainer.kill()  # which lets go of the lock
    trainer.wait()
    psutil.wait_procs(workers, timeout=5)
    with single_writer(tmp_path / "run"):
        pass


def test_a_run_directory_is_taken_and_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with single_writer(folder):
        with pytest.raises(ValueError, match=rf"another training \(process {os.getpid()}\)"), single_writer(folder):
            pass
        assert folder.is_dir()
    assert not (tmp_path / "runs").exists()  # what was made for nothing is gone
    with single_writer(folder):
        (folder / "run.json").write_text("{}")
    assert sorted(os.listdir(folder)) == [LOCK, "run.json"]
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="it is a symbolic link"), single_writer(folder):
        pass
    assert not (tmp_path / "elsewhere").exists()


def taken(folder: Path, number: int) -> str:
    """What becomes of whoever takes a folder and is interrupted before a line of the code that opens and locks it,
    counted from the first one."""
    before, left = sys.gettrace(), number
    code = (single_writer_module.__file__, durable_files.__file__)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in code:
            return None
        left -= event == "line"
        if not left:
            sys.settrace(before)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with single_writer(folder):
            sys.settrace(before)
            return "taken"
    except KeyboardInterrupt:
        return "interrupted"
    except ValueError:
        return "refused"
    finally:
        sys.settrace(before)


def test_ctrl_c_at_any_line_leaves_no_folder_and_no_lock(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    for number in count(1):
        found = taken(folder, number)
        assert not (tmp_path / "runs").exists(), f"interrupted before line {number}"
        if found == "taken":
            break
    assert number > 15


def test_ctrl_c_before_another_training_has_refused_leaves_the_lock_with_that_one(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with single_writer(folder):
        for number in count(1):
            found = taken(folder, number)
            with pytest.raises(ValueError, match="another training"), single_writer(folder):
                pass
            if found == "refused":
                break
    assert number > 10


def test_who_comes_second_to_a_new_folder_leaves_it_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of two found the folder, and the other one has made and locked it meanwhile."""
    folder, original = tmp_path / "a", single_writer_module._open_locked
    with ExitStack() as first:

        def later(*arguments: Any) -> None:
            monkeypatch.undo()
            first.enter_context(single_writer(folder))
            original(*arguments)

        monkeypatch.setattr(single_writer_module, "_open_locked", later)
        with pytest.raises(ValueError, match="another training"), single_writer(folder):
            pass
        assert os.listdir(folder) == [LOCK]
    assert not folder.exists()


@pytest.mark.processes
def test_a_run_goes_on_only_with_its_own_seed(tmp_path: Path) -> None:
    one = Local(workers=1, threads=1)
    train(f"{WORKLOADS}:good", "single_device", launcher=one, run_dir=tmp_path / "run", steps=2)
    with pytest.raises(ValueError, match="seed was 0 and is 7"):
        train(f"{WORKLOADS}:good", launcher=one, run_dir=tmp_path / "run", resume=True, seed=7)


# What it holds


@pytest.fixture
def kept(tmp_path: Path) -> RunDirectory:
    """Of two steps."""
    return made(tmp_path / "run", seed=0)


def made(folder: Path, seed: int) -> RunDirectory:
    run = RunDirectory(folder)
    run.start({"address": None, "strategy": "single_device", "fingerprint": {"seed": seed, "batch_size": 4}})
    for number in (1, 2):
        torch.manual_seed(seed + number)
        state = State(
            step=number, model=dict(nn.Linear(3, 2).state_dict()), optimizer={"sgd": torch.ones(2)}, settings={"a": 1}
        )
        run.save(state, epoch=0.0, strategy="single_device", keep=9)
    return run


def asked(run: RunDirectory) -> None:
    """Everything that reads it, where what it says is refused."""
    with pytest.raises((CheckpointError, ValueError)) as told:
        load(run.path, model=lambda: nn.Linear(3, 2))
    assert not isinstance(told.value, UnicodeError | json.JSONDecodeError)
    assert str(run.path) in str(told.value)
    with pytest.raises((CheckpointError, ValueError)) as told:
        run.resume({"seed": 0, "batch_size": 4})
    assert str(run.path) in str(told.value)
    run.best()


DEEP = "[" * 200_000 + "]" * 200_000
RUN_JSON: dict[str, Any] = {
    "deep": DEEP, "empty": "", "truncated": '{"address": nul', "binary": b"\xff\xfe\x00\x01", "a list": "[]",
    "a number": "1", "not in UTF-8": b'{"address": "\xff"}',
    **{
        f"{name} {n}": json.dumps({"fingerprint": {"seed": 0}, name: value})
        for name, values in {
            "fingerprint": ([], [["seed", 0]], "x", None, {"seed": "0"}, {"seed": [0]}, {"seed": 1e9}, {"seed": 2**70}),
            "address": (3, [], {}, "a\0b:c", "\ud800:x"), "cwd": (None, 7, "\0"), "strategy": (None, ["x"]),
            "source": ([], "x", {"file": 3, "sha256": "x"}), "factory": ([], {"file": "x", "sha256": "y"}),
        }.items()
        for n, value in enumerate(values)
    },
}  # fmt: skip


@pytest.mark.parametrize("content", RUN_JSON.values(), ids=RUN_JSON)
def test_a_run_json_that_is_none_is_refused_by_a_sentence(kept: RunDirectory, content: str | bytes) -> None:
    (kept.path / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    asked(kept)


def reseal(run: RunDirectory, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the newest state.json as someone does who knows the format."""
    path = run.checkpoints / "latest" / "state.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    change(manifest)
    path.write_text(json.dumps(run_directory._sealed(manifest)))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "step -5": lambda m: m.update(step=-5), "step 10^30": lambda m: m.update(step=10**30),
    "step of another": lambda m: m.update(step=1), "step true": lambda m: m.update(step=True),
    "no step": lambda m: m.pop("step"), "no files": lambda m: m.update(files={}),
    "files a list": lambda m: m.update(files=[1]), "settings a list": lambda m: m.update(settings=[]),
    "file outside": lambda m: m["files"].update({"../../../x": m["files"]["model.safetensors"]}),
    "file unknown": lambda m: m["files"].update({"step.safetensors": m["files"]["model.safetensors"]}),
    "entry a list": lambda m: m["files"].update({"model.safetensors": [1]}),
    "bytes text": lambda m: m["files"]["model.safetensors"].update(bytes="1"),
    "of another run": lambda m: m.update(run="0" * 64),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_json_that_is_sealed_again_is_refused_by_a_sentence(
    kept: RunDirectory, change: Callable[[dict[str, Any]], object]
) -> None:
    reseal(kept, change)
    asked(kept)


@pytest.mark.parametrize("content", [DEEP.encode(), b"", b"\x00\xff", b"[]", b"{}", b'{"format": 1}', b"nul"])
def test_a_state_json_that_is_none_is_refused_by_a_sentence(kept: RunDirectory, content: bytes) -> None:
    (kept.checkpoints / "latest" / "state.json").write_bytes(content)
    asked(kept)


def test_a_checkpoint_of_another_run_is_refused(kept: RunDirectory, tmp_path: Path) -> None:
    other = made(tmp_path / "other", seed=7)
    shutil.rmtree(kept.checkpoints / "step-00000002")
    shutil.copytree(other.checkpoints / "step-00000002", kept.checkpoints / "step-00000002")
    asked(kept)
    other.resume({"seed": 7, "batch_size": 4})


@pytest.mark.parametrize("to", ["../../elsewhere", "/", "..", ".", "step-1", "latest"])
def test_a_link_out_of_the_checkpoints_is_refused(kept: RunDirectory, to: str) -> None:
    (kept.checkpoints / "latest").unlink()
    (kept.checkpoints / "latest").symlink_to(to)
    with pytest.raises(CheckpointError, match="is not a checkpoint of this run: remove the link"):
        load(kept.path, model=lambda: nn.Linear(3, 2))


@pytest.mark.parametrize("notes", [None, {}, {"apportion": DEEP}, {"apportion": "[]"}, {"apportion": "{}"}])
def test_tensors_with_notes_of_somebody_else_are_refused_by_a_sentence(kept: RunDirectory, notes: Any) -> None:
    from safetensors.torch import save_file

    file = kept.checkpoints / "latest" / "model.safetensors"
    save_file(dict(nn.Linear(3, 2).state_dict()), file, notes)
    reseal(kept, lambda m: m["files"].update({"model.safetensors": run_directory._describe(file)}))
    asked(kept)


def test_run_json_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="could not be written"):
        made(tmp_path / "run", seed=0)
    assert (tmp_path / "precious").read_text() == "precious"


EVENTS = [
    b"[" * 100_000 + b"]" * 100_000, b"null", b'{"data": []}',
    b'{"time":1,"kind":"step","step":"x","epoch":0,"seconds":0,"data":{}}',
    b'{"time":1,"kind":["step"],"step":1,"epoch":0,"seconds":0,"data":{}}',
    b'{"time":1,"kind":"step","step":1,"epoch":0,"seconds":[],"data":{}}',
    b'{"time":1,"kind":"step","step":1,"epoch":0,"seconds":0,"data":[]}',
]  # fmt: skip


@pytest.mark.parametrize("line", EVENTS, ids=range(len(EVENTS)))
def test_a_line_that_is_no_event_is_refused_with_its_number(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "events.jsonl").write_bytes(line + b"\n")
    with pytest.raises(CheckpointError, match="line 1 is not an event"):
        read_events(tmp_path)
