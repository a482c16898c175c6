"""The process of the command: where it keeps what it remembers, what ends it, and what does not."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WORK = """
import sys, threading, time
import torch, apportion

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        time.sleep(PACE)
        return torch.full((4,), i / 64.0), i % 4

def classifier(): return torch.nn.Linear(4, 4)
def deep(): return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

def work(model, **changes):
    given = dict(
        model=model, data=Rows, loss=torch.nn.functional.cross_entropy, batch_size=16, epochs=EPOCHS,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    return apportion.Workload(**{**given, **changes})

workload = work(classifier)
another = work(deep)
"""
SECONDS = 90.0
"""The seconds that a command may take on a busy machine."""


def written(folder: Path, *, pace: float = 0.0, epochs: int = 2, more: str = "") -> Path:
    """A workload whose rows take this many seconds each."""
    text = WORK.replace("PACE", str(pace)).replace("EPOCHS", str(epochs)) + more
    (folder / "work.py").write_text(text)
    return folder


def train(*words: str, name: str = "workload") -> list[str]:
    given = ["train", f"work.py:{name}", "--run-dir", "run", "--strategy", "data_parallel", "--workers", "2", *words]
    return [sys.executable, "-m", "apportion", *given]


@contextmanager
def started(
    command: Sequence[str], folder: Path, *, env: Mapping[str, str | None] | None = None, **options: object
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a command, which is killed where the test leaves it running."""
    environment = {**os.environ, **(env or {})}
    given = {name: value for name, value in environment.items() if value is not None}
    process = subprocess.Popen(command, cwd=folder, env=given, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(SECONDS)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def saved(folder: Path) -> int:
    """The number of checkpoints of the run."""
    return len(list((folder / "run" / "checkpoints").glob("step-*")))


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
@pytest.mark.parametrize("name", ["workload", "another"])
def test_a_user_without_a_name_and_a_home_trains(name: str, tmp_path: Path) -> None:
    nameless = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
    if subprocess.run([*nameless, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces")
    unset = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME"))
    printed = []
    for run in ("one", "two"):
        command = [*nameless, *train(name=name), "--run-dir", run]
        with started(
            command, written(tmp_path), env=unset, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            out, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, out.decode()
        printed.append(out.decode())
    assert "Traceback" not in printed[0] + printed[1]


@pytest.mark.thorough
def test_a_folder_that_others_could_have_made_is_not_trusted_with_caches(tmp_path: Path) -> None:
    nameless = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
    if shutil.which("unshare") is None or subprocess.run([*nameless, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces")
    temporary = tmp_path / "t"
    (temporary / "apportion-12345").mkdir(parents=True)
    (temporary / "apportion-12345").chmod(0o777)
    unset = {**dict.fromkeys(("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME")), "TMPDIR": str(temporary)}
    with started([*nameless, *train()], written(tmp_path), env=unset, stdout=subprocess.PIPE) as process:
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert not list((temporary / "apportion-12345").iterdir())
    assert [path.name for path in temporary.iterdir() if path.name.startswith("apportion-")] == ["apportion-12345"]


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_to_end_saves_the_last_step(number: signal.Signals, tmp_path: Path) -> None:
    command = train("--no-check", "--policy", "policy(checkpoint_every='1000 steps')")
    folder = written(tmp_path, pace=0.002, epochs=5000)
    with started(command, folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        while b"step 1/" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number
    assert f"told to end by {number.name}; step " in err.decode()
    assert saved(tmp_path) == 1


@pytest.mark.thorough
def test_a_hangup_that_is_ignored_ends_nothing(tmp_path: Path) -> None:
    folder = written(tmp_path, pace=0.004, epochs=8)
    with started(["nohup", *train("--no-check")], folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        while b"step 1/" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert b"steps        32" in out


@contextmanager
def at_a_terminal(command: Sequence[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process of a command that prints to a terminal, and the end of it that a window has."""
    window, terminal = pty.openpty()
    try:
        with started(command, folder, stdin=terminal, stdout=terminal, stderr=terminal) as one:
            os.close(terminal)
            terminal = -1
            yield one, window
    finally:
        for end in (window, terminal):
            try:
                os.close(end)
            except OSError:
                pass


PRINTING = """
class Printing(Rows):
    def __getitem__(self, i):
        print("row", i, flush=True)
        print("row", i, file=sys.stderr, flush=True)
        return super().__getitem__(i)

printing = work(classifier, data=Printing)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["workload", "printing"])
def test_a_terminal_that_goes_away_stops_nothing_where_its_hangup_is_ignored(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, pace=0.004, epochs=8, more=PRINTING)
    ignoring = ["setsid", "--ctty", "sh", "-c", 'trap "" HUP; exec "$@"', "sh", *train("--no-check", name=name)]
    with at_a_terminal(ignoring, folder) as (process, window):
        read = b""
        while b"steps" not in read and b"row" not in read:
            read += os.read(window, 4096)
        os.close(window)
        assert process.wait(SECONDS) == 0
    assert (folder / "run" / "checkpoints" / "step-00000032").is_dir()


@pytest.mark.thorough
def test_a_terminal_that_goes_away_has_the_run_saved(tmp_path: Path) -> None:
    folder = written(tmp_path, pace=0.004, epochs=5000)
    command = train("--no-check", "--policy", "policy(checkpoint_every='9999 steps')")
    with at_a_terminal(["setsid", "--ctty", *command], folder) as (process, window):
        read = b""
        while b"/20000 steps" not in read:
            read += os.read(window, 4096)
        os.close(window)
        assert process.wait(SECONDS) == 129
    assert saved(folder) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "> /dev/full 2>&-"])
def test_streams_that_were_closed_stop_nothing(closed: str, tmp_path: Path) -> None:
    folder = written(tmp_path, more=PRINTING)
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *train("--no-check", name="printing")]
    with started(command, folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.communicate(timeout=SECONDS)
    if "full" in closed:  # a disk without room is no terminal that went away: what is printed may be the result
        assert process.returncode != 0
        return
    assert process.returncode == 0
    assert (folder / "run" / "checkpoints" / "step-00000008").is_dir()


@pytest.mark.thorough
def test_output_that_has_no_reader_any_more_stops_nothing(tmp_path: Path) -> None:
    folder = written(tmp_path, pace=0.004, epochs=8, more=PRINTING)
    with started(
        train("--no-check", name="printing"), folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        process.stderr.close()
        process.stdout = process.stderr = None
        assert process.wait(SECONDS) == 0
    assert (folder / "run" / "checkpoints" / "step-00000032").is_dir()


THREADS = """
import atexit, concurrent.futures

def wait_for_ever():
    while True:
        time.sleep(60)

threading.Thread(target=wait_for_ever).start()
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(wait_for_ever)
atexit.register(lambda: print("at exit"))

def broken(outputs, targets): raise ValueError("a loss that fails")
failing = work(classifier, loss=broken)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "status"), [("workload", 0), ("failing", 2), ("missing", 2)])
def test_a_thread_that_never_ends_does_not_keep_a_launched_rank(name: str, status: int, tmp_path: Path) -> None:
    folder = written(tmp_path, more=THREADS)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [*train("--no-check", name=name)[:6], "--strategy", "single_device", "--launcher", "env"]
    with started(
        command, folder, env={**ranks, "MASTER_PORT": "29511"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == status, err.decode()
    assert (b"at exit" in out) == (name != "missing")  # a name that is not there is refused before the file is run
    assert (b"checkpoint" in out) == (status == 0)


@pytest.mark.thorough
def test_a_thread_that_never_ends_does_not_keep_an_export(tmp_path: Path) -> None:
    folder = written(tmp_path, more=THREADS)
    with started(train("--no-check", name="another"), folder, stdout=subprocess.PIPE) as process:
        process.communicate(timeout=SECONDS)
    command = [sys.executable, "-m", "apportion", "export", "run", "--target", "onnx", "--trust"]
    with started(command, folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err.decode()
    assert b"at exit" in out


def test_a_thread_is_not_forced_to_end_where_the_program_is_not_the_command() -> None:
    """The main thread of a program that imports the package waits for its threads, as Python does."""
    program = (
        "import threading, time, apportion\n"
        "def late():\n    time.sleep(0.2); print('late')\n"
        "threading.Thread(target=late).start()\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS)
    assert out.stdout == "late\n"
    assert threading.main_thread().is_alive()


IN_A_SET = """
class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in {"age", "mood", "place", "kind"}})
    def forward(self, x): return sum(head(x) for head in self.heads.values())

class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in {"first", "inner", "outer", "last"}:
            self.register_module(name, torch.nn.Linear(4, 4))
    def forward(self, x): return self.last(self.outer(self.inner(self.first(x))))

heads, stack = work(Heads), work(Stack)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layer"), [("heads", "heads."), ("stack", "er.")])
def test_layers_in_the_order_of_a_set_are_named(name: str, layer: str, tmp_path: Path) -> None:
    """The order of a set of texts is another one in each process, and so are the weights that a seed gives."""
    folder = written(tmp_path, more=IN_A_SET)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [*train("--no-check", name=name)[:6], "--strategy", "data_parallel", "--launcher", "env"]

    def rank(number: int) -> Any:
        own = {"RANK": str(number), "LOCAL_RANK": str(number), "PYTHONHASHSEED": str(number + 1)}
        return started(command, folder, env={**world, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    with rank(0) as first, rank(1) as second:
        told = [process.communicate(timeout=SECONDS)[1].decode() for process in (first, second)]
    assert (first.returncode, second.returncode) == (2, 2), told
    assert "of the model=" in told[0]
    assert layer in told[0]
    assert "shapes=" not in told[0]
