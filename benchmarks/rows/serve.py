"""A server of one net and of an ensemble, on this machine, over HTTP, with all that it does switched on.

    python benchmarks/rows/serve.py --json FILE [--only id,...]

accuracy      the four published CIFAR-10 ResNets on the 10,000 test images: the largest distance of a member from its
              published accuracy, in points, against 0.01; `what` has the ensemble's. Needs the real data.
overhead      ResNet-18, 224x224, batch 1, binary, one connection kept alive (a plain socket of serve_client.py): ms
              beyond the same call of the runtime by itself, against 0.5. In turns, medians of all.
kill          kill -9 of one of the four, 20 times, under load of 4 connections: failed requests; `p99_ms`, the slowest
              return of a member in ms against 500. Bars: 0 failures, p99 within the deadline (100 ms) + 10 ms.
slow          one of the four stopped nine tenths of the time: requests/s from the second second on against before. Bar:
              0.8, and no failures.
single_kill   a net by itself, killed 20 times under load of 2 connections: ms until the next answer, the slowest,
              against 500; `lost`: requests without an answer (those in flight at most).
sigterm       seconds until it has ended after crashes, the slowest of 10, against 2; `left`: processes, of 0.
soak          ten minutes at 80 % of what it manages, paced: MB by which the memory of the server or of one of its
              processes grew after the first minute, whichever is nearest to its bar: 2 MB, or 2 % of it. Bars besides:
              no descriptor more, no failure, no process replaced.
ort_eager     a small CNN, batch 1, one thread: ONNX Runtime against torch eager in channels last. Bar: 3, and that it
              is what `serve` chooses.
mlserver_*    requests/s of the same net with 1 and 16 connections, 32 KB of JSON each, against MLServer at its best
              setting (serve_peers.py). Bar: 2.
litserve_*    the same against LitServe. Bar: 3.
ray_*         the same against Ray Serve. Bar: 8.

Each of these peers has an environment of its own, made with pip at the first use (peers/mlserver.txt, ...) below
~/.cache/apportion/peers. The client (serve_client.py) is a process of its own on the same two cores.
"""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sides"))

from parked import SideFailed
from serve_client import Connection, request
from serve_peers import ROWS as PEERS
from serve_sides import BENCHMARKS, Row, chosen, image, nets, result, served, small_cnn, written
from table import main, measured
from torch import nn

import apportion
from apportion.exporting.onnxruntime_session import session
from apportion.serving.protocol.v2 import HEADER, NamedTensor, read_response, write_request

EXAMPLES = BENCHMARKS.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
DATA = Path(os.environ.get("APPORTION_DATA") or Path.home() / ".cache" / "apportion" / "data")
WEIGHTS = DATA / "models" / "akamaster_resnet_cifar10"
PUBLISHED = {20: 91.73, 32: 92.63, 44: 93.10, 56: 93.39}
KILLS, ENDS = 20, 10
DEADLINE_MS = 100
SOAK_SECONDS, SETTLE_SECONDS, CAPACITY_SECONDS = 600.0, 60.0, 15.0
SOAK_CONNECTIONS = 8


def resnets():
    """The four, exported."""
    from resnet_ensemble import FILES, published

    if not WEIGHTS.is_dir():
        raise SideFailed(f"the published weights are not at {WEIGHTS}")
    found = {layers: nets()[1] / f"resnet{layers}.onnx" for layers in FILES}
    for layers, path in found.items():
        if not path.exists():
            apportion.export(published(WEIGHTS, layers), torch.randn(2, 3, 32, 32), path)
    return [f"resnet{layers}={path}" for layers, path in found.items()]


# Rows


def accuracy():
    import http.client

    from resnet20_cifar10 import evaluation_set

    images, labels = (x.numpy() for x in evaluation_set().tensors)
    found = {}
    with served(*resnets(), "--deadline", "60s", "--replication", "between_graph") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        for model in ("ensemble", *(f"resnet{layers}" for layers in PUBLISHED)):
            right = 0
            for at in range(0, len(images), 50):
                pieces, json_bytes = write_request(
                    [NamedTensor("input", "FP32", images[at : at + 50])], parameters={"binary_data_output": True}
                )
                connection.request("POST", f"/v2/models/{model}/infer", b"".join(pieces), {HEADER: str(json_bytes)})
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    raise SideFailed(f"{model}: {answer.status} {body[:200]}")
                head, (scores,) = read_response(body, int(answer.headers[HEADER]))
                if head["parameters"]["degraded"]:
                    raise SideFailed(f"{model}: {head}")
                right += int((scores.array.argmax(1) == labels[at : at + 50]).sum())
            found[model] = 100 * right / len(images)
    apart = max(abs(found[f"resnet{layers}"] - share) for layers, share in PUBLISHED.items())
    return {
        "what": ", ".join(f"{model} {share:.2f} %" for model, share in found.items()),
        "ours": apart,
        "peer": 0.01,
        "ratio": 0.01 / max(apart, 1e-3),
        "accuracies": found,
    }


class Block(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.down = None
        if stride != 1 or channels_in != channels:
            self.down = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + (x if self.down is None else self.down(x)))


def resnet18():
    """He et al. 2015, table 1: 11.7 million weights."""
    stages = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *(Block(*stage) for stage in [*stages, (512, 512, 1)]),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000),
    ).eval()  # fmt: skip


def overhead():
    """Turns of 20 calls of each, after one of each that does not count."""
    path = nets()[1] / "resnet18.onnx"
    apportion.export(resnet18(), torch.randn(2, 3, 224, 224), path)
    x = image(224)
    file, headers = written("overhead.bin", x)
    by_itself, by_http = [], []
    with served(str(path), "--deadline", "5s") as server:
        threads = int(re.search(r"(\d+) thread", chosen(server, "onnxruntime"))[1])
        bare = session(path, threads=threads)
        order = {"path": "/v2/models/m1/infer", "body": file, "headers": headers}
        connection = Connection(server.port, request(order))
        for _ in range(15):
            for turn in range(21):
                began = time.perf_counter()
                bare.run(None, {"input": x})
                if turn:
                    by_itself.append(time.perf_counter() - began)
            for turn in range(21):
                connection.send(time.perf_counter())
                while (answer := connection.receive()) is None:
                    pass
                if turn:
                    by_http.append(time.perf_counter() - connection.began)
                if answer[0] != 200:
                    raise SideFailed(f"it answers {answer[0]}")
    beyond = 1e3 * (median(by_http) - median(by_itself))
    return {
        "what": f"{1e3 * median(by_http):.2f} ms over HTTP, {1e3 * median(by_itself):.2f} ms by itself",
        "ours": beyond,
        "peer": 0.5,
        "ratio": 0.5 / max(beyond, 1e-3),
    }


def kill():
    """Each kill once the last one's spare is there."""
    file, headers = written("image.bin", image())
    names = [f"resnet{layers}" for layers in PUBLISHED]
    with served(*resnets(), "--deadline", f"{DEADLINE_MS}ms", "--replication", "between_graph") as server:
        server.said("^spare ready")
        client = server.load(file, headers, connections=4, seconds=90.0, model="ensemble")
        back = []
        for number in range(KILLS):
            name = names[number % len(names)]
            seated = server.times(f"^member {name} pid ")
            at = time.time()
            os.kill(server.pid(name), signal.SIGKILL)
            back.append(server.said(f"^member {name} pid ", times=seated + 1)["time"] - at)
            server.said("^spare ready", times=number + 2)
        _, took = result(client)
    failed = sum(status != 200 for _, _, status, _ in took)
    p99 = 1e3 * float(np.quantile([latency for _, latency, _, _ in took], 0.99))
    worst = 1e3 * max(latency for _, latency, _, _ in took)
    share = sum(degraded for *_, degraded in took) / len(took)
    return {
        "what": f"{failed} of {len(took)} failed, {share:.1%} degraded; p99 {p99:.1f} ms, worst {worst:.1f} ms of "
        f"{DEADLINE_MS} ms; back after {1e3 * median(back):.0f} ms, {1e3 * max(back):.0f} ms at most",
        "ours": 1e3 * max(back),
        "peer": 500.0,
        "ratio": 500.0 / (1e3 * max(back)) if not failed and p99 <= DEADLINE_MS + 10 else 0.0,
        "failures": failed,
        "p99_ms": p99,
    }


def slow():
    """Six seconds as they are, then one member runs a tenth of the time."""
    file, headers = written("image.bin", image())
    with served(*resnets(), "--deadline", f"{DEADLINE_MS}ms", "--replication", "between_graph") as server:
        server.said("^spare ready")
        client = server.load(file, headers, connections=4, seconds=14.0, model="ensemble")
        time.sleep(6.0)
        pid, since, over = server.pid("resnet20"), time.time(), threading.Event()

        def hold_back():
            while not over.is_set():
                try:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(0.018)
                    os.kill(pid, signal.SIGCONT)
                    time.sleep(0.002)
                except ProcessLookupError:
                    return

        thread = threading.Thread(target=hold_back)
        thread.start()
        began, took = result(client)
        over.set()
        thread.join()
    at = since - began
    before = sum(1.0 < t + latency < at for t, latency, _, _ in took) / (at - 1.0)
    after = sum(at + 1.0 < t + latency < 14.0 for t, latency, _, _ in took) / (13.0 - at)
    first = sum(at < t + latency < at + 1.0 for t, latency, _, _ in took)
    failed = sum(status != 200 for _, _, status, _ in took)
    return {
        "what": f"{failed} of {len(took)} failed; {first} in the first second",
        "ours": after,
        "peer": before,
        "ratio": after / before if not failed else 0.0,
        "failures": failed,
    }


def single_kill():
    file, headers = written("image.bin", image())
    with served(resnets()[0], "--deadline", "2s") as server:
        server.said("^spare ready")
        client = server.load(file, headers, connections=2, seconds=50.0, model="resnet20")
        kills = []
        for number in range(KILLS):
            time.sleep(1.2)  # who dies younger than a second is taken for a net that kills its process, and waits
            seated = server.times("^member resnet20 pid ")
            kills.append(time.time())
            os.kill(server.pid("resnet20"), signal.SIGKILL)
            server.said("^member resnet20 pid ", times=seated + 1)
            server.said("^spare ready", times=number + 2)
        began, took = result(client)
    ends = sorted(began + t + latency for t, latency, status, _ in took if status == 200)
    gaps = [min(e for e in ends if e > at) - at for at in kills if at < ends[-1]]
    lost = sum(status != 200 for _, _, status, _ in took)
    return {
        "what": f"{lost} of {len(took)} lost in {len(gaps)} kills; next answer after {1e3 * median(gaps):.0f} ms",
        "ours": 1e3 * max(gaps),
        "peer": 500.0,
        "ratio": 500.0 / (1e3 * max(gaps)) if lost <= 2 * KILLS else 0.0,
        "lost": lost,
    }


def sigterm():
    took, left = [], 0
    for _ in range(ENDS):
        with served(*resnets(), "--deadline", "1s", "--replication", "between_graph") as server:
            server.said("^spare ready")
            pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
            os.kill(server.pid("resnet20"), signal.SIGKILL)
            os.kill(server.pid("resnet32"), signal.SIGSTOP)
            took.append(server.ends())
            left += sum(Path("/proc", pid).exists() for pid in pids)
    return {
        "what": f"{sum(t <= 2.0 for t in took)} of {ENDS} in time, {left} processes left",
        "ours": max(took),
        "peer": 2.0,
        "ratio": 2.0 / max(took) if not left else 0.0,
        "left": left,
    }


def soak():
    """Both samples are taken under load, so that as many connections are open."""
    file, headers = written("image.bin", image())
    asked = {"connections": SOAK_CONNECTIONS, "model": "ensemble"}
    with served(*resnets(), "--replication", "between_graph") as server:
        server.said("^spare ready")
        _, took = result(server.load(file, headers, seconds=CAPACITY_SECONDS, **asked))
        capacity = sum(status == 200 for _, _, status, _ in took) / CAPACITY_SECONDS
        client = server.load(file, headers, seconds=SOAK_SECONDS, rate=0.8 * capacity, **asked)
        time.sleep(SETTLE_SECONDS)
        before = server.held()
        time.sleep(SOAK_SECONDS - SETTLE_SECONDS - 2.0)
        after = server.held()
        _, took = result(client)
    if before.keys() != after.keys():
        raise SideFailed("a process has ended")
    grown = {pid: after[pid][0] - before[pid][0] for pid in before}
    opened = max(after[pid][1] - before[pid][1] for pid in before)
    failed = sum(status != 200 for _, _, status, _ in took)
    p99 = 1e3 * float(np.quantile([latency for _, latency, _, _ in took], 0.99))
    bars = {pid: max(2.0, 0.02 * before[pid][0]) for pid in before}
    worst = min(grown, key=lambda pid: bars[pid] - grown[pid])
    whole = sum(mb for mb, _ in after.values())
    return {
        "what": f"{failed} of {len(took)} failed at {0.8 * capacity:.0f} requests/s of {capacity:.0f}, p99 "
        f"{p99:.1f} ms; server {grown[server.process.pid]:+.2f} MB, all {sum(grown.values()):+.2f} MB of {whole:.0f}; "
        f"{opened:+d} descriptors",
        "ours": grown[worst],
        "peer": bars[worst],
        "ratio": bars[worst] / max(grown[worst], 0.01) if not failed and opened <= 0 else 0.0,
        "failures": failed,
        "descriptors": opened,
        "grown_mb": {("server" if pid == server.process.pid else str(pid)): mb for pid, mb in grown.items()},
    }


def ort_eager():
    """In turns of 200 calls."""
    torch.set_num_threads(1)
    net, x = small_cnn(), torch.from_numpy(image())
    path = nets()[1] / "small.onnx"
    apportion.export(net, x, path)
    rows = {0: torch.export.Dim.DYNAMIC}
    program = nets()[1] / "small.pt2"
    torch.export.save(torch.export.export(net, (torch.cat([x, x]),), dynamic_shapes=(rows,)), program)
    eager = net.to(memory_format=torch.channels_last)
    image_last, run = x.contiguous(memory_format=torch.channels_last), session(path, threads=1)
    taken = {"ort": [], "eager": []}
    with torch.inference_mode():
        for _ in range(30):
            for name, call in (
                ("ort", lambda: run.run(None, {"input": x.numpy()})),
                ("eager", lambda: eager(image_last)),
            ):
                for _ in range(20):
                    call()
                began = time.perf_counter()
                for _ in range(200):
                    call()
                taken[name].append((time.perf_counter() - began) / 200)
    ort, torch_eager = median(taken["ort"]), median(taken["eager"])
    with served(str(program)) as server:
        runtime = server.said("^member m1 pid")["runtime"]
    return {
        "what": f"microseconds a call; serve chooses {runtime}",
        "ours": 1e6 * ort,
        "peer": 1e6 * torch_eager,
        "ratio": torch_eager / ort if "onnxruntime" in runtime else 0.0,
    }


ROWS = {
    "accuracy": Row("", "points", accuracy),
    "overhead": Row("", "ms", overhead),
    "kill": Row("", "ms", kill),
    "slow": Row("", "requests/s", slow),
    "single_kill": Row("", "ms", single_kill),
    "sigterm": Row("", "s", sigterm),
    "soak": Row("", "MB", soak),
    "ort_eager": Row("", "us", ort_eager),
    **PEERS,
}


if __name__ == "__main__":
    sys.exit(main(__doc__, ROWS, measured(ROWS)))
