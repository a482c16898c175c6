"""A server of a test: the program itself, on a port of its own, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from proc_files import told_of
from torch import nn
from warm_python import FORKER

from apportion.exporting.exporter import export

START_SECONDS, SECONDS = 60.0, 15.0
PROGRAM = ("-m", "apportion", "serve", "--port", "0")


class Server:
    """``program``: of Python, that takes the arguments. ``lines``: what it has logged so far."""

    def __init__(self, arguments: Sequence[str], folder: Path, *, program: Sequence[str] = PROGRAM) -> None:
        command = [sys.executable, *program, *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder
        )
        self.lines: list[dict[str, Any]] = []
        self._told = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.port = int(self.said(r"serving on", START_SECONDS)["port"])
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._told:
                self.lines.append(json.loads(line) if line.startswith("{") else {"event": line.rstrip()})
                self._told.notify_all()
        with self._told:
            self.lines.append({"event": "EOF"})
            self._told.notify_all()

    def said(self, pattern: str, seconds: float = SECONDS, *, times: int = 1) -> dict[str, Any]:
        """The line in which it says so for the n-th time."""
        with self._told:
            found: list[dict[str, Any]] = []

            def there() -> bool:
                found[:] = [line for line in self.lines if re.search(pattern, line["event"])]
                return len(found) >= times or self.lines[-1:] == [{"event": "EOF"}]

            self._told.wait_for(there, seconds)
            assert len(found) >= times, f"it did not say {pattern!r} in {seconds} s: {self.lines[-20:]}"
            return found[times - 1]

    def pid(self, member: str) -> int:
        """Of the process that has become this member last."""
        with self._told:
            return int([line for line in self.lines if re.search(rf"^member {member} pid ", line["event"])][-1]["pid"])

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """JSON."""
        status, _, body = self.ask("GET", path)
        assert status == 200, (status, body)
        return json.loads(body)

    def infer(self, model: str, x: Any, **parameters: Any) -> tuple[int, dict[str, Any]]:
        """(status, the answer) of one input as JSON."""
        x = np.asarray(x, dtype=np.float32)
        tensor = {"name": "input", "shape": x.shape, "datatype": "FP32", "data": x.reshape(-1).tolist()}
        status, _, body = self.ask(
            "POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
        )
        return status, json.loads(body)

    def close(self) -> None:
        """It has ended afterwards, by itself if it can."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self._listener.join()
            assert self.process.stderr is not None
            self.process.stderr.close()

    def ends(self, number: int = signal.SIGTERM, seconds: float = SECONDS) -> tuple[int, float]:
        """(exit status, seconds) after this signal."""
        began = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(seconds), time.monotonic() - began


@contextmanager
def serving(folder: Path, *arguments: str, program: Sequence[str] = PROGRAM) -> Iterator[Server]:
    """It is gone afterwards. Where a test says nothing of the deadline, a member may take long on a busy machine."""
    patient = ("--deadline", "10s") if program is PROGRAM and "--deadline" not in arguments else ()
    server = Server([*arguments, *patient], folder, program=program)
    try:
        yield server
    finally:
        server.close()


def eventually(what: str, true: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Asked again and again."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@cache
def net(seed: int, width: int = 16) -> nn.Module:
    """8 numbers in, 3 out."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3)).eval()


def save_net(path: Path, seed: int, width: int = 16) -> None:
    """Writes that net to an ONNX file."""
    path.write_bytes(_exported(seed, width))


@cache
def _exported(seed: int, width: int) -> bytes:
    """The file of a net, which is exported once for all the tests that serve it."""
    with tempfile.TemporaryDirectory() as folder:
        export(net(seed, width), torch.zeros(2, 8), Path(folder) / "net.onnx")
        return (Path(folder) / "net.onnx").read_bytes()


def children(pid: int) -> list[int]:
    """Its own, not theirs; and not the one that makes them."""
    listed = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in listed if told_of(child, "comm").decode().strip() not in (FORKER, "")]


def descriptors(pid: int) -> int:
    """That it has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))
