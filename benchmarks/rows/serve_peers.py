"""The rows of serve.py that compare apportion's server with others: the same net, the same requests, all on this
machine. A row is for one peer and one number of connections: each setting of the peer is tried for 3 s, and the
fastest is compared (`what` says which, and what the others came to).

The net is a CNN of 0.3 ms for ONNX Runtime, which all of them run with the options and the number of threads that
apportion runs it with. A request is 32 KB of the Open Inference Protocol's JSON; MLServer reads it as that, LitServe
and Ray Serve by what they give a handler. The client (serve_client.py) is the same for all. A status other than 200, or
an answer more than 1e-5 from what the runtime gives by itself, fails the row. Both servers run, and are loaded in 5
turns of 4 s each; figures are medians over the turns.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from functools import cache, partial
from statistics import median

import numpy as np
import torch
from own_environment import environment_of
from parked import SideFailed, free_port
from serve_sides import BENCHMARKS, START_SECONDS, Row, chosen, client, image, nets, result, served, small_cnn

import apportion
from apportion.exporting.onnxruntime_session import session

PATH = "/v2/models/net/infer"
HEADERS = {"content-type": "application/json"}
TURNS, TURN_SECONDS, TRIAL_SECONDS, WARM_UP_SECONDS = 5, 4.0, 3.0, 2.0
SETTLED_SECONDS = 0.5
"""At the start of a turn that do not count."""
ENDING_SECONDS = 10.0

PEERS = {
    "mlserver": {
        "parallel_workers=0": {"workers": 0, "batch": 0},
        "parallel_workers=0, batches of 16": {"workers": 0, "batch": 16},
        "parallel_workers=1": {"workers": 1, "batch": 0},
        "parallel_workers=1, batches of 16": {"workers": 1, "batch": 16},
    },
    "litserve": {
        "one worker": {"workers": 1, "batch": 1},
        "one worker, batches of 16": {"workers": 1, "batch": 16},
        "two workers": {"workers": 2, "batch": 1},
    },
    "ray_serve": {
        "one replica": {"replicas": 1, "batch": 1, "optimized": False},
        "one replica, batches of 16": {"replicas": 1, "batch": 16, "optimized": False},
        "one replica, optimized for throughput": {"replicas": 1, "batch": 1, "optimized": True},
        "one replica, optimized for throughput, batches of 16": {"replicas": 1, "batch": 16, "optimized": True},
        "two replicas, optimized for throughput": {"replicas": 2, "batch": 1, "optimized": True},
    },
}


class Peer:
    """A server of peers/serve_NAME.py, which ends once its standard input does. It has a session of its own, by which
    all that it has started is known: some of that outlives it for minutes."""

    def __init__(self, name, order):
        python, script = environment_of(name), BENCHMARKS / "peers" / f"serve_{name.removesuffix('_serve')}.py"
        self._name = name
        self._folder = tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self.port, *ports = free_port(), free_port(), free_port()
        order = order | {"port": self.port, "ports": ports, "path": PATH, "folder": self._folder.name}
        self._process = subprocess.Popen(
            [python, str(script), json.dumps(order)],
            stdin=subprocess.PIPE, stdout=self._said, stderr=self._said, cwd=self._folder.name,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_ready(self):
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                check(self.port)
                return
            except (OSError, http.client.HTTPException, Refused) as error:
                why = error
            if self._process.poll() is not None or time.monotonic() > end:
                raise SideFailed(f"{self._name} did not start: {why}; {self._last_line()}")
            time.sleep(0.1)

    def _last_line(self):
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "it said nothing"

    def __exit__(self, *_):
        self._process.stdin.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        for _ in range(100):
            left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._started(pid)]
            if not left:
                break
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
            self._process.poll()
        self._process.wait()
        self._said.close()
        self._folder.cleanup()

    def _started(self, pid):
        try:
            return os.getsid(pid) == self._process.pid
        except ProcessLookupError:
            return False


class Refused(Exception):
    """A status other than 200."""


@cache
def question():
    """(the net, a file with the request, what the runtime gives by itself)."""
    net, body = nets()[1] / "net.onnx", nets()[1] / "request.json"
    apportion.export(small_cnn(), torch.randn(2, 3, 32, 32), net)
    x = image().round(7)
    data = [round(float(value), 7) for value in x.ravel()]
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": data}
    body.write_text(json.dumps({"inputs": [tensor]}, separators=(",", ":")))
    return net, body, session(net, threads=1).run(None, {"input": x})[0]


def check(port):
    """Is it answered, and right?"""
    _, body, y = question()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", PATH, body.read_bytes(), HEADERS)
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise Refused(f"it answers {answer.status}: {said[:200]}")
    (given,) = json.loads(said)["outputs"]
    apart = np.abs(np.reshape(given["data"], given["shape"]) - y).max()
    if not apart <= 1e-5:
        raise SideFailed(f"port {port} answers what is {apart} from the runtime's own answer")


def load(port, connections, seconds):
    """[[began, latency, status, degraded], ...]."""
    order = {"port": port, "path": PATH, "body": str(question()[1]), "headers": HEADERS}
    return result(client(order | {"connections": connections, "seconds": seconds}))[1]


def warm_up(port, connections):
    """Nothing counts yet: Ray's HAProxy starts anew, and closes its connections, when it learns of a replica."""
    load(port, connections, WARM_UP_SECONDS)


def rate(port, connections, seconds):
    """Requests/s."""
    took = load(port, connections, seconds)
    if refused := [status for _, _, status, _ in took if status != 200]:
        raise SideFailed(f"port {port} answers {refused[0]} to {len(refused)} of {len(took)} requests")
    ends = [began + latency for began, latency, _, _ in took]
    return sum(SETTLED_SECONDS < end <= seconds for end in ends) / (seconds - SETTLED_SECONDS)


def against(name, connections):
    """In turns, medians; after a trial of each of the peer's settings."""
    net = question()[0]
    with served(f"net={net}", "--deadline", "5s") as ours:
        threads = int(re.search(r"(\d+) thread", chosen(ours, "onnxruntime"))[1])
        order, tried = {"net": str(net), "threads": threads}, {}
        for setting, more in PEERS[name].items():
            with Peer(name, order | more) as peer:
                warm_up(peer.port, connections)
                tried[setting] = rate(peer.port, connections, TRIAL_SECONDS)
        best = max(tried, key=tried.get)
        rates = {"ours": [], "peer": []}
        with Peer(name, order | PEERS[name][best]) as peer:
            for port in (ours.port, peer.port):
                check(port)
                warm_up(port, connections)
            for _ in range(TURNS):
                rates["ours"].append(rate(ours.port, connections, TURN_SECONDS))
                rates["peer"].append(rate(peer.port, connections, TURN_SECONDS))
            check(ours.port)
            check(peer.port)
    our, its = median(rates["ours"]), median(rates["peer"])
    trial = ", ".join(f"{setting}: {found:.0f}" for setting, found in tried.items())
    return {
        "what": f"{best} (tried: {trial})",
        "ours": our,
        "peer": its,
        "ratio": our / its,
        "turns": rates,
        "tried": tried,
        "threads": threads,
    }


ROWS = {
    f"{name.removesuffix('_serve')}_{connections}": Row("", "requests/s", partial(against, name, connections))
    for name in PEERS
    for connections in (1, 16)
}
