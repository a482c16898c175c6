"""Every failure ends with one clear message, the right exit status, in under five seconds, and nothing left behind.

Real processes, real signals. What is told on the command line is asked of the command line; most of it in this
process, where the template that workers are forked from is warm.
"""

from __future__ import annotations

import json
import operator
import os
import random
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import at_terminal
from conftest import Eventually, Within
from safetensors.torch import load_file
from warm_python import FORKER

import apportion
from apportion import Policy
from apportion.api.train import run, train
from apportion.cli import app, failures
from apportion.errors import ApportionError, CheckpointError, WorkerFailed
from apportion.reporting.journal import read_events
from apportion.runtime.launch import local as launch
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.template import close_template, template
from apportion.runtime.supervisor import run as supervisor
from apportion.runtime.supervisor import watchdog, worker_pool

HERE = Path(__file__).parents[1] / "helpers"
PROGRAM = Path(sys.executable).with_name("apportion")
WORKLOADS = HERE / "fault_workloads.py"
PARALLEL = ("--strategy", "data_parallel")
STOPS = ("--policy", "policy(max_restarts=0)")
"""Whoever is lost is not replaced: how that goes is in test_recovery.py."""
SECONDS = 5.0
pytestmark = [pytest.mark.filterwarnings("ignore:.*they take turns"), pytest.mark.processes]
START_SECONDS = 60.0
"""For a cold start on a busy machine."""


def address(name: str) -> str:
    return f"{WORKLOADS}:{name}"


def local(workers: int) -> Local:
    return Local(workers=workers, threads=1)


def strategy(workers: int) -> str:
    return "single_device" if workers == 1 else "data_parallel"


@dataclass
class Outcome:
    status: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """``apportion ...`` in this process."""
    template().wait_ready()
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    handler = signal.getsignal(signal.SIGINT)

    def call(*arguments: Any) -> Outcome:
        quick = ("--no-check",) if arguments[0] == "train" else ()  # what is computed others prove
        monkeypatch.setattr(sys, "argv", [str(PROGRAM), *map(str, arguments), *quick])
        capfd.readouterr()
        warnings.simplefilter("always")
        with pytest.raises(SystemExit) as left:
            app.main()
        assert left.value.code is None or isinstance(left.value.code, int)
        return Outcome(left.value.code or 0, *capfd.readouterr())

    with warnings.catch_warnings():
        yield call
    signal.signal(signal.SIGINT, handler)


class Driver:
    """``apportion`` as a process of its own, which leads a session of its own, as at a terminal."""

    def __init__(self, folder: Path, *arguments: Any, **environment: str) -> None:
        arguments = (*arguments, *(("--no-check",) if arguments[0] == "train" else ()))
        self._err = folder / "stderr"
        with open(self._err, "wb") as err:
            self.process = psutil.Popen(
                [sys.executable, PROGRAM, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
                env={**os.environ, **environment},
                cwd=folder,
            )

    @property
    def err(self) -> str:
        return self._err.read_text()

    def children(self) -> list[psutil.Process]:
        return [child for child in self.process.children(recursive=True) if child.name() != FORKER]

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self, seconds: float) -> int:
        status = self.process.wait(seconds)
        assert status is not None
        return int(status)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(*arguments: Any, **environment: str) -> Driver:
        started.append(Driver(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.is_running():
            one.process.kill()
        one.process.wait(SECONDS)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / "latest"
    parts = ("model", "optimizer", "carry")
    return {
        f"{part}/{name}": tensor
        for part in parts
        if (folder / f"{part}.safetensors").exists()
        for name, tensor in load_file(folder / f"{part}.safetensors").items()
    }


def latest_step(run_dir: Path) -> int:
    return int(json.loads((run_dir / "checkpoints" / "latest" / "state.json").read_text())["step"])


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], within: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = (found[name].double() - tensor.double()).abs().max().item()
        assert difference <= within, f"{name} differs by {difference}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, torch.Tensor]]:
    """The final state of a run that nothing happened to."""
    known: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def get(name: str, workers: int) -> dict[str, torch.Tensor]:
        if (name, workers) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            train(address(name), strategy(workers), launcher=local(workers), run_dir=folder / "run")
            known[name, workers] = final_state(folder / "run")
        return known[name, workers]

    return get


# A worker that raises


def test_an_exception_on_rank_1_of_3_shows_the_users_line_and_leaves_nothing(
    driver: Callable[..., Driver], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    one = driver(
        *("train", address("raises"), "--strategy", "data_parallel", "--workers", 3, "--run-dir", "run"),
        FAULT_MARK=str(mark),
    )
    status = one.ended(START_SECONDS)
    took = time.time() - float(mark.read_text())
    assert status == failures.FAILED, one.err
    assert took < SECONDS, f"{took:.2f} s from the raise to the end of the driver"
    print(f"{took:.2f} s from the raise to the end of the driver")
    lines = one.err.splitlines()
    error = lines.index("error: rank 1: RuntimeError: boom in the model")
    number = 1 + WORKLOADS.read_text().splitlines().index('    raise RuntimeError("boom in the model")')
    assert lines[error + 1] == f'  at {WORKLOADS}:{number} in boom: raise RuntimeError("boom in the model")'
    assert lines[error + 2] == "rank 1's traceback:"
    assert lines.count("Traceback (most recent call last):") == 1
    assert latest_step(tmp_path / "run") >= 0 if (tmp_path / "run" / "checkpoints" / "latest").exists() else True


def error_of(text: str) -> tuple[str, str]:
    """What is said of an error, and the line after it, where the user's line is."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("error: "))
    return lines[at], lines[at + 1]


RAISED = [
    ("raises_in_backward", "RuntimeError: boom in backward", "in backward: raise RuntimeError"),
    ("raises_in_data", "KeyError: 'no such example'", 'in __getitem__: raise KeyError("no such example")'),
    ("raises_in_loss", "ArithmeticError: boom in the loss", "in broken_loss: raise ArithmeticError"),
    ("raises_in_optimizer", "learning_rate", "in broken_optimizer: return torch.optim.SGD(parameters, learning_rate"),
    ("raises_with_child", "RuntimeError: boom with a child", "in leave_a_child_and_raise: raise RuntimeError"),
    ("leaves_python", "left Python with status 4", "in <lambda>: leaves_python = fails_in(lambda: sys.exit(4))"),
    ("memory", "use fewer workers, a smaller batch_size", "in fill_memory: torch.ones(1 << 28)"),
    ("numpy_memory", "use fewer workers, a smaller batch_size", "in <lambda>: numpy_memory = "),
]


@pytest.mark.parametrize(("name", "cause", "where"), RAISED, ids=[name for name, *_ in RAISED])
def test_whatever_of_the_users_raises_is_told_with_its_line(
    name: str, cause: str, where: str, command: Command, tmp_path: Path, within: Within
) -> None:
    with within(SECONDS, "the end of the run"):
        told = command(
            "train", address(name), "--strategy", "data_parallel", "--workers", 2, "--run-dir", tmp_path / "r"
        )
    assert told.status == failures.FAILED
    error, at = error_of(told.err)
    assert error.startswith("error: rank ")
    assert cause in error
    assert at.startswith(f"  at {WORKLOADS}:")
    assert where in at
    assert "Traceback (most recent call last):" in told.err


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("import no_such_module_anywhere\nworkload = None\n", "{file}:1 in <module>: import no_such_module_anywhere"),
        ("x = 1\nprint(x\n", "{file}:2: print(x"),
    ],
)
def test_a_file_that_cannot_be_imported_shows_its_line(
    text: str, where: str, command: Command, tmp_path: Path, within: Within
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with within(SECONDS, "the end of the run"):
        told = command("train", f"{file}:workload", "--strategy", "single_device", "--run-dir", tmp_path / "run")
    assert told.status == failures.FAILED
    assert where.format(file=file) in error_of(told.err)[1]
    assert not (tmp_path / "run").exists()


def test_the_exception_in_python_carries_the_ranks_own_traceback(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="rank 1: RuntimeError: boom in the model") as failed:
        train(address("raises"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run")
    assert failed.value.rank == 1
    assert failed.value.traceback is not None
    assert 'raise RuntimeError("boom in the model")' in failed.value.traceback
    assert failed.value.where is not None
    assert failed.value.where.startswith(str(WORKLOADS))
    assert any("rank 1's own traceback" in note for note in failed.value.__notes__)
    last = read_events(tmp_path / "run")[-1]
    assert (last.kind, last.data["rank"], last.data["action"]) == ("fault", 1, "stops")


# A worker that dies, or does not answer

DIED = [
    ("killed", "rank 1 was killed by SIGKILL: by hand, or by the system for want of memory"),
    ("terminated", "rank 1 was ended by SIGTERM"),
    ("crashes", "rank 1 crashed in native code (SIGSEGV)"),
    ("exits", "rank 1 ended with exit status 7 before it was done"),
    ("exits_well", "rank 1 ended with exit status 0 before it was done"),
]


@pytest.mark.parametrize(("name", "cause"), DIED, ids=[name for name, _ in DIED])
def test_a_worker_that_dies_is_told_with_the_cause(
    name: str, cause: str, command: Command, tmp_path: Path, within: Within
) -> None:
    with within(SECONDS, "the end of the run"):
        told = command("train", address(name), *PARALLEL, "--workers", 2, "--run-dir", tmp_path / "r", *STOPS)
    assert told.status == failures.FAILED
    assert cause in told.err.splitlines()[-1]


@pytest.fixture
def container() -> Iterator[Path]:
    """A control group of 64 MiB."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        second = controllers == "" and Path(f"/sys/fs/cgroup{path}/memory.max").exists()
        if second or "memory" in controllers.split(","):
            folder = Path(f"/sys/fs/cgroup{'' if second else '/memory'}{path}/apportion-{os.getpid()}")
            limit = folder / ("memory.max" if second else "memory.limit_in_bytes")
            break
    else:
        pytest.skip("memory is not under control groups here")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    try:
        limit.write_text(str(64 << 20))
        yield folder
    except OSError as error:
        pytest.skip(f"a control group cannot be limited here: {error}")
    finally:
        folder.rmdir()


def test_a_worker_that_the_kernel_kills_for_memory_is_told_as_that(
    container: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setenv("FAULT_CONTAINER", str(container))
    with within(SECONDS, "the end of the run"):
        told = command("train", address("container"), *PARALLEL, "--workers", 2, "--run-dir", tmp_path, *STOPS)
    assert told.status == failures.FAILED
    assert "rank 1 was killed for want of memory (SIGKILL): use fewer workers" in told.err.splitlines()[-1]


@pytest.mark.parametrize("verb", ["train", "check", "compare"])
def test_every_verb_tells_a_workers_exception_alike(
    verb: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "usable_cores", lambda: 2)
    monkeypatch.setenv("FAULT_STEP", "1")  # a slow machine makes few steps of a trial
    told = command(verb, address("raises"), *(() if verb == "train" else PARALLEL))  # train: while strategies are tried
    assert told.status == failures.FAILED
    error, at = error_of(told.err)
    assert re.fullmatch(r"error: rank [01]: RuntimeError: boom in the model", error)
    assert at.startswith(f"  at {WORKLOADS}:")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "words", "stacks"), [("stopped", "has been stopped (SIGSTOP", 0), ("hangs", "has not moved", 3)]
)
@pytest.mark.thorough
def test_a_rank_that_others_wait_for_in_vain_is_named(  # noqa: PLR0913 (fixtures)
    name: str,
    words: str,
    stacks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    within: Within,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Where nobody knows what it does, all ranks print what they are at."""
    monkeypatch.setattr(watchdog, "LATE_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "LATE_STEPS", 1)
    monkeypatch.setattr(watchdog, "LATE_FIRST", 1)
    close_template()  # the next one has this test's standard error
    template().wait_ready()
    stops = Policy(max_restarts=0)
    with within(SECONDS, "finding the late rank"), pytest.raises(WorkerFailed, match=r"rank 1 ") as failed:
        train(address(name), "data_parallel", launcher=local(3), run_dir=tmp_path / "run", policy=stops)
    assert words in str(failed.value)
    assert "at step 3" in str(failed.value)
    told = capfd.readouterr().err
    assert told.count("(most recent call first):") >= stacks
    assert (f'File "{WORKLOADS}", line' in told) == (stacks > 0), "the line that hangs is there"


@pytest.mark.thorough
def test_a_long_wait_in_an_evaluation_is_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LATE_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "LATE_STEPS", 1)
    end = train(address("slow_evaluation"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run")
    assert end.data["reason"] == "finished"


@pytest.mark.thorough
def test_a_long_stay_in_the_body_of_the_loop_makes_nobody_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LATE_SECONDS", 0.5)
    monkeypatch.setenv("FAULT_PACE", "0.02")
    for event in run(address("good"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run"):
        if event.kind == "step" and event.step < 20:
            time.sleep(0.6)  # the body's own work
    assert event.data["reason"] == "finished"


def test_the_next_run_in_the_same_program_works_after_a_failure(tmp_path: Path) -> None:
    stops = Policy(max_restarts=0)
    for name in ("raises", "killed"):
        with pytest.raises(WorkerFailed):
            train(address(name), "data_parallel", launcher=local(2), run_dir=tmp_path / name, policy=stops)
        end = train(address("good"), "data_parallel", launcher=local(2), run_dir=tmp_path / f"after-{name}")
        assert end.data["reason"] == "finished"


# What workers are forked from


@pytest.mark.thorough
def test_a_template_that_is_killed_takes_its_workers_along_and_the_next_run_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setenv("FAULT_PACE", "0.02")
    stops = Policy(max_restarts=0)
    events = run(address("good"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run", policy=stops)
    next(events)
    process = template()._process
    assert process is not None
    process.kill()
    with within(SECONDS, "the end of the run"), pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        for _ in events:
            pass
    monkeypatch.delenv("FAULT_PACE")
    end = train(address("good"), "data_parallel", launcher=local(2), run_dir=tmp_path / "next")
    assert end.data["reason"] == "finished"


def test_a_template_that_cannot_import_torch_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif any('template' in word for word in sys.orig_argv):\n    sys.modules['torch'] = None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    close_template()
    told = command("train", address("good"), "--strategy", "single_device")
    assert told.status == failures.FAILED
    assert "check that `python -c 'import torch'` works" in told.err.splitlines()[-1]
    close_template()


@pytest.mark.thorough
def test_a_thread_that_trains_and_ends_takes_no_later_run_with_it(tmp_path: Path) -> None:
    close_template()
    ends = []

    def first() -> None:
        ends.append(train(address("good"), "data_parallel", launcher=local(2), run_dir=tmp_path / "first"))

    thread = threading.Thread(target=first)
    thread.start()
    thread.join(START_SECONDS)
    before = template()
    ends.append(train(address("good"), "data_parallel", launcher=local(2), run_dir=tmp_path / "second"))
    assert [end.data["reason"] for end in ends] == ["finished", "finished"]
    assert template() is before


@pytest.mark.thorough
def test_many_trainings_in_one_program_gather_nothing(tmp_path: Path, eventually) -> None:
    def used() -> tuple[int, int, int]:
        me, parent = psutil.Process(), template()._process
        assert parent is not None
        return me.num_fds(), me.num_threads(), psutil.Process(parent.pid).num_fds()

    def once(number: int) -> None:
        train(address("good"), "data_parallel", launcher=local(2), run_dir=tmp_path / str(number), steps=3)

    once(0)
    once(1)
    before, memory = used(), psutil.Process().memory_info().rss
    for number in range(2, 20):
        once(number)
    # A thread of the last run may still be about to end, here and where it was counted before.
    eventually(lambda: all(map(operator.le, used(), before)), within=10, what=f"no more is used than {before}")
    assert psutil.Process().memory_info().rss - memory < 20 << 20


# Ctrl-C


def interrupt_when(path: Path) -> None:
    """SIGINT for this process as soon as there is such a file."""

    def wait() -> None:
        deadline = time.monotonic() + START_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def test_ctrl_c_saves_the_last_update_without_waiting_and_says_how_to_go_on(
    driver: Callable[..., Driver],
    tmp_path: Path,
    command: Command,
    undisturbed: Callable[..., dict[str, torch.Tensor]],
    eventually: Eventually,
) -> None:
    mark = tmp_path / "mark"
    one = driver(
        *("train", address("hangs"), *PARALLEL, "--launcher", local(2)),
        *("--run-dir", "run"),
        FAULT_MARK=str(mark),
        FAULT_STEP="6",
    )
    eventually(mark.exists, within=START_SECONDS, what="the step that never ends")
    began, workers_of_it = time.monotonic(), one.children()
    one.interrupt()
    status = one.ended(2 * SECONDS)
    took = time.monotonic() - began
    assert status == failures.INTERRUPTED, one.err
    assert took < SECONDS, f"{took:.2f} s from Ctrl-C to the end of the driver"
    print(f"{took:.2f} s from Ctrl-C to the end of the driver")
    eventually(lambda: gone(workers_of_it), within=SECONDS, what="all processes are gone")
    saved, resume = one.err.splitlines()[-2:]
    assert saved == "interrupted; step 5 is saved"
    assert "Traceback" not in one.err
    assert latest_step(tmp_path / "run") == 5
    words = shlex.split(resume.removeprefix("go on with: "))
    assert words[:2] == ["apportion", "train"]
    # The same training, without the step that hangs.
    words[2] = address("good")
    words[words.index("run")] = str(tmp_path / "run")
    assert command(*words[1:]).status == 0
    assert_equal(final_state(tmp_path / "run"), undisturbed("good", 2))


@pytest.mark.parametrize("place", ["inside", "body"])
def test_ctrl_c_in_a_program_that_loops_over_the_events(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    within: Within,
    undisturbed: Callable[..., dict[str, torch.Tensor]],
) -> None:
    monkeypatch.setenv("FAULT_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("FAULT_STEP", "9")
    template().wait_ready()
    if place == "inside":
        interrupt_when(tmp_path / "mark")

    def loop() -> None:
        for event in run(address("hangs"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run"):
            if place == "body" and event.kind == "step":
                while not (tmp_path / "mark").exists():
                    time.sleep(0.01)
                signal.raise_signal(signal.SIGINT)

    with within(SECONDS, "the interrupt"), pytest.raises(KeyboardInterrupt) as interrupt:
        loop()
    assert "step 8 is saved" in interrupt.value.__notes__[0]
    assert "resume=True" in interrupt.value.__notes__[0]
    del interrupt  # it holds the loop, which holds the run
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert latest_step(tmp_path / "run") == 8
    assert read_events(tmp_path / "run")[-1].data["reason"] == "interrupted"
    train(address("good"), launcher=local(2), run_dir=tmp_path / "run", resume=True)
    assert_equal(final_state(tmp_path / "run"), undisturbed("good", 2))


def test_a_program_that_catches_ctrl_c_in_its_body_gets_the_end_and_no_more(tmp_path: Path) -> None:
    kinds = []
    for event in run(address("good"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run"):
        kinds.append(event.kind)
        if event.kind == "step" and kinds.count("step") == 1:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert kinds[-2:] == ["step", "end"]
    assert event.data["reason"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setenv("FAULT_RANK", "0")  # it cannot answer
    monkeypatch.setenv("FAULT_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("FAULT_STEP", "7")
    monkeypatch.setenv("FAULT_AFTER", str(tmp_path / "run" / "checkpoints" / "latest"))
    monkeypatch.setattr(supervisor, "SAVE_SECONDS", 60.0)
    template().wait_ready()
    interrupt_when(tmp_path / "mark")
    original = worker_pool.WorkerPool.send

    def send(self: worker_pool.WorkerPool, order: Any, ranks: Any = None) -> None:
        original(self, order, ranks)
        if order["kind"] == "save":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(worker_pool.WorkerPool, "send", send)
    every = Policy(checkpoint_every="2 steps")
    with within(SECONDS, "two interrupts"), pytest.raises(KeyboardInterrupt) as interrupt:
        train(address("stopped"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run", policy=every)
    note = interrupt.value.__notes__[0]
    assert "what followed is not (interrupted again)" in note
    assert f"step {latest_step(tmp_path / 'run')} is saved" in note


def test_ctrl_c_before_the_first_step_leaves_nothing(
    driver: Callable[..., Driver], tmp_path: Path, eventually: Eventually
) -> None:
    one = driver("train", address("good"), "--strategy", "data_parallel", "--workers", 2, "--run-dir", "run")
    eventually(one.children, within=START_SECONDS, what="the template")
    started = one.children()
    one.interrupt()
    assert one.ended(SECONDS) == failures.INTERRUPTED, one.err
    assert one.err in ("interrupted\n", "interrupted before anything was saved\n")
    eventually(lambda: gone(started), within=SECONDS, what="all processes are gone")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_strategies_are_tried_leaves_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "usable_cores", lambda: 2)
    monkeypatch.setenv("FAULT_STEP", "1")
    mark = tmp_path / "mark"
    monkeypatch.setenv("FAULT_MARK", str(mark))
    interrupt_when(mark)
    with within(SECONDS, "the interrupt"):
        told = command("train", address("hangs"))
    assert (told.status, told.err) == (failures.INTERRUPTED, "interrupted\n")
    assert list(tmp_path.iterdir()) == [mark]


def test_ctrl_c_typed_at_a_terminal_ends_with_the_words_on_how_to_go_on(tmp_path: Path) -> None:
    mark, seen = tmp_path / "mark", b""
    words = ["train", address("hangs"), "--strategy", "single_device", "--run-dir", str(tmp_path / "run")]
    process, terminal = at_terminal(words, FAULT_MARK=str(mark), TERM="xterm", COLUMNS="200")
    deadline, typed = time.monotonic() + START_SECONDS, False
    with open(terminal, "r+b", buffering=0) as screen:
        while time.monotonic() < deadline:
            if mark.exists() and not typed:
                screen.write(b"\x03")
                typed, deadline = True, time.monotonic() + SECONDS
            if select.select([screen], [], [], 0.05)[0]:
                try:
                    seen += screen.read(4096)
                except OSError:  # its last process is gone
                    break
    assert process.wait(SECONDS) == failures.INTERRUPTED
    told = seen.decode()
    assert "interrupted; step 3 is saved\r\ngo on with: apportion train" in told
    assert told.endswith("\r\n")
    assert "Traceback" not in told
    assert "\x1b[?25h" in told  # the cursor is shown again
    assert latest_step(tmp_path / "run") == 3


def test_ctrl_c_where_the_state_is_spread_over_ranks_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setenv("FAULT_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("FAULT_STEP", "8")
    monkeypatch.setenv("FAULT_AFTER", str(tmp_path / "run" / "checkpoints" / "latest"))
    template().wait_ready()
    interrupt_when(tmp_path / "mark")
    every = Policy(checkpoint_every="5 steps")
    with within(SECONDS, "the interrupt"), pytest.raises(KeyboardInterrupt) as interrupt:
        train(address("recurrent"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run", policy=every)
    assert "step 5 is saved; what followed is not (it is spread over the ranks" in interrupt.value.__notes__[0]
    monkeypatch.setenv("FAULT_STEP", "0")
    train(address("recurrent"), launcher=local(2), run_dir=tmp_path / "run", resume=True)
    train(address("recurrent"), "data_parallel", launcher=local(2), run_dir=tmp_path / "whole")
    assert_equal(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


@pytest.mark.thorough
def test_ctrl_c_in_the_middle_of_an_update_saves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setenv("FAULT_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("FAULT_RANK", "0")
    monkeypatch.setenv("FAULT_STEP", "-9")  # its parameters are stepped, its schedule is not
    template().wait_ready()
    interrupt_when(tmp_path / "mark")
    every = Policy(checkpoint_every="4 steps")
    with within(SECONDS, "the interrupt"), pytest.raises(KeyboardInterrupt) as interrupt:
        train(address("hangs_in_an_update"), "data_parallel", launcher=local(2), run_dir=tmp_path / "run", policy=every)
    assert "step 8 is saved; what followed is not" in interrupt.value.__notes__[0]
    monkeypatch.setenv("FAULT_STEP", "0")
    train(address("hangs_in_an_update"), launcher=local(2), run_dir=tmp_path / "run", resume=True)
    train(address("hangs_in_an_update"), "data_parallel", launcher=local(2), run_dir=tmp_path / "whole")
    assert_equal(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


# Leaving, and going on


@pytest.mark.parametrize("workers", [1, 2])
def test_break_checkpoints_every_rank_at_one_step_and_resume_goes_on_exactly(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Callable[..., dict[str, torch.Tensor]]
) -> None:
    monkeypatch.setenv("FAULT_PACE", "0.02")
    for event in run(address("good"), strategy(workers), launcher=local(workers), run_dir=tmp_path / "run"):
        if event.kind == "step" and event.step > 5:
            break
    last = read_events(tmp_path / "run")[-1]
    assert (last.kind, last.data["reason"]) == ("end", "stopped")
    assert event.step <= last.step == latest_step(tmp_path / "run") < 60
    monkeypatch.delenv("FAULT_PACE")
    train(address("good"), launcher=local(workers), run_dir=tmp_path / "run", resume=True)
    assert_equal(final_state(tmp_path / "run"), undisturbed("good", workers))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
def test_a_run_goes_on_with_another_number_of_workers(
    before: int, after: int, tmp_path: Path, undisturbed: Callable[..., dict[str, torch.Tensor]]
) -> None:
    train(address("good"), strategy(before), launcher=local(before), run_dir=tmp_path / "run", steps=23)
    train(address("good"), strategy(after), launcher=local(after), run_dir=tmp_path / "run", resume=True)
    assert_equal(final_state(tmp_path / "run"), undisturbed("good", 1), within=1e-10)


def kill_and_resume(
    seed: int, workers: int, folder: Path, wanted: dict[str, torch.Tensor], start: Callable[..., Driver]
) -> float:
    """SIGKILL for the driver at a random moment, then --resume: seconds until all its processes were gone."""
    chance = random.Random(seed)
    one = start(
        *("train", address("good"), "--strategy", strategy(workers), "--launcher", local(workers)),
        *("--run-dir", folder, "--policy", "policy(checkpoint_every='3 steps')"),
        FAULT_PACE="0.02",
    )
    deadline, when = time.monotonic() + START_SECONDS, chance.randint(0, 45)
    while step_of(folder) < when:
        assert time.monotonic() < deadline, f"step {when} never came: {one.err}"
        assert one.process.poll() is None, one.err
        time.sleep(0.005)
    time.sleep(chance.random() * 0.1)  # anywhere within a step or a checkpoint
    processes = one.children()
    assert len(processes) >= workers + 1
    one.process.kill()
    began = time.monotonic()
    one.ended(SECONDS)
    while not gone(processes):
        assert time.monotonic() - began < SECONDS, "workers outlive their driver"
        time.sleep(0.005)
    took = time.monotonic() - began
    train(address("good"), launcher=local(workers), run_dir=folder, resume=True)
    assert_equal(final_state(folder), wanted)
    return took


def step_of(run_dir: Path) -> int:
    """The last step that is written down, -1 before the first event."""
    try:
        found = re.findall(r'"step":(\d+)', (run_dir / "events.jsonl").read_text())
    except FileNotFoundError:
        return -1
    return int(found[-1]) if found else -1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_driver_that_is_killed_takes_its_workers_along_and_the_run_goes_on_bit_for_bit(
    workers: int,
    tmp_path: Path,
    driver: Callable[..., Driver],
    undisturbed: Callable[..., dict[str, torch.Tensor]],
) -> None:
    kill_and_resume(workers, workers, tmp_path / "run", undisturbed("good", workers), driver)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [1, 2])
def test_twenty_drivers_killed_at_random_steps(
    workers: int,
    tmp_path: Path,
    driver: Callable[..., Driver],
    undisturbed: Callable[..., dict[str, torch.Tensor]],
) -> None:
    wanted = undisturbed("good", workers)
    took = [kill_and_resume(seed, workers, tmp_path / str(seed), wanted, driver) for seed in range(20)]
    print(f"{workers} workers: all gone after {max(took):.2f} s at most, {sorted(took)[10]:.2f} s in the median")


# Disks and run directories


@pytest.mark.thorough
def test_a_full_disk_is_told_while_it_trains_and_fails_the_run_at_its_end(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_RANK", "0")
    monkeypatch.setenv("FAULT_STEP", "30")
    monkeypatch.setenv("FAULT_PACE", "0.01")
    told = command(
        *("train", address("disk"), "--strategy", "data_parallel", "--workers", 2),
        *("--run-dir", tmp_path / "run", "--policy", "policy(checkpoint_every='3 steps')"),
    )
    assert told.status == failures.FAILED
    error = told.err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "step-00000060" in error
    assert "Traceback" not in told.err
    assert "goes on without it" in told.out
    assert 0 < latest_step(tmp_path / "run") < 30  # what was there before is whole
    train(address("good"), launcher=local(2), run_dir=tmp_path / "run", resume=True)
    assert latest_step(tmp_path / "run") == 60


def test_a_journal_that_cannot_be_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setenv("FAULT_PACE", "0.02")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    template().wait_ready()
    events = run(address("good"), "single_device", launcher=local(1), run_dir=tmp_path / "run")
    next(events)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))  # of this process, the driver, alone
    try:
        with (
            within(SECONDS, "the end of the run"),
            warnings.catch_warnings(action="ignore"),
            pytest.raises(CheckpointError, match="cannot write the events of the run"),
        ):
            for _ in events:
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_run_directory_that_cannot_be_made_is_told(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    told = command("train", address("good"), "--strategy", "single_device", "--run-dir", tmp_path / "file" / "run")
    assert told.status == failures.FAILED
    assert str(tmp_path / "file" / "run") in told.err.splitlines()[-1]
    assert "Traceback" not in told.err


def test_resuming_refuses_what_is_not_this_run(command: Command, tmp_path: Path) -> None:
    def resume(name: str, folder: Path, *more: str) -> Outcome:
        return command("train", address(name), "--run-dir", folder, "--launcher", "local(workers=1)", *more)

    there = tmp_path / "there"
    train(address("good"), "single_device", launcher=local(1), run_dir=there, steps=10)

    told = resume("good", there, "--strategy", "single_device")
    assert (told.status, "already holds a run, at step 10: use --resume" in told.err) == (failures.WRONG_USE, True)

    told = resume("good", tmp_path / "nowhere", "--resume")
    assert (told.status, "holds no run" in told.err) == (failures.WRONG_USE, True)
    assert not (tmp_path / "nowhere").exists()

    told = resume("changed", there, "--resume")
    assert (told.status, "batch_size was 16 and is 8" in told.err) == (failures.WRONG_USE, True)

    model = there / "checkpoints" / "latest" / "model.safetensors"
    os.truncate(model, model.stat().st_size - 8)
    told = resume("good", there, "--resume")
    assert told.status == failures.FAILED
    assert str(model.resolve()) in told.err
    for line in told.err.splitlines():
        assert "Traceback" not in line


# Wrong use

WRONG = [
    (["no_colon.py"], "write FILE:NAME"),
    (["nowhere.py:workload"], "there is no file nowhere.py"),
    (["no_such_package.module:workload"], "there is no module no_such_package.module"),
    ([f"{WORKLOADS}:god"], "god is not there: did you mean good?"),
    ([f"{WORKLOADS}:not_a_workload"], "is a str, not an apportion.Workload"),
    ([f"{WORKLOADS}:iterable"], "an IterableDataset"),
    ([f"{WORKLOADS}:empty"], "an empty dataset"),
    ([f"{WORKLOADS}:good", "--policy", "policy(keep=0)"], "at least 1 checkpoint"),
    ([f"{WORKLOADS}:good", "--policy", "often"], "must be written policy(...)"),
    ([f"{WORKLOADS}:good", "--launcher", "local(workers=0)"], "workers=0 must be a whole number of at least 1"),
    ([f"{WORKLOADS}:good", "--launcher", "lokal"], "did you mean local?"),
    ([f"{WORKLOADS}:good", "--resume"], "needs run_dir"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_use_is_told_with_the_cure(
    arguments: list[str], words: str, command: Command, tmp_path: Path, within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with within(SECONDS, "the answer"):
        told = command("train", *arguments, "--strategy", "data_parallel", "--workers", 1)
    assert told.status == failures.WRONG_USE
    assert told.err.startswith("error: ")
    assert words in told.err
    assert told.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("written", "name", "words"),
    [
        ("data_paralel", "good", "did you mean data_parallel?"),
        ("data_parallel(", "good", "does not parse"),
        ("data_parallel(microbatch=2)", "good", "data_parallel has no 'microbatch'"),
        ("data_parallel", "small_batch", "batch_size=2 cannot feed 3 workers"),
        ("single_device", "good", "single_device runs in one process, not in 3"),
    ],
)
def test_a_strategy_that_cannot_be_is_told_with_the_cure(
    written: str, name: str, words: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = command("train", address(name), "--strategy", written, "--workers", 3)
    assert told.status == failures.WRONG_USE
    assert words in told.err
    errors = [line for line in told.err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1
    assert not list(tmp_path.iterdir())


def test_more_workers_than_cores_warns_once(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 1)
    told = command("train", address("good"), "--strategy", "data_parallel", "--workers", 2, "--run-dir", tmp_path)
    assert told.status == 0
    assert told.err.count("warning: ") == 1
    assert "2 workers x 1 threads" in told.err


@pytest.mark.thorough
def test_output_without_a_reader_stops_nothing(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "train", address("good"), "--strategy", "single_device", "--steps", 20]
    with subprocess.Popen(
        [*map(str, command), "--run-dir", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FAULT_PACE": "0.1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().endswith("\n")
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 0, err
    assert err == ""
    assert latest_step(tmp_path / "run") == 20


def test_python_gets_the_same_kinds_of_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot feed 3 workers"):
        train(address("small_batch"), "data_parallel", launcher=local(3), run_dir=tmp_path / "run")
    assert issubclass(CheckpointError, ApportionError)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        train(address("good"), "single_device", launcher=local(1), run_dir=tmp_path / "file" / "run")
    assert apportion.run is not None
