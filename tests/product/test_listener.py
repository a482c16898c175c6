"""Ranks that others have started meet at rank 0's port, whatever else connects to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAM = """
import torch, apportion
input()
world = apportion.World.from_env(device="cpu")
total = torch.ones(())
world.group().all_reduce(total).wait()
world.close()
print(f"{world.rank} of {world.size}: {total.item():g}", flush=True)
"""
SECONDS = 40.0


def own_address() -> str:
    """The address of this host by which others reach it: at that of loopback ranks meet without a port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this host has no network")
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.create_server((own_address(), 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def rank(folder: Path, number: int, size: int, port: int, secret: Path) -> Iterator[subprocess.Popen[str]]:
    """A rank of a run on several hosts, each of which has one. It joins once it is given a line."""
    place = {"MASTER_ADDR": own_address(), "MASTER_PORT": str(port)}
    own = {"RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment = {**os.environ, **place, **own, "APPORTION_SECRET_FILE": str(secret)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=environment, text=True, stdin=-1, stdout=-1, stderr=-1
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def join(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def secret_in(folder: Path, words: str) -> Path:
    path = folder / words
    path.write_text(words * 8)
    path.chmod(0o600)
    return path


def connect(port: int) -> socket.socket:
    """Connects to rank 0 as a stranger, as soon as it listens."""
    place, end = (own_address(), port), time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(place, 5)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.02)


def crowd(port: int, *, words: bytes, times: int = 40, at_once: int = 64) -> None:
    """Strangers who stay, one more than there is room for, of whom the first hangs up while it is closed."""
    for _ in range(times):
        with ExitStack() as held:
            strangers = [held.enter_context(connect(port)) for _ in range(at_once)]
            for stranger in strangers:
                stranger.sendall(words)
            time.sleep(0.02)
            held.enter_context(connect(port))
            strangers[0].close()


@pytest.mark.parametrize(
    "words", [b"", pytest.param(b"GET / HTTP/1.1\r\n", marks=pytest.mark.thorough)], ids=["silent", "http"]
)
def test_a_rank_is_let_in_after_any_number_of_strangers(tmp_path: Path, words: bytes) -> None:
    port, secret = free_port(), secret_in(tmp_path, "secret")
    with rank(tmp_path, 0, 2, port, secret) as first, rank(tmp_path, 1, 2, port, secret) as second:
        join(first)
        crowd(port, words=words)
        assert second.communicate("\n", timeout=SECONDS)[0] == "1 of 2: 2\n"
        assert first.communicate(timeout=SECONDS)[0] == "0 of 2: 2\n"


@pytest.mark.thorough
def test_a_rank_with_another_secret_is_refused_by_that_cause_among_strangers_too(tmp_path: Path) -> None:
    port = free_port()
    own, other = secret_in(tmp_path, "secret"), secret_in(tmp_path, "another")
    with rank(tmp_path, 0, 2, port, own) as first, rank(tmp_path, 1, 2, port, other) as second:
        join(first)
        crowd(port, words=b"", times=2)
        errors = second.communicate("\n", timeout=SECONDS)[1]
    assert "APPORTION_SECRET_FILE must name a file with the same contents" in errors
