"""A script in a sandbox, of each kind, sees what it writes and leaves the user's files, and other machines, alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sandboxed_attempts

import apportion
from apportion.errors import ApportionError
from apportion.script_check.sandbox import mirror
from apportion.script_check.sandbox.mirror import LARGEST_COPIED, Mirror
from apportion.script_check.sandbox.namespaces import CONFIGURATIONS
from apportion.script_check.sandbox.sandbox import KINDS, Command, Sandbox
from apportion.script_check.sandbox.scope import FileScope, scope_of

INSIDE = (
    "checkpoint", "checkpoint over a large one", "safetensors over a large one", "checkpoint by a relative path",
    "append to a log",
    "append to a large file", "overwrite a file", "remove a file", "remove a folder and make it again", "rename",
    "rename a folder", "change a mode", "bytecode", "database", "shell in the folder", "fork in the folder", "cache",
    "lock in a cache", "new folder in a cache", "temporary file", "shared memory", "loopback",
)  # fmt: skip
"""What succeeds in each kind of sandbox."""
BY_PATH = ("home by its path", "script's folder by its path", "fixed temporary path", "fork by its path")
"""What succeeds in namespaces, where the user's paths lead to overlays."""
OF_PROGRAMS = ("shell elsewhere", "compiled code elsewhere")
"""What Python does not see."""
OF_PROGRAMS_LEAVE = ("elsewhere/shell.txt", "elsewhere/compiled.txt")
WAITS = """
import subprocess, sys
command = [sys.executable, "-c", "import signal; signal.alarm(60); signal.pause()", *sys.argv[1:]]
child = subprocess.Popen(command, start_new_session=True)
print("waits", flush=True)
child.wait()
"""
"""A script that waits a minute for a process in a session of its own; both have its arguments."""
DRIVER = """
import os, sys, time
from pathlib import Path
import faulthandler; faulthandler.dump_traceback_later(60, exit=True)
from apportion.script_check.sandbox.sandbox import Command, Sandbox
from apportion.script_check.sandbox.scope import FileScope

project, home, folder, kind = sys.argv[1:]
os.chdir(project)
records = Path(folder, "records")
records.mkdir(parents=True)
with Sandbox(FileScope(project, project, home, ("/tmp",)), records, Path(folder), kind) as sandbox:
    output = records / "output"
    (rank,) = sandbox.start([Command([sys.executable, "-m", "waits", folder], os.environ, output)])
    while not output.read_bytes():
        time.sleep(0.01)
    print(rank.pid, sandbox._leader.pid, flush=True)
    print(rank.wait(), flush=True)
"""
"""A driver that runs it, and prints the process numbers of the rank and of the leader, and how the rank has ended."""
THOROUGH = pytest.mark.thorough
FURTHER = ("visible processes", "hook")
SOURCE = str(Path(apportion.__file__).parents[1])


@dataclass(frozen=True)
class User:
    """Folders of a user's: ``project`` with a script, ``home``, and ``elsewhere``, which is none of the script's."""

    folder: Path

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def elsewhere(self) -> Path:
        return self.folder / "elsewhere"

    def files(self) -> dict[str, bytes | int]:
        """Everything in them: the contents of files and the modes of folders."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else path.stat().st_mode
            for path in self.folder.rglob("*")
        }


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """Outside of /tmp, which is a folder for temporary files."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        user = User(Path(folder))
        _fill(user)
        monkeypatch.chdir(user.project)
        yield user
        os.chdir("/")


def _fill(user: User) -> None:
    for path in ("runs/old", "folder"):
        (user.project / path).mkdir(parents=True)
    for path in ("library", "huggingface/hub"):
        (user.home / ".cache" / path).mkdir(parents=True)
    user.elsewhere.mkdir()
    for path in ("train.log", "notes.txt", "old.ckpt", "best.ckpt", "runs/old/events", "folder/file"):
        (user.project / path).write_text("the user's\n")
    for path in ("large.pt", "large.log", "large.safetensors"):
        (user.project / path).write_bytes(b"x" * LARGEST_COPIED + b"\n")
    (user.project / "helper_module.py").write_text("VALUE = 3\n")
    shutil.copy(sandboxed_attempts.__file__, user.project / "attempts.py")
    for path in ("library/entry", "huggingface/hub/model.lock"):
        (user.home / ".cache" / path).write_text("the user's\n")
    (user.elsewhere / "precious.txt").write_text("the user's\n")
    (user.project / "waits.py").write_text(WAITS)


@contextmanager
def opened(user: User, records: Path, kind: str) -> Iterator[Sandbox]:
    records.mkdir()
    scope = FileScope(str(user.project), str(user.project), str(user.home), ("/tmp",))
    with ExitStack() as stack:
        try:
            sandbox = stack.enter_context(Sandbox(scope, records, records, kind))
        except ApportionError as error:
            pytest.skip(str(error))
        if sandbox.kind != kind:
            pytest.skip(f"this kernel has no {kind}: {sandbox.sentence}")
        yield sandbox


def environment(user: User) -> dict[str, str]:
    return {**os.environ, "HOME": str(user.home), "PYTHONPATH": SOURCE}


def run(sandbox: Sandbox, user: User, records: Path, *arguments: str) -> str:
    """Runs a module in a sandbox and returns what it prints."""
    output = records / "output"
    (rank,) = sandbox.start([Command([sys.executable, "-m", *arguments], environment(user), output)])
    status = rank.wait(60)
    assert status == 0, output.read_text()
    return output.read_text()


@pytest.mark.processes
@pytest.mark.parametrize("kind", [pytest.param(k, marks=THOROUGH if k in FURTHER else ()) for k in (*KINDS, "hook")])
def test_the_users_files_stay_as_they_are(user: User, tmp_path: Path, kind: str) -> None:
    records = tmp_path / "records"
    before, memory = user.files(), set(os.listdir("/dev/shm"))
    with opened(user, records, kind) as sandbox:
        paths = map(str, (user.home, user.elsewhere, user.project))
        outcomes = json.loads(run(sandbox, user, records, "attempts", *paths).splitlines()[-1])
    refused = {name for name, outcome in outcomes.items() if outcome != "done"}
    held = set(sandboxed_attempts.ATTEMPTS) - set(INSIDE)
    held -= set(BY_PATH) if kind in CONFIGURATIONS else {"link outward"}  # what it leads to is copied first
    held -= set(OF_PROGRAMS) if kind == "hook" else set()
    if kind in CONFIGURATIONS and CONFIGURATIONS[kind].user:
        held |= {"rename a folder"}  # of the user's: the kernel has programs copy it
    assert refused == held, {name: outcomes[name] for name in refused ^ held}
    after = user.files()
    if kind == "hook":
        after = {path: content for path, content in after.items() if path not in OF_PROGRAMS_LEAVE}
    assert after == before
    assert set(os.listdir("/dev/shm")) == memory
    assert not os.path.exists(f"/tmp/apportion-sandbox-{os.getuid()}")


def processes_with(argument: str) -> list[str]:
    """The command lines of all processes that have an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(path.read_text())
    return found


@pytest.mark.processes
@pytest.mark.parametrize("killed", ["driver", "leader", "interrupted driver"])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=THOROUGH if k in FURTHER else ()) for k in (*KINDS, "hook")])
def test_no_process_outlives_a_sandbox(user: User, tmp_path: Path, kind: str, killed: str) -> None:
    folder = str(tmp_path / "check")
    command = [sys.executable, "-c", DRIVER, str(user.project), str(user.home), folder, kind]
    driver = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": SOURCE}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with driver, ExitStack() as stack:
        stack.callback(driver.kill)
        assert driver.stdout is not None
        numbers = driver.stdout.readline().split()
        if not numbers:
            pytest.skip(driver.communicate()[1])
        rank, leader = map(int, numbers)
        assert os.path.exists(f"/proc/{rank}")
        assert folder in Path(f"/proc/{rank}/cmdline").read_text().split("\0")  # as this process sees its number
        assert len(processes_with(folder)) == 3  # with the driver
        victim = leader if killed == "leader" else driver.pid
        os.kill(victim, signal.SIGINT if killed == "interrupted driver" else signal.SIGKILL)
        if killed == "leader":
            assert driver.stdout.readline() == "-9\n"
        driver.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while processes_with(folder) or (killed == "driver" and os.path.exists(folder)):
        assert time.monotonic() < deadline, (processes_with(folder), os.path.exists(folder))
        time.sleep(0.02)


SEMAPHORES = """
import multiprocessing, signal
from multiprocessing import shared_memory
lock = multiprocessing.get_context("spawn").Lock()
block = shared_memory.SharedMemory(create=True, size=8)
print("sem." + lock._semlock.name.strip("/"), block.name.strip("/"), flush=True)
signal.alarm(60)
signal.pause()
"""
"""A script that uses a semaphore, as loader processes of another context than fork do, and shared memory."""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["landlock", pytest.param("hook", marks=THOROUGH)])
def test_shared_memory_of_killed_processes_is_removed(user: User, tmp_path: Path, kind: str) -> None:
    (user.project / "semaphores.py").write_text(SEMAPHORES)
    output = tmp_path / "records" / "output"
    with opened(user, tmp_path / "records", kind) as sandbox:
        sandbox.start([Command([sys.executable, "-m", "semaphores"], environment(user), output)])
        deadline = time.monotonic() + 30
        while not output.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        names = output.read_text().split()
        assert set(names) <= set(os.listdir("/dev/shm"))
    assert not set(names) & set(os.listdir("/dev/shm"))


SHARES = """
import sys, time
from pathlib import Path
word, waited = sys.argv[1:]
Path(word).write_text("written")
deadline = time.monotonic() + 30
while not (Path(waited).exists() and Path(waited).read_text()) and time.monotonic() < deadline:
    time.sleep(0.01)
print(Path(waited).read_text(), sorted(path.name for path in Path().glob("word*")))
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["unprivileged", "landlock"])
def test_ranks_see_what_others_write_and_another_sandbox_does_not(user: User, tmp_path: Path, kind: str) -> None:
    (user.project / "shares.py").write_text(SHARES)
    with opened(user, tmp_path / "first", kind) as sandbox:
        commands = [
            Command([sys.executable, "-m", "shares", *words], environment(user), tmp_path / "first" / words[0])
            for words in (("word1", "word2"), ("word2", "word1"))
        ]
        assert [rank.wait(60) for rank in sandbox.start(commands)] == [0, 0]
        assert [command.output.read_text().split()[0] for command in commands] == ["written"] * 2
        after = run(sandbox, user, tmp_path / "first", "shares", "word3", "word1")  # as a run that resumes
        assert "['word1', 'word2', 'word3']" in after
    with opened(user, tmp_path / "second", kind) as sandbox:
        assert "['word1']" in run(sandbox, user, tmp_path / "second", "shares", "word1", "word1")
    assert not list(user.project.glob("word*"))


def test_a_folder_that_is_too_large_for_a_copy_is_refused(user: User, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mirror, "MOST_FILES", 3)
    scope = FileScope(str(user.project), str(user.project), str(user.home), ())
    with pytest.raises(ApportionError, match=r"project of the script has to be copied.* more than 3 files"):
        Mirror.build(tmp_path / "mirror", scope, tmp_path)


def test_a_copy_has_the_paths_of_the_user_below_its_root(user: User, tmp_path: Path) -> None:
    scope = FileScope(str(user.project), str(user.folder), str(user.home), ())
    copy = Mirror.build(tmp_path / "mirror", scope, tmp_path)
    place = f"{copy.root}{user.project}"
    assert copy.argument(f"--out={user.project}/run") == f"--out={place}/run"
    assert copy.argument("--device=/dev/null") == "--device=/dev/null"
    assert copy.argument("relative") == "relative"
    assert Path(place, "notes.txt").read_text() == "the user's\n"
    assert not Path(place, "notes.txt").is_symlink()
    assert Path(place, "large.pt").is_symlink()
    assert Path(place, "..", "elsewhere", "precious.txt").read_text() == "the user's\n"  # by a link
    assert copy.environment({"HF_HOME": "/opt/hub"})["HF_HOME"] == f"{copy.root}/opt/hub"


def test_the_scope_has_what_arguments_and_variables_name(user: User) -> None:
    variables = {"HOME": str(user.home), "HF_HOME": str(user.elsewhere), "PATH": "/usr/bin:/bin", "NONE": "/nowhere"}
    scope = scope_of(
        user.project, ["--out", f"--log={user.folder}/new/run", "../data", "--device=/dev/null"], variables
    )
    assert scope.needed == (str(user.project), str(user.home))  # the current folder is that of the script
    assert scope.named == (str(user.home), str(user.elsewhere), str(user.folder))
    assert "/tmp" in scope.temporary
