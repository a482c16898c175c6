"""A script in a sandbox, of each kind, sees what it writes and leaves the user's files, and other machines, alone."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sandboxed_attempts

import apportion
from apportion.errors import ApportionError
from apportion.script_check.sandbox.mirror import LARGEST_COPIED
from apportion.script_check.sandbox.namespaces import CONFIGURATIONS
from apportion.script_check.sandbox.sandbox import KINDS, Command, Sandbox
from apportion.script_check.sandbox.scope import Scope

INSIDE = (
    "checkpoint", "checkpoint over a large one", "checkpoint by a relative path", "append to a log",
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
    for path in ("large.pt", "large.log"):
        (user.project / path).write_bytes(b"x" * LARGEST_COPIED + b"\n")
    (user.project / "helper_module.py").write_text("VALUE = 3\n")
    shutil.copy(sandboxed_attempts.__file__, user.project / "attempts.py")
    for path in ("library/entry", "huggingface/hub/model.lock"):
        (user.home / ".cache" / path).write_text("the user's\n")
    (user.elsewhere / "precious.txt").write_text("the user's\n")


@contextmanager
def opened(user: User, records: Path, kind: str) -> Iterator[Sandbox]:
    records.mkdir()
    scope = Scope(str(user.project), str(user.project), str(user.home), ("/tmp",))
    with ExitStack() as stack:
        try:
            sandbox = stack.enter_context(Sandbox(scope, records, records, kind))
        except ApportionError as error:
            pytest.skip(str(error))
        if sandbox.kind != kind:
            pytest.skip(f"this kernel has no {kind}: {sandbox.sentence}")
        yield sandbox


def run(sandbox: Sandbox, user: User, records: Path, *arguments: str) -> str:
    """Runs a module in a sandbox and returns what it prints."""
    environment = {**os.environ, "HOME": str(user.home), "PYTHONPATH": SOURCE}
    output = records / "output"
    (rank,) = sandbox.start([Command([sys.executable, "-m", *arguments], environment, output)])
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
