"""Commands that run side by side, as their user's shells would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

SECONDS = 110
AT_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[0] = "apportion"
from apportion.cli.app import main
main()
"""
"""apportion, once its standard input is the terminal that it is controlled from."""


def start(command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )


def at_terminal(arguments: Sequence[str], **environment: str) -> tuple[subprocess.Popen[bytes], int]:
    """``apportion ...`` as it runs at a terminal, and the terminal's other end."""
    ours, theirs = os.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    finally:
        os.close(theirs)
    return process, ours


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What they say, once all have ended well; none goes on afterwards."""
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text
    return said


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def places(*hosts: int) -> list[dict[str, str]]:
    """torchrun's variables of so many ranks on each of these hosts, which are all this one."""
    port, ranks = free_port(), sum(hosts)
    every = [(rank, size) for size in hosts for rank in range(size)]
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        {**fixed, "RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
        for rank, (local, size) in enumerate(every)
    ]
