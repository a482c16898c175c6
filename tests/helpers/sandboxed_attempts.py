"""A script that tries to change the user's files in many ways: it prints one line of JSON with the outcome of each.

``python -m attempts HOME ELSEWHERE FOLDER``. It runs as any script does, and knows nothing of a sandbox.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
HOME, ELSEWHERE, REAL = map(Path, sys.argv[1:4] if __name__ == "__main__" else ("", "", ""))
"""The home directory by its absolute path, a folder that is none of the script's, and the script's own real folder."""


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("more\n")
    assert path.read_text().endswith("more\n")


def overwrite(path: Path) -> None:
    path.write_bytes(b"new")
    assert path.read_bytes() == b"new"


def rebuild(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "new.txt").write_text("new")
    assert [path.name for path in folder.iterdir()] == ["new.txt"]


def move(source: Path, target: Path) -> None:
    os.rename(source, target)
    assert target.exists()
    assert not source.exists()


def link_outward(link: Path, target: Path) -> None:
    link.symlink_to(target)
    (link / "through_link").write_text("x")


def database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("create table if not exists t (x)")
        connection.execute("insert into t values (1)")


def save(path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, path)
    assert torch.load(path)["weight"].sum() == 3


def save_safely(path: Path) -> None:
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:  # it is not installed
        return
    save_file({"weight": torch.ones(3)}, path)
    assert load_file(path)["weight"].sum() == 3


def shared_memory() -> None:
    memory = SharedMemory(create=True, size=16)
    memory.close()
    memory.unlink()


def temporary() -> None:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"left behind")


def shell(path: Path) -> None:
    subprocess.run(["sh", "-c", f"echo x > '{path}'"], check=True, stderr=subprocess.PIPE)


def compiled(path: Path) -> None:
    descriptor = ctypes.CDLL(None, use_errno=True).creat(os.fsencode(path), 0o600)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "creat")
    os.close(descriptor)


def connect() -> None:
    with socket.socket() as client:
        client.settimeout(3)
        client.connect(("192.0.2.1", 80))


def datagram() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", ("192.0.2.1", 80))


def call_logger() -> None:
    urllib.request.urlopen("http://api.wandb.ai/graphql", timeout=3)


def loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass


def cache_bytecode() -> None:
    import helper_module  # type: ignore[import-not-found]

    assert helper_module.VALUE == 3


def forked(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            path.write_text("from a loader process")
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise OSError("the forked process could not write")


ATTEMPTS: dict[str, Callable[[], object]] = {
    "checkpoint": lambda: save(HERE / "checkpoint.pt"),
    "checkpoint over a large one": lambda: save(HERE / "large.pt"),
    "safetensors over a large one": lambda: save_safely(HERE / "large.safetensors"),
    "checkpoint by a relative path": lambda: save(Path("relative.pt")),
    "append to a log": lambda: append(HERE / "train.log"),
    "append to a large file": lambda: append(HERE / "large.log"),
    "overwrite a file": lambda: overwrite(HERE / "notes.txt"),
    "remove a file": lambda: (HERE / "old.ckpt").unlink(),
    "remove a folder and make it again": lambda: rebuild(HERE / "runs"),
    "rename": lambda: move(HERE / "best.ckpt", HERE / "last.ckpt"),
    "rename a folder": lambda: move(HERE / "folder", HERE / "renamed"),
    "change a mode": lambda: (HERE / "train.log").chmod(0o400),
    "bytecode": cache_bytecode,
    "database": lambda: database(HERE / "runs.sqlite"),
    "shell in the folder": lambda: shell(Path("shell.txt")),
    "fork in the folder": lambda: forked(HERE / "forked.txt"),
    "cache": lambda: overwrite(Path.home() / ".cache" / "library" / "entry"),
    "lock in a cache": lambda: append(Path.home() / ".cache" / "huggingface" / "hub" / "model.lock"),
    "new folder in a cache": lambda: (Path.home() / ".cache" / "new" / "deep").mkdir(parents=True),
    "temporary file": temporary,
    "shared memory": shared_memory,
    "loopback": loopback,
    "home by its path": lambda: overwrite(HOME / "results.txt"),
    "script's folder by its path": lambda: overwrite(REAL / "notes.txt"),
    "fixed temporary path": lambda: overwrite(Path(f"/tmp/apportion-sandbox-{os.getuid()}")),
    "fork by its path": lambda: forked(REAL / "forked_by_path.txt"),
    "link outward": lambda: link_outward(HERE / "link", ELSEWHERE),
    "elsewhere": lambda: overwrite(ELSEWHERE / "new.txt"),
    "remove elsewhere": lambda: (ELSEWHERE / "precious.txt").unlink(),
    "rename elsewhere": lambda: move(ELSEWHERE / "precious.txt", ELSEWHERE / "other.txt"),
    "folder elsewhere": lambda: (ELSEWHERE / "folder").mkdir(),
    "checkpoint elsewhere": lambda: save(ELSEWHERE / "checkpoint.pt"),
    "database elsewhere": lambda: database(ELSEWHERE / "runs.sqlite"),
    "mode elsewhere": lambda: (ELSEWHERE / "precious.txt").chmod(0o400),
    "connection": connect,
    "datagram": datagram,
    "logger's call": call_logger,
    "shell elsewhere": lambda: shell(ELSEWHERE / "shell.txt"),
    "compiled code elsewhere": lambda: compiled(ELSEWHERE / "compiled.txt"),
}


def main() -> None:
    outcomes, seconds = {}, {}
    for name, attempt in ATTEMPTS.items():
        since = time.monotonic()
        try:
            attempt()
            outcomes[name] = "done"
        except (OSError, subprocess.CalledProcessError, sqlite3.OperationalError, RuntimeError) as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        seconds[name] = round(time.monotonic() - since, 3)
    print({name: value for name, value in seconds.items() if value > 0.05})
    print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
