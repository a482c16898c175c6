"""What the rows of serve.py and serve_peers.py have in common: apportion's server, its load, and nets to serve."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from parked import SideFailed
from torch import nn

from apportion.serving.protocol.v2 import HEADER, NamedTensor, write_request

BENCHMARKS = Path(__file__).resolve().parents[1]
START_SECONDS = 120.0


class Row:
    """One line of the table."""

    def __init__(self, what, unit, measure):
        self.what, self.unit, self.measure = what, unit, measure


@cache
def nets():
    """Where the nets are, as ONNX files; gone with this process."""
    folder = tempfile.TemporaryDirectory(prefix="apportion-benchmark-")
    return folder, Path(folder.name)


def small_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()  # fmt: skip


class Served:
    """A server, its log read in a thread."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "apportion", "serve", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events, self._told = [], threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.port = self.said("^serving on", START_SECONDS)["port"]

    def _listen(self):
        for line in self.process.stderr:
            if '"event":"request"' in line:
                continue
            with self._told:
                self.events.append(json.loads(line) if line.startswith("{") else {"event": line})
                self._told.notify_all()

    def said(self, pattern, seconds=30.0, times=1):
        """The line in which it says so for the n-th time."""
        found = []

        def there():
            found[:] = [e for e in self.events if re.search(pattern, e["event"])]
            return len(found) >= times

        with self._told:
            if not self._told.wait_for(there, seconds):
                raise SideFailed(f"it did not say {pattern!r}: {self.events[-5:]}")
            return found[times - 1]

    def times(self, pattern):
        """How often it has said so."""
        with self._told:
            return sum(bool(re.search(pattern, e["event"])) for e in self.events)

    def pid(self, member):
        """Of its latest process."""
        with self._told:
            return [e for e in self.events if e["event"].startswith(f"member {member} pid ")][-1]["pid"]

    def load(self, body, headers, *, connections, seconds, model, rate=None):
        """The client, started; `result` waits for what it measured. `rate`: requests a second, paced."""
        order = {"port": self.port, "path": f"/v2/models/{model}/infer", "body": str(body), "headers": headers}
        return client(order | {"connections": connections, "seconds": seconds, "rate": rate})

    def held(self):
        """(resident MB, descriptors) of it and of its processes, by their numbers."""
        pid = self.process.pid
        pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        page_mb = os.sysconf("SC_PAGE_SIZE") / 2**20
        return {
            pid: (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page_mb, len(os.listdir(f"/proc/{pid}/fd")))
            for pid in pids
        }

    def ends(self):
        """Seconds after SIGTERM."""
        began = time.perf_counter()
        self.process.terminate()
        self.process.wait(30)
        return time.perf_counter() - began


def client(order):
    """Of any server, started."""
    command = [sys.executable, str(BENCHMARKS / "sides/serve_client.py"), json.dumps(order)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(client, seconds=300.0):
    """(seconds since the epoch when it began, [[began, latency, status, degraded], ...])."""
    text = client.communicate(timeout=seconds)[0]
    if client.returncode != 0:
        raise SideFailed(f"the client ended with {client.returncode}")
    told = json.loads(text)
    return told["began"], told["took"]


@contextmanager
def served(*arguments):
    server = Served(*arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def chosen(server, runtime):
    """The line of what was measured at load, of the fastest with that runtime."""
    lines = [e["event"] for e in server.events if f": {runtime}" in e["event"]]
    return min(lines, key=lambda line: float(re.search(r"([\d.e-]+) ms", line)[1]))


def written(name, x):
    """(file, headers) of a binary request."""
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)], parameters={"binary_data_output": True})
    path = nets()[1] / name
    path.write_bytes(b"".join(pieces))
    return path, {HEADER: str(json_bytes)}


def image(size=32):
    return np.random.default_rng(0).normal(size=(1, 3, size, size)).astype(np.float32)
