"""Clients that take without giving: silent ones, ones that never read, requests that cost more than they say, and pages
of other sites. Each costs the server little, and the others nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from served import Server, children, descriptors, eventually, save_net, serving

from apportion.serving.http.host_names import Hosts
from apportion.serving.http.listener import MOST_CONNECTIONS, most_connections
from apportion.serving.http.request_head import Head
from apportion.serving.http.response import STUCK_SECONDS, HTTPError, Unread
from apportion.serving.protocol import v2
from apportion.serving.protocol.datatypes import MOST_TEXTS
from apportion.serving.protocol.json_numbers import MOST_OBJECTS
from apportion.serving.protocol.v2 import HEADER, NamedTensor, Unfit, read_request, write_request

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("cold_servers"), pytest.mark.processes]

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(1, 8)
DESCRIPTORS = 256
LIMITED = (
    "-c",
    f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}));"
    "sys.argv[0] = 'apportion'; runpy.run_module('apportion', run_name='__main__')",
    "serve", "--port", "0",
)  # fmt: skip
HEALTH_SECONDS = 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nets")
    for n in (1, 2):
        save_net(folder / f"{n}.onnx", n)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Two members, and few descriptors."""
    with limited(folder) as server:
        yield server


@contextmanager
def limited(folder: Path) -> Iterator[Server]:
    arguments = ("1.onnx", "2.onnx", "--deadline", "10s", "--replication", "between_graph")
    with serving(folder, *arguments, "--host", "127.0.0.1", "--host", "models.example", program=LIMITED) as server:
        server.said("spare ready")
        yield server


def connected(server: Server, *, receives: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receives is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    sock.settimeout(15.0)
    sock.connect(("127.0.0.1", server.port))
    return sock


def asked(server: Server, data: bytes) -> tuple[int, bytes]:
    """(status, all that came) until the server closes the connection."""
    with connected(server) as sock:
        sock.sendall(data)
        said = b""
        while piece := sock.recv(1 << 16):
            said += piece
    return int(said.split()[1]), said


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "connection: close", "", ""]).encode()


def infer(body: bytes, *lines: str) -> bytes:
    head = ["POST /v2/models/ensemble/infer HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


class Health:
    """It is asked all the time. ``longest``: seconds of an answer."""

    def __init__(self, server: Server) -> None:
        self._server, self._over = server, threading.Event()
        self.longest, self.answers, self.wrong = 0.0, 0, list[bytes]()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._over.wait(0.01):
            began = time.monotonic()
            status, said = asked(self._server, get("/v2/health/live", "host: localhost"))
            self.longest, self.answers = max(self.longest, time.monotonic() - began), self.answers + 1
            if status != 200:
                self.wrong.append(said)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# Connections


@pytest.mark.thorough
def test_250_silent_clients_at_256_descriptors_cost_the_others_nothing(folder: Path) -> None:
    with limited(folder) as server, ExitStack() as stack, Health(server) as health:
        before, lines = server.pid("m1"), len(server.lines)
        for _ in range(250):
            stack.enter_context(connected(server))
        assert descriptors(server.process.pid) < DESCRIPTORS - 50
        os.kill(before, signal.SIGKILL)
        eventually("the member is back", lambda: server.pid("m1") != before)
        status, told = server.infer("ensemble", X)
        assert status == 200
        assert told["parameters"]["degraded"] is False
        for child in children(server.process.pid):
            os.kill(child, signal.SIGKILL)
        eventually("and both are, with a spare one", lambda: len(children(server.process.pid)) == 3)
        eventually("ready", lambda: server.ask("GET", "/v2/health/ready")[0] == 200)
        eventually("it has been asked often", lambda: health.answers > 20)
    assert not health.wrong
    assert health.longest < HEALTH_SECONDS
    assert len(server.lines) < lines + 60 + health.answers


@pytest.mark.thorough
def test_who_has_asked_nothing_for_longest_gives_way(server: Server) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(DESCRIPTORS)]
        assert socks[0].recv(1) == b""
        socks[-1].sendall(get("/v2/health/live", "host: localhost"))
        assert socks[-1].recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("descriptors", "used", "members", "most"),
    [(1 << 20, 30, 4, MOST_CONNECTIONS), (-1, 30, 4, MOST_CONNECTIONS), (64, 30, 4, 1), (1024, 30, 4, 900)],
)
def test_connections_leave_descriptors_for_members(descriptors: int, used: int, members: int, most: int) -> None:
    assert most_connections(descriptors, used, members) == most


# Requests that cost more than they say


def test_elements_of_another_datatype_are_never_made(server: Server) -> None:
    many = (63 << 20) // 4
    tensor = {"name": "input", "datatype": "BYTES", "shape": [many], "parameters": {"binary_data_size": 4 * many}}
    text = json.dumps({"inputs": [tensor]}).encode()
    with Health(server) as health:
        began = time.monotonic()
        status, said = asked(server, infer(text + bytes(4 * many), f"{HEADER}: {len(text)}", "connection: close"))
        took = time.monotonic() - began
    assert (status, b"input is BYTES, the net takes FP32" in said) == (400, True)
    assert took < 4.0, "it took nine seconds, of which sending it is a part of one"
    assert health.longest < 5 * HEALTH_SECONDS


def tensor(**changed: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3], **changed}


def check(name: str, datatype: str, shape: Any) -> None:
    if (name, datatype) != ("x", "FP32"):
        raise Unfit(f"{name} is {datatype}")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"inputs": [tensor(name=f"x{n}") for n in range(100_000)]}, "lists in JSON|objects in JSON"),
        ({"inputs": [tensor(name=f"x{n}") for n in range(5000)]}, "has 5000 tensors, the net takes 1"),
        ({"inputs": [tensor(data=[[[]] * 1_000_000])]}, "lists in JSON"),
        ({"inputs": [tensor(shape=[1_000_000, 0], data=[[]] * 1_000_000)]}, "lists in JSON"),
        ({"inputs": [tensor()], "parameters": {str(n): {} for n in range(MOST_OBJECTS + 1)}}, "objects in JSON"),
        ({"inputs": [tensor(datatype="BYTES", shape=[3], data=["a"] * 3)]}, "x is BYTES"),
    ],
    ids=lambda value: value if isinstance(value, str) else "body",
)
def test_json_that_would_hold_everybody_up_is_refused(body: Any, why: str) -> None:
    text = json.dumps(body).encode()
    began = time.process_time()
    with pytest.raises(ValueError, match=why):
        read_request(text, takes=["x"], check=check)
    assert time.process_time() - began < 0.6


def test_lists_that_are_nested_deeply_are_refused_at_once() -> None:
    deep = b"[" * 1000 + b"]" * 1000
    text = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[' + b",".join([deep] * 4000) + b"]}]}"
    began = time.process_time()
    with pytest.raises(ValueError, match="4000003 lists in JSON"):
        read_request(text, takes=["x"], check=check)
    assert time.process_time() - began < 0.6


def test_braces_within_texts_are_no_objects() -> None:
    texts = ['{"a": [1]}\\"'] * (MOST_OBJECTS + 1)
    body = json.dumps({"inputs": [tensor(datatype="BYTES", shape=[len(texts)], data=texts)]}).encode()
    (found,) = read_request(body).inputs
    assert found.array[-1] == texts[0].encode()


def test_a_tensor_of_bytes_has_a_limited_number_of_values() -> None:
    many = MOST_TEXTS + 1
    text = json.dumps(
        {"inputs": [tensor(datatype="BYTES", shape=[many], data=None, parameters={"binary_data_size": 4 * many})]}
    )
    with pytest.raises(ValueError, match="values of BYTES, of"):
        v2.read_request(text.encode() + bytes(4 * many), len(text))


def test_heads_that_announce_all_memory_and_send_nothing_give_way(server: Server) -> None:
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", np.zeros((20_000, 8), np.float32))])
    large = infer(b"".join(pieces), f"{HEADER}: {json_bytes}", "connection: close")
    with ExitStack() as stack:
        head = infer(b"", f"{HEADER}: 100").replace(b"content-length: 0", b"content-length: %d" % ((64 << 20) - 64))
        for _ in range(4):
            stack.enter_context(connected(server)).sendall(head)
        eventually("all memory is taken", lambda: server.get("/status")["inbox_bytes"] > (250 << 20))
        began = time.monotonic()
        eventually("a large request is answered", lambda: asked(server, large)[0] == 200)
        assert time.monotonic() - began < 3.0


# Answers that nobody reads


@pytest.mark.thorough
def test_40_clients_that_never_read_take_little_memory_and_are_let_go(server: Server) -> None:
    x = np.random.default_rng(0).normal(size=(120_000, 8)).astype(np.float32)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)])  # an answer of 7 MB in JSON
    request = infer(b"".join(pieces), f"{HEADER}: {json_bytes}")
    process = psutil.Process(server.process.pid)
    for _ in range(8):  # of the memory that members share each part has been used once
        asked(server, request.replace(b"host:", b"connection: close\r\nhost:"))
    before, largest = process.memory_info().rss, 0
    with ExitStack() as stack:
        socks = []
        for n in range(40):
            socks.append(stack.enter_context(connected(server, receives=4096)))
            socks[-1].sendall(request)
            eventually("it is answered", lambda n=n: busy(server) == 0)
            largest = max(largest, process.memory_info().rss)
        assert largest < before + (64 << 20), (largest - before) >> 20
        assert server.infer("ensemble", X)[0] == 200
        eventually("most of them are closed", lambda: sum(map(ended, socks)) > 30)
    eventually("the memory is back", lambda: process.memory_info().rss < before + (32 << 20))


def busy(server: Server) -> int:
    return int(sum(member["waiting"] + member["computing"] for member in server.get("/status")["members"]))


def ended(sock: socket.socket) -> bool:
    """Has the server reset it?"""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def fits(sock: socket.socket) -> bool:
    """Does it take some more?"""
    try:
        return sock.send(bytes(1 << 16)) > 0
    except BlockingIOError:
        return False


class Reader:
    """Of a connection with this socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.gone = sock, False

    def fileno(self) -> int:
        return self._sock.fileno()

    def abort(self) -> None:
        self.gone = True


def test_who_reads_nothing_for_longest_is_let_go_and_who_reads_is_not() -> None:
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(4)]
        for ours, _ in pairs:
            ours.setblocking(False)
            while fits(ours):
                pass
        unread = Unread(most=100)
        reads, old, oldest, newest = (Reader(ours) for ours, _ in pairs)
        for reader, at in ((reads, 0.0), (old, 2.0), (oldest, 1.0), (newest, 3.0)):
            unread.note(reader, 60, at)
        while pairs[0][1].recv(1 << 20, socket.MSG_DONTWAIT) and not fits(pairs[0][0]):
            pass
        unread.make_room(3.0 + STUCK_SECONDS / 2, newest=newest)
        assert [reader.gone for reader in (reads, old, oldest, newest)] == [False, True, True, False]
        assert unread.total == 120
        unread.make_room(3.0 + 2 * STUCK_SECONDS, coming=41, newest=newest)
        assert reads.gone, "it has stopped reading"
        assert unread.total == 60


# Pages of other sites


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["host: localhost"], 200),
        (["host: 127.0.0.1:8000"], 200),
        (["host: [::1]:8000"], 200),
        (["host: MODELS.example.:80"], 200),
        (["host: localhost", "origin: http://127.0.0.1:8000"], 200),
        (["host: evil.example"], 403),
        (["host: localhost.evil.example"], 403),
        (["host: 203.0.113.7"], 403),
        (["host: evil@localhost"], 403),
        (["host: "], 403),
        (["host: localhost", "origin: https://evil.example"], 403),
        (["host: localhost", "origin: null"], 403),
        (["host: localhost", "host: localhost"], 400),
        (["host: localhost", "host: evil.example"], 400),
        ([], 400),
    ],
)
def test_only_requests_to_its_own_names_are_answered(server: Server, lines: list[str], status: int) -> None:
    for path in ("/status", "/v2/health/live", "/"):
        found, said = asked(server, get(path, *lines))
        assert found == status, said
        assert status == 200 or b'{"error"' in said
    if status == 403:
        request = infer(b"{}", "connection: close").replace(b"host: localhost", "\r\n".join(lines).encode())
        assert asked(server, request)[0] == 403


@pytest.mark.parametrize(
    ("listened", "names", "host", "permitted"),
    [
        ("0.0.0.0", (), "203.0.113.7:80", True),
        ("0.0.0.0", (), "evil.example", False),
        ("0.0.0.0", (), socket.gethostname(), True),
        ("127.0.0.1", ("*",), "evil.example", True),
        ("192.0.2.1", (), "192.0.2.1", True),
        ("192.0.2.1", (), "192.0.2.2", False),
    ],
)
def test_names_by_which_a_server_is_addressed(
    listened: str, names: tuple[str, ...], host: str, permitted: bool
) -> None:
    hosts = Hosts(listened, listened, names)
    head = Head("GET", "/", True, host=host.encode())
    if permitted:
        hosts.check(head)
        return
    with pytest.raises(HTTPError, match="is not a name of this server") as refused:
        hosts.check(head)
    assert refused.value.status == 403


def test_a_client_of_http_1_0_that_expects_to_be_told_is_answered_at_once(server: Server) -> None:
    body = json.dumps({"inputs": [tensor(name="input", shape=[1, 8], data=[0.0] * 8)]}).encode()
    request = infer(body, "expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    status, said = asked(server, request)
    assert status == 200
    assert b" 100 " not in said


@pytest.mark.parametrize(
    "end", [b"0\r\nx: y\nz: w\r\n\r\n", b"0\r\n\n\r\n\r\n", b"0\r\nx: \0\r\n\r\n", b"0;a\rb\r\n\r\n"]
)
def test_a_bare_line_feed_after_the_last_chunk_is_refused(server: Server, end: bytes) -> None:
    head = infer(b"", "transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    status, said = asked(server, head + b"2\r\n{}\r\n" + end)
    assert status == 400
    assert b"line feed" in said
