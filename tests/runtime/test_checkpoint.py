"""Checkpoints: what is saved comes back bit for bit, and nothing that happens while saving loses what was there."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from apportion.core.fingerprint import check_fingerprint, fingerprint
from apportion.core.sampler import Sampler
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.errors import CheckpointError
from apportion.runtime.checkpoint import run_directory
from apportion.runtime.checkpoint.load import load
from apportion.runtime.checkpoint.run_directory import RunDirectory

torch.set_num_threads(1)

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex128, torch.complex64),
)


def state(step: int, value: float | None = None, rows: int = 8) -> State:
    """Every tensor filled with the value (the step's number), so that a mixture of two shows."""
    fill = float(step if value is None else value)
    return State(
        step=step,
        model={"weight": torch.full((rows, 16), fill), "running": torch.full((3,), fill)},
        optimizer={"weight/momentum_buffer": torch.full((rows, 16), fill)},
        carry={"0": torch.full((2, 4), fill)},
        settings={"value": fill},
    )


def values(found: State) -> set[float]:
    return {v for _, t in found.tensors() for v in t.unique().tolist()} | {found.settings["value"]}


def save(run: RunDirectory, given: State, *, keep: int = 100, best: bool = False) -> run_directory.Saved:
    return run.save(given, epoch=given.step / 10, strategy="single_device", keep=keep, best=best)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return (
        tensor.dtype,
        tuple(tensor.shape),
        bytes(plain.reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b"",
    )


def listing(run: RunDirectory) -> list[str]:
    """What a person sees in the folder, and every leftover."""
    return sorted(p.name for p in run.checkpoints.iterdir() if p.name != ".lock")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.start({"address": None, "strategy": "single_device", "launcher": "local", "fingerprint": {"seed": 0}})
    return made


# What is saved comes back.


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits (not-a-numbers too), any shape, as a whole tensor or as a view of one."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(torch.Size(shape).numel())
    raw = draw(st.binary(min_size=2 * count * dtype.itemsize, max_size=2 * count * dtype.itemsize))
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = torch.frombuffer(bytearray(b & 1 for b in raw) if dtype == torch.bool else bytearray(raw), dtype=dtype)
    whole = data.reshape(2, *shape)
    look = draw(st.sampled_from(("own", "view", "transposed", "conjugated")))
    if look == "own":
        return whole[0].clone()
    if look == "conjugated" and dtype.is_complex:
        return whole[1].conj()
    return whole[1].movedim(0, -1) if look == "transposed" and shape else whole[1]


@settings(max_examples=60, deadline=None)
@given(model=st.dictionaries(st.text(min_size=1), tensors(), max_size=4), optimizer=st.lists(tensors(), max_size=2))
@pytest.mark.thorough
def test_any_state_comes_back_bit_for_bit(model: dict[str, Tensor], optimizer: list[Tensor]) -> None:
    given_state = State(
        step=7,
        model=model,
        optimizer={f"weight/slot{i}": t for i, t in enumerate(optimizer)},
        settings={"groups": [{"lr": 0.1, "betas": [0.9, 0.999], "maximize": False, "name": None}], "scale": 65536},
    )
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(folder)
        save(run, given_state)
        found = run.restore()
        assert sorted(p.name for p in (run.checkpoints / "latest").iterdir()) == [
            "model.safetensors",
            "optimizer.safetensors",
            "state.json",
        ]
    assert (found.step, found.settings) == (7, given_state.settings)
    assert [(name, bits(t)) for name, t in found.tensors()] == [(name, bits(t)) for name, t in given_state.tensors()]


def test_tied_weights_are_stored_once_and_come_back_tied(run: RunDirectory) -> None:
    weight = torch.randn(100, 100)
    tied = {"embedding.weight": weight, "norm.weight": torch.ones(100), "decoder.weight": weight.view(100, 100)}
    saved = save(run, State(step=1, model=tied))
    assert saved.bytes < 1.5 * weight.nbytes
    found = run.restore()
    assert list(found.model) == list(tied)
    assert found.model["decoder.weight"] is found.model["embedding.weight"]
    assert torch.equal(found.model["decoder.weight"], weight)
    again = save(run, State(step=2, model=found.model)).path / "model.safetensors"
    assert again.read_bytes() == (saved.path / "model.safetensors").read_bytes()


def test_views_that_overlap_come_back_apart(run: RunDirectory) -> None:
    flat = torch.arange(100.0)
    views = {"first": flat[:60], "second": flat[40:], "transposed": flat[:60].view(6, 10).T, "one": flat[50]}
    save(run, State(step=1, model=views))
    found = run.restore().model
    assert all(torch.equal(found[name], views[name]) for name in views)
    found["first"].zero_()
    assert torch.equal(found["second"], views["second"])


def test_other_looks_at_the_same_memory_are_not_taken_for_ties(run: RunDirectory) -> None:
    square, wave = torch.randn(4, 4), torch.randn(4, dtype=torch.complex64)
    looks = {
        "square": square,
        "transposed": square.T,
        "bits": square.view(torch.int32),
        "wave": wave,
        "conjugated": wave.conj(),
    }
    save(run, State(step=1, model=looks))
    found = run.restore().model
    assert [(name, bits(t)) for name, t in found.items()] == [(name, bits(t)) for name, t in looks.items()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_come_back_on_the_cpu(run: RunDirectory) -> None:
    weight = torch.randn(5, 5, device="cuda")
    save(run, State(step=1, model={"a": weight, "b": weight, "c": weight.T}))
    found = run.restore().model
    assert all(t.device.type == "cpu" for t in found.values())
    assert found["a"] is found["b"]
    assert torch.equal(found["c"], weight.T.cpu())


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.zeros(3, dtype=torch.float8_e8m0fnu)],
    ids=["sparse", "meta", "rare"],
)
def test_a_tensor_that_cannot_be_held_is_refused_by_name(run: RunDirectory, tensor: Tensor) -> None:
    with pytest.raises(ValueError, match=r"optimizer/weight/slot is a torch\..*keep it dense"):
        save(run, State(step=1, model={}, optimizer={"weight/slot": tensor}))
    assert run.steps() == []


def test_settings_come_back_as_json_or_are_refused_by_name(run: RunDirectory) -> None:
    save(run, State(step=1, model={}, settings={"betas": (0.9, 0.95), "best": float("inf")}))
    assert run.restore().settings == {"betas": [0.9, 0.95], "best": float("inf")}
    for value in (torch.tensor(0.1), {5: 2}, len):
        with pytest.raises(ValueError, match=r"settings/schedule/1=.* must be plain JSON"):
            save(run, State(step=2, model={}, settings={"schedule": [0, value]}))
    assert run.steps() == [1]


# Which checkpoints there are.


def test_the_newest_are_kept_with_what_the_links_point_at(run: RunDirectory) -> None:
    for step in range(10, 70, 10):
        saved = save(run, state(step), keep=2, best=step == 20)
    assert listing(run) == ["best", "latest", "step-00000020", "step-00000050", "step-00000060"]
    assert os.readlink(run.checkpoints / "latest") == "step-00000060"
    assert os.readlink(run.checkpoints / "best") == "step-00000020"
    assert saved.path == run.checkpoints / "step-00000060"
    assert saved.bytes == sum(p.stat().st_size for p in saved.path.iterdir())
    assert [values(run.restore(which)) for which in ("latest", "best", 50)] == [{60.0}, {20.0}, {50.0}]
    save(run, state(70), keep=1, best=True)
    assert listing(run) == ["best", "latest", "step-00000070"]


def test_state_json_tells_what_a_person_wants_to_know(run: RunDirectory) -> None:
    told = json.loads((save(run, state(120)).path / "state.json").read_text())
    assert (told["format"], told["step"], told["epoch"], told["strategy"]) == (1, 120, 12.0, "single_device")
    assert sorted(told["files"]) == ["carry.safetensors", "model.safetensors", "optimizer.safetensors"]


def test_a_history_that_was_given_up_is_not_kept_in_place_of_the_new_one(run: RunDirectory) -> None:
    for step in (10, 20, 30):
        save(run, state(step))
    save(run, state(15), keep=2)
    assert run.steps() == [10, 15]


def test_saving_a_step_again_keeps_an_equal_one_and_replaces_another(run: RunDirectory) -> None:
    first = save(run, state(5), keep=1).path
    inode = first.stat().st_ino
    save(run, state(5), keep=1, best=True)
    assert first.stat().st_ino == inode
    assert os.readlink(run.checkpoints / "best") == "step-00000005"
    save(run, state(5, value=6), keep=1)
    assert values(run.restore(5)) == {6.0}
    flip(first / "optimizer.safetensors", -1)
    save(run, state(5, value=6), keep=1)
    assert values(run.restore("best")) == {6.0}
    assert listing(run) == ["best", "latest", "step-00000005"]


def test_a_wrong_keep_or_name_is_refused(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        save(run, state(1), keep=0)
    with pytest.raises(ValueError, match=r"which='newest' must be \"latest\", \"best\" or a step"):
        run.restore("newest")
    save(run, state(1))
    with pytest.raises(CheckpointError, match=r"step-00000002 is not there; there are the steps 1"):
        run.restore(2)


# What happens while saving.


@pytest.fixture(scope="module")
def children() -> Iterator[subprocess.Popen[str]]:
    """A process that forks one of the functions below for each line it reads: torch is imported once."""
    command = [sys.executable, "-W", "error", __file__]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def start_child(children: subprocess.Popen[str], *line: object) -> int:
    assert children.stdin is not None
    print(*line, file=children.stdin, flush=True)
    return int(read(children))


def read(children: subprocess.Popen[str]) -> str:
    assert children.stdout is not None
    return children.stdout.readline().strip()


def child_saves_for_ever(path: str, first: str) -> None:
    """Each step is saved twice, with other values: as a new one, and in place of the one that is there."""
    version = int(first)
    while True:
        given = state(version // 2, value=version, rows=20_000)
        save(RunDirectory(path), given, keep=1, best=version % 3 == 0)
        print(version, flush=True)
        version += 1


def child_dies_before_call(path: str, version: str, number: str) -> None:
    calls = itertools.count()

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if next(calls) == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counted

    for name in ("mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "fsync"):
        setattr(os, name, deadly(getattr(os, name)))
    run_directory.save_file = deadly(run_directory.save_file)
    save(RunDirectory(path), state(int(version) // 2, value=int(version)), keep=1, best=True)
    print("survived", flush=True)


def child_meets_a_limit(path: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        save(RunDirectory(path), state(2, rows=20_000))
    except CheckpointError as error:
        print(error, flush=True)


def serve_children() -> None:
    for line in sys.stdin:
        name, *arguments = line.split()
        pid = os.fork()
        if pid == 0:
            print(os.getpid(), flush=True)
            globals()[name](*arguments)
            os._exit(0)
        os.waitpid(pid, 0)
        print("ended", flush=True)


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_a_kill_at_any_moment_leaves_the_last_state_or_the_one_before(
    run: RunDirectory, children: subprocess.Popen[str]
) -> None:
    moment, last, seconds = random.Random(1), 1, 0.05
    for _ in range(15):
        pid = start_child(children, "child_saves_for_ever", run.path, last + 1)
        for _ in range(moment.randint(1, 2)):
            started = time.monotonic()
            last = int(read(children))
            seconds = time.monotonic() - started
        time.sleep(moment.uniform(0, min(seconds, 0.3)))  # a random moment of the next save
        os.kill(pid, signal.SIGKILL)
        while (line := read(children)) != "ended":
            last = int(line)
        found = run.resume({"seed": 0})
        assert values(found) <= {last, last + 1}
        assert len(values(found)) == 1
        assert found.step == found.settings["value"] // 2
        last = int(found.settings["value"])
    save(run, state(last + 1), keep=1, best=True)
    assert listing(run) == ["best", "latest", f"step-{last + 1:08d}"]


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("following", [3, 4], ids=["the same step", "the next step"])
def test_a_kill_before_any_call_to_the_disk_leaves_one_state_or_the_other(
    run: RunDirectory, children: subprocess.Popen[str], following: int
) -> None:
    seen: set[float] = set()
    for number in itertools.count():
        save(run, state(1, value=2), keep=1, best=True)  # also tidies after the death before
        assert listing(run) == ["best", "latest", "step-00000001"]
        start_child(children, "child_dies_before_call", run.path, following, number)
        survived = [line for line in iter(lambda: read(children), "ended")]
        found = run.resume({"seed": 0})
        assert values(found) in ({2.0}, {float(following)})
        assert values(run.restore("best")) in ({2.0}, {float(following)})
        assert all(len(values(run.restore(step))) == 1 for step in run.steps())
        seen |= values(found)
        if survived:
            break
    assert number > 12
    assert seen == {2.0, float(following)}


def assert_refused_whole(run: RunDirectory, message: str, cause: str, cure: str) -> None:
    assert str(run.checkpoints / "step-00000002") in message
    assert os.strerror(getattr(errno, cause)) in message
    assert cure in message
    assert listing(run) == ["latest", "step-00000001"]
    assert values(run.restore()) == {1.0}


@pytest.mark.processes
def test_a_file_that_may_not_grow_leaves_the_last_checkpoint_and_nothing_else(
    run: RunDirectory, children: subprocess.Popen[str]
) -> None:
    save(run, state(1))
    start_child(children, "child_meets_a_limit", run.path)
    assert_refused_whole(run, read(children), "EFBIG", "ulimit -f")
    assert read(children) == "ended"


@pytest.mark.processes
def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_else(small_disk: Path) -> None:
    run = RunDirectory(small_disk / "run")
    save(run, state(1))
    for part in (16_000, 9_000):  # no room for the model; room for the model, not for the optimizer
        with pytest.raises(CheckpointError) as caught:
            save(run, state(2, rows=part))
        assert_refused_whole(run, str(caught.value), "ENOSPC", "another one")
    (run.path / "filling").write_bytes(bytes(4096))
    save(run, state(2), keep=1)
    assert values(run.restore()) == {2.0}


def test_an_interrupt_leaves_no_temporary_folder(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, state(1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_directory, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(run, state(2))
    assert listing(run) == ["latest", "step-00000001"]


def test_the_only_copy_is_not_cleared_away_by_a_save_that_fails(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(run, state(1), keep=1).path
    folder.rename(run.checkpoints / ".replaced-step-00000001")  # as a writer killed in the middle leaves it
    assert values(run.restore()) == {1.0}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(run_directory, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(run, state(1, value=2), keep=1)
    assert values(run.resume({"seed": 0})) == {1.0}
    assert listing(run) == ["latest", "step-00000001"]


def test_everything_is_on_the_disk_before_it_gets_its_name(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def sync(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def record(call: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Path, target: Path) -> None:
            calls.append(("rename", Path(target).name))
            call(source, target)

        return renamed

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", record(rename))
    monkeypatch.setattr(os, "replace", record(replace))
    save(run, state(1))
    files = {"model.safetensors", "optimizer.safetensors", "carry.safetensors", "state.json"}
    assert {name for _, name in calls[:4]} == files
    assert calls[4:] == [
        ("sync", ".writing"),
        ("rename", "step-00000001"),
        ("rename", "latest"),
        ("sync", "checkpoints"),
    ]


def test_a_second_writer_waits_and_is_refused_after_the_deadline(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, state(1))
    monkeypatch.setattr(run_directory, "_LOCK_SECONDS", 0.05)
    with open(run.checkpoints / ".lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"another process has been writing in .* its own run_dir="):
            save(run, state(2))
    save(run, state(2))


@pytest.mark.thorough
def test_a_reader_beside_a_writer_that_keeps_one_gets_whole_states(run: RunDirectory) -> None:
    save(run, state(0), keep=1)
    ended = threading.Event()

    def write() -> None:
        try:
            for version in range(2, 120):
                save(run, state(version // 2, value=version), keep=1)
        finally:
            ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not ended.is_set():
            assert len(values(run.restore())) == 1
    finally:
        writer.join(timeout=30)
    assert values(run.restore()) == {119.0}


# What cannot be trusted.


def flip(path: Path, position: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


FILES = ["model.safetensors", "optimizer.safetensors", "carry.safetensors", "state.json"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def put_foreign(path: Path) -> None:
    path.write_text(json.dumps({"weights": [1, 2, 3]}))


def put_older(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000010" / path.name, path)


@pytest.mark.parametrize("damage", [truncate, change, put_foreign, Path.unlink], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_with_the_cure(run: RunDirectory, name: str, damage: Callable[[Path], None]) -> None:
    for step in (10, 20, 30):
        save(run, state(step))
    folder = run.checkpoints / "step-00000030"
    damage(folder / name)
    for refused in (run.restore, lambda: run.restore(30), lambda: run.resume({"seed": 0})):
        with pytest.raises(CheckpointError) as caught:
            refused()
        assert str(folder / name) in str(caught.value)
        if damage is truncate and name != "state.json":
            size = (folder / name).stat().st_size
            assert f"was {size + 1} bytes when it was written and is {size} now" in str(caught.value)
        assert f"step 20 is intact: ask for it, or remove {folder}" in str(caught.value)
    assert values(run.restore(20)) == {20.0}
    shutil.rmtree(folder)  # the cure
    assert values(run.resume({"seed": 0})) == {20.0}


@pytest.mark.parametrize("name", FILES[:3])
def test_a_file_of_another_checkpoint_is_refused(run: RunDirectory, name: str) -> None:
    save(run, state(10))
    put_older(save(run, state(20)).path / name)
    with pytest.raises(CheckpointError, match=f"{name} is not as it was written"):
        run.restore()


def test_the_cure_names_no_other_step_that_is_damaged_too(run: RunDirectory) -> None:
    for step in (10, 20, 30):
        change(save(run, state(step)).path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no other checkpoint is intact: start again"):
        run.restore()


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
@pytest.mark.thorough
def test_any_one_changed_byte_is_refused_or_changes_nothing(name: str, place: float, mask: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(folder)
        path = save(run, state(10)).path / name
        flip(path, int(place * path.stat().st_size), mask)
        try:
            found, told = run.restore(), None
        except CheckpointError as error:
            found, told = None, str(error)
    if found is None:
        assert str(path) in str(told)
    else:
        assert name == "state.json"  # one white space for another
        assert (found.step, values(found)) == (10, {10.0})


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_another_format_is_refused(run: RunDirectory, number: Any) -> None:
    path = save(run, state(10)).path / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": number}))
    with pytest.raises(CheckpointError, match=rf"state.json has format {number!r} and this apportion reads 1"):
        run.restore()


# Going on.


def test_resume_takes_the_older_one_only_where_the_newest_was_never_there(run: RunDirectory) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint yet: start it again without resume=True"):
        run.resume({"seed": 0})
    for step in (10, 20):
        save(run, state(step))
    os.unlink(run.checkpoints / "latest")
    os.symlink("step-00000030", run.checkpoints / "latest")
    with pytest.raises(CheckpointError, match=r"step-00000030 is not there; there are the steps 10, 20"):
        run.restore()
    assert values(run.resume({"seed": 0})) == {20.0}
    os.unlink(run.checkpoints / "latest")
    assert values(run.resume({"seed": 0})) == {20.0}
    change(run.checkpoints / "step-00000020" / "model.safetensors")
    with pytest.raises(CheckpointError, match="step 10 is intact"):
        run.resume({"seed": 0})


def test_a_directory_that_holds_a_run_is_not_started_again(run: RunDirectory) -> None:
    run.start({"address": "again.py:workload", "fingerprint": {}})  # it has no checkpoint: nothing is lost
    told = run.read_run()
    assert told["address"] == "again.py:workload"
    assert told["cwd"] == os.getcwd()
    assert told["versions"]["torch"] == torch.__version__
    save(run, state(3))
    with pytest.raises(
        ValueError, match="already holds a run, at step 3: use resume=True to go on, or another run_dir="
    ):
        run.start({"address": None})
    assert run.read_run() == told


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for ask in (RunDirectory(tmp_path).read_run, lambda: RunDirectory(tmp_path).resume({}), lambda: load(tmp_path)):
        with pytest.raises(ValueError, match="holds no run"):
            ask()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written: Not a directory"):
        RunDirectory(tmp_path / "file" / "run").start({})


def test_a_damaged_run_json_is_refused(run: RunDirectory) -> None:
    for content in ("{", "[]"):
        (run.path / "run.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"run\.json"):
            run.read_run()


# The same workload?


def a_workload(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        "data": lambda: [(torch.ones(3), 0)],
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.1),
        "batch_size": 8,
        "loss": nn.functional.cross_entropy,
        "steps": 10,
    }
    return Workload(**(fields | changes))


def print_of(workload: Workload, examples: int = 100) -> dict[str, Any]:
    model = workload.model()
    made = workload.optimizer(model.named_parameters())
    return fingerprint(
        workload, model, made if isinstance(made, dict) else {"": made}, Sampler(examples, workload.batch_size)
    )


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 9}, "batch_size was 8 and is 9"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"order": "sequential"}, 'order was "shuffled" and is "sequential"'),
        ({"precision": "bfloat16"}, 'precision was "float32" and is "bfloat16"'),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm was null and is 1.0"),
        ({"augment": lambda batch, draws: batch}, 'augment was null and is "given"'),
        ({"loss": None, "update": lambda step, batch: {}}, 'loss was "given" and is null'),
        ({"schedule": lambda o, n: torch.optim.lr_scheduler.ConstantLR(o)}, "total steps was absent and is 10"),
        ({"model": lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))}, "parameters, elements was 24 and is 30"),
        (
            {"model": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))},
            "parameters, names, shapes and dtypes was",
        ),
        ({"model": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))}, "buffers, tensors was 3 and is 0"),
        ({"model": frozen}, "parameters, trained was 4 and is 3"),
        ({"optimizer": lambda p: torch.optim.AdamW(p, lr=0.2)}, "optimizer, group 0, lr was 0.1 and is 0.2"),
        ({"optimizer": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5))}, "lr was 0.1 and is 0.5"),
        ({"optimizer": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9))}, "[0.9, 0.999] and is [0.8, 0.9]"),
        ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}, 'optimizer, class was "AdamW" and is "Adam"'),
        ({"optimizer": lambda p: {"only": torch.optim.AdamW(p, lr=0.1)}}, "optimizer only, class was absent"),
    ],
)
def test_a_changed_workload_is_refused_by_field(run: RunDirectory, changes: dict[str, Any], message: str) -> None:
    shutil.rmtree(run.path)
    run.start({"address": None, "fingerprint": print_of(a_workload())})
    save(run, state(10))
    with pytest.raises(ValueError, match="started with another workload: ") as caught:
        run.resume(print_of(a_workload(**changes)))
    assert message in str(caught.value)
    assert "in another run_dir=" in str(caught.value)
    assert values(run.resume(print_of(a_workload()))) == {10.0}


def test_more_examples_are_another_workload_and_more_steps_are_not() -> None:
    saved = json.loads(json.dumps(print_of(a_workload())))
    check_fingerprint(saved, print_of(a_workload(steps=1000)))
    check_fingerprint(saved, print_of(a_workload(optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True))))
    with pytest.raises(ValueError, match="examples was 100 and is 101"):
        check_fingerprint(saved, print_of(a_workload(), examples=101))


def test_a_schedule_spreads_over_the_steps_so_more_of_them_are_another_workload() -> None:
    scheduled = {"schedule": lambda o, n: torch.optim.lr_scheduler.LinearLR(o, total_iters=n), "steps": None}
    saved = print_of(a_workload(**scheduled, epochs=2))
    with pytest.raises(ValueError, match="total steps was 26 and is 39"):
        check_fingerprint(saved, print_of(a_workload(**scheduled, epochs=3)))


def test_a_schedule_that_stands_already_does_not_change_the_rate_that_is_compared() -> None:
    workload = a_workload()
    model = workload.model()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.05
    check_fingerprint(print_of(workload), fingerprint(workload, model, {"": optimizer}, Sampler(100, 8)))


# The trained network.

SOURCE = """
import random
import numpy
import torch
from torch import nn
from apportion.core.workload import Workload

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        features = torch.randn(4) + numpy.random.rand() + random.random()
        self.register_buffer("features", features, persistent=False)
        self.drop = nn.Dropout()
    def forward(self, x):
        return self.drop(self.second(self.first(x)) * self.features)

workload = Workload(model=Net, data=lambda: [], optimizer=torch.optim.SGD, batch_size=1, loss=nn.MSELoss(), seed=5)
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDirectory, nn.Module]:
    """A run of a network with tied weights, dropout, and a random buffer that no checkpoint holds. Its code lies in the
    project that the caller works in."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "net.py").write_text(SOURCE)
    scope: dict[str, Any] = {"__name__": "net"}
    exec(SOURCE, scope)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        numpy.random.seed(5)
        random.seed(5)
        module = scope["Net"]()
    run = RunDirectory(tmp_path / "run")
    run.start({"address": "net.py:workload", "cwd": str(tmp_path / "code"), "fingerprint": {"seed": 5}})
    for step in (1, 2):
        nn.init.normal_(module.first.weight)
        save(run, State(step=step, model=dict(module.state_dict())), best=step == 1)
    return run, module.eval()


def test_load_gives_the_plain_trained_module(
    trained: tuple[RunDirectory, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, module = trained
    monkeypatch.chdir(tmp_path)  # the address is relative to where the run was started, not to here
    before = [*torch.get_rng_state(), *random.getstate()[1], *numpy.random.get_state()[1]]
    for found in (load("run", which="latest"), load(run.path, which=2), load(run.checkpoints / "latest")):
        assert (type(found).__name__, found.training) == ("Net", False)
        assert found.second.weight is found.first.weight
        assert torch.equal(found(torch.ones(1, 4)), module(torch.ones(1, 4)))
    assert [*torch.get_rng_state(), *random.getstate()[1], *numpy.random.get_state()[1]] == before


def test_load_takes_the_best_where_there_is_one(trained: tuple[RunDirectory, nn.Module]) -> None:
    run, _ = trained
    best, latest = load(run.path, which=1).first.weight, load(run.path, which=2).first.weight
    assert not torch.equal(best, latest)
    assert torch.equal(load(run.path).first.weight, best)
    os.unlink(run.checkpoints / "best")
    assert torch.equal(load(run.path).first.weight, latest)
    with pytest.raises(ValueError, match="is one checkpoint: give which=1 with the run's folder"):
        load(run.checkpoints / "latest", which=1)


def test_load_finds_a_module_address_from_where_the_run_was_started(
    trained: tuple[RunDirectory, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, module = trained
    cwd = Path(run.read_run()["cwd"])
    (cwd / "net.py").rename(cwd / "net_of_this_test.py")
    with pytest.raises(ValueError, match=r"there is no file .*net\.py.* or give load\(\.\.\., model="):
        load(run.path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (run.path / "run.json").write_text(json.dumps(run.read_run() | {"address": "net_of_this_test:workload"}))
    assert torch.equal(load(run.path, which=2)(torch.ones(1, 4)), module(torch.ones(1, 4)))


def test_load_of_a_run_without_an_address_needs_the_model(
    trained: tuple[RunDirectory, nn.Module], tmp_path: Path
) -> None:
    run, module = trained
    make = type(module)
    (run.path / "run.json").write_text(json.dumps(run.read_run() | {"address": None}))
    lonely = shutil.copytree(run.checkpoints / "step-00000002", tmp_path / "elsewhere" / "lonely")
    for place in (run.path, lonely):
        with pytest.raises(ValueError, match=r"names no workload as FILE:NAME .* give load\(\.\.\., model=\.\.\.\)"):
            load(place)
        assert torch.equal(
            load(place, model=make).first.weight, load(run.path, which=None, model=make).first.weight
        ) is (place == run.path)
    assert torch.equal(load(run.path, which=2, model=make)(torch.ones(1, 4)), module(torch.ones(1, 4)))


def test_load_refuses_a_model_that_does_not_fit(trained: tuple[RunDirectory, nn.Module]) -> None:
    run, _ = trained
    with pytest.raises(CheckpointError, match=r"first\.weight is only in the checkpoint.*and 2 more\. Give the model"):
        load(run.path, model=lambda: nn.Linear(4, 4))
    wide = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(9, 4)})
    with pytest.raises(
        CheckpointError, match=r"second\.weight is \[4, 4\] in the checkpoint and \[4, 9\] in the model"
    ):
        load(run.path, model=lambda: wide)


def test_load_refuses_a_damaged_model_and_does_not_need_the_rest(trained: tuple[RunDirectory, nn.Module]) -> None:
    run, _ = trained
    os.unlink(run.checkpoints / "step-00000002" / "optimizer.safetensors")
    load(run.path, which="latest")
    change(run.checkpoints / "step-00000002" / "model.safetensors")
    with pytest.raises(CheckpointError, match="step 1 is intact"):
        load(run.path, which="latest")


def test_load_of_a_float64_run_is_float64(run: RunDirectory) -> None:
    trained = nn.Linear(3, 2, dtype=torch.float64)  # its numbers are no float32 ones
    save(run, State(step=1, model=dict(trained.state_dict())))

    def make() -> nn.Module:
        model = nn.Linear(3, 2)
        model.register_buffer("scale", torch.ones(2), persistent=False)
        return model

    found = load(run.path, model=make)
    assert torch.equal(found.weight, trained.weight)
    assert found.scale.dtype == torch.float64


if __name__ == "__main__":
    serve_children()


def test_a_saver_that_cannot_start_its_thread_says_so_and_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a limit of memory a thread may not start; a run that waited for it would never end."""
    from apportion.runtime.checkpoint.async_writer import Saver

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    saver = Saver(RunDirectory(tmp_path / "run"), 2, "single_device")
    with pytest.raises(CheckpointError, match="step 3 could not be saved: can't start new thread"):
        saver.submit(State(step=3, model={}), 0.5, best=False, seconds=0.0)
    saver.flush()
    saver.finish()
