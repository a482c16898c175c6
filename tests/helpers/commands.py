"""Commands that run side by side, as their user's shells would start them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence

SECONDS = 110


def start(command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )


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
