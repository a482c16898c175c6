"""HTTP as it comes over a socket: in pieces, several at once, too slow, too much, and wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import SECONDS, Server, eventually, net, save_net, serving

from apportion.serving.batching import Pace
from apportion.serving.http import connection as connections
from apportion.serving.http.connection import FOLLOWING, Chunks, Connection, ConnectionState
from apportion.serving.http.request_head import Head
from apportion.serving.http.response import SENT_SECONDS, HTTPError, Response
from apportion.serving.pool.dynamic_batcher import AT_ONCE, DynamicBatcher, MemberTask
from apportion.serving.pool.frames import Frame, Kind, Placed, decode
from apportion.serving.protocol.v2 import HEADER, NamedTensor, read_response, write_request

pytestmark = pytest.mark.processes

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(1, 8)
JSON = json.dumps({"inputs": [{"name": "input", "shape": [1, 8], "datatype": "FP32", "data": X[0].tolist()}]}).encode()
INFER = b"POST /v2/models/m1/infer HTTP/1.1\r\nhost: localhost\r\n"


class Followed:
    """The state of a connection, which changes as the table says."""

    def __get__(self, connection: Any, kind: Any) -> Any:
        return connection.__dict__["_state"] if connection is not None else self

    def __set__(self, connection: Any, state: ConnectionState) -> None:
        before = connection.__dict__.get("_state")
        assert before is None or state in FOLLOWING[before], f"{state.name} follows {before.name}"
        connection.__dict__["_state"] = state


@pytest.fixture(autouse=True)
def _every_state_follows_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "_state", Followed(), raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("net")
    save_net(folder / "1.onnx", 1)
    with serving(folder, "1.onnx", "--deadline", "10s") as server:
        yield server


def wanted(x: Any) -> Any:
    with torch.no_grad():
        return net(1)(torch.from_numpy(x)).numpy()


class Client:
    """A socket."""

    def __init__(self, server: Server) -> None:
        self.sock = socket.create_connection(("127.0.0.1", server.port), SECONDS)
        self.rest = b""

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next one: (status, headers, body)."""
        while b"\r\n\r\n" not in self.rest:
            piece = self.sock.recv(1 << 16)
            assert piece, f"it ended after {self.rest!r}"
            self.rest += piece
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        while len(self.rest) < int(headers.get("content-length", 0)):
            piece = self.sock.recv(1 << 16)
            assert piece
            self.rest += piece
        size = int(headers.get("content-length", 0))
        body, self.rest = self.rest[:size], self.rest[size:]
        return int(lines[0].split()[1]), headers, body

    def ended(self) -> bool:
        """Has the server closed it, with nothing more to say?"""
        return self.rest == b"" and self.sock.recv(1) == b""


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = Client(server)
    with made.sock:
        yield made


def sized(body: bytes, *lines: bytes) -> bytes:
    return INFER + b"".join(line + b"\r\n" for line in (*lines, b"content-length: %d" % len(body))) + b"\r\n" + body


def outputs(body: bytes) -> Any:
    return np.array(json.loads(body)["outputs"][0]["data"], dtype=np.float32).reshape(-1, 3)


@pytest.mark.thorough
def test_requests_that_come_together_are_answered_in_their_order(client: Client) -> None:
    live = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    client.sock.sendall((sized(JSON) + live) * 20)
    for _ in range(20):
        status, _, body = client.answer()
        assert status == 200
        np.testing.assert_allclose(outputs(body), wanted(X), rtol=1e-5)
        assert json.loads(client.answer()[2]) == {"live": True}


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("rows", [1, 5000])
def test_a_request_may_come_in_any_pieces(client: Client, rows: int, binary: bool) -> None:
    x = np.random.default_rng(rows).normal(size=(rows, 8)).astype(np.float32)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)], binary=binary)
    header = (b"%s: %d" % (HEADER.encode(), json_bytes),) if json_bytes else ()
    data = sized(b"".join(pieces), *header)
    rng, at = np.random.default_rng(0), 0
    for size in [*rng.integers(1, 40, 30), *rng.integers(1, 30_000, 30), len(data)]:
        client.sock.sendall(data[at : at + size])
        at += size
    status, _, body = client.answer()
    assert status == 200, body
    np.testing.assert_allclose(outputs(body), wanted(x), rtol=1e-3, atol=1e-4)


def test_tensors_lie_anywhere_in_a_body(client: Client) -> None:
    """Not only where a processor reads them best."""
    x = np.random.default_rng(2).normal(size=(2000, 8)).astype(np.float32)
    for more in range(4):
        pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)], id="x" * more)
        client.sock.sendall(sized(b"".join(pieces), b"%s: %d" % (HEADER.encode(), json_bytes)))
        status, _, body = client.answer()
        assert status == 200, body
        np.testing.assert_allclose(outputs(body), wanted(x), rtol=1e-3, atol=1e-4)


def test_a_body_may_come_in_chunks(client: Client) -> None:
    parts = [JSON[at : at + 7] for at in range(0, len(JSON), 7)]
    chunked = b"".join(b"%x;why=not\r\n%s\r\n" % (len(part), part) for part in parts)
    request = INFER + b"transfer-encoding: chunked\r\n\r\n" + chunked + b"0\r\ntrailer: 1\r\n\r\n"
    for _ in range(2):
        client.sock.sendall(request)
    for _ in range(2):
        status, _, body = client.answer()
        assert status == 200, body
        np.testing.assert_allclose(outputs(body), wanted(X), rtol=1e-5)


@given(st.lists(st.binary(max_size=30), max_size=5), st.lists(st.integers(1, 20)))
def test_chunks_come_whole_out_of_any_pieces(parts: list[bytes], cuts: list[int]) -> None:
    parts = [part for part in parts if part]
    stream = b"".join(b"%X\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    data, chunks, waiting, whole = stream + b"GET", Chunks(1000), b"", False
    for cut in [*cuts, len(data)]:
        waiting, data = waiting + data[:cut], data[cut:]
        if not whole:
            took, whole = chunks.feed(memoryview(waiting))
            waiting = waiting[took:]
    assert whole
    assert (bytes(chunks.body), waiting) == (b"".join(parts), b"GET")


TRAILERS = b"0\r\n" + b"t: v\r\n" * 20_000


@pytest.mark.parametrize(
    ("stream", "status"),
    [
        (b"x\r\n", 400),
        (b"-1\r\n", 400),
        (b"2\r\nabc\r\n", 400),
        (b"fffffff\r\n", 413),
        (b"1" * 5000, 400),
        (b"0\r\n" + b"t: v\r\n" * 20_000, 431),
    ],
)
def test_chunks_that_are_none_are_refused(stream: bytes, status: int) -> None:
    with pytest.raises(HTTPError) as found:
        Chunks(1000).feed(memoryview(stream))
    assert found.value.status == status


def test_who_waits_to_be_told_to_go_on_is_told(client: Client) -> None:
    head = INFER + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(JSON)
    client.sock.sendall(head)
    assert client.answer()[0] == 100
    client.sock.sendall(JSON)
    assert client.answer()[0] == 200
    client.sock.sendall(head.replace(b"m1", b"m9"))
    assert client.answer()[0] == 404
    assert client.ended(), "the body does not come: what follows would be taken for it"


def test_an_upgrade_that_is_not_offered_is_answered_as_it_is(client: Client) -> None:
    client.sock.sendall(sized(JSON, b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMA"))
    status, _, body = client.answer()
    assert status == 200
    np.testing.assert_allclose(outputs(body), wanted(X), rtol=1e-5)


def test_head_is_get_without_its_body(client: Client) -> None:
    client.sock.sendall(b"HEAD /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    line, headers = b"", {}
    while not line.endswith(b"\r\n\r\n"):
        line += client.sock.recv(1)
    headers = dict(re.findall(r"([a-z-]+): (.*)\r\n", line.decode()))
    assert headers["content-length"] == str(len(b'{"live":true}'))
    client.sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert client.answer()[0] == 200


@pytest.mark.parametrize(
    ("request_", "status", "why"),
    [
        (b"NONSENSE\r\n", 400, "this is not an HTTP request"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "this is not an HTTP request"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (70 << 10) + b"\r\n\r\n", 431, "has more than 65536 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n", 431, "has more than 65536 bytes"),
        (INFER + b"content-length: 5, 5\r\n\r\n", 400, "this is not an HTTP request"),
        (INFER + b"transfer-encoding: gzip, chunked\r\n\r\n", 400, "transfer-encoding 'gzip, chunked' is not read"),
        (INFER + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "must be the length of a chunk"),
        (INFER + b"content-length: 100000000\r\n\r\n", 413, "of 67108864 at most"),
        (INFER + b"content-length: 10000000\r\n\r\n", 413, "10000000 bytes of JSON, of 8388608 at most"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_as_json_and_the_connection_ends(
    client: Client, request_: bytes, status: int, why: str
) -> None:
    client.sock.sendall(request_)
    found, headers, body = client.answer()
    assert (found, headers["content-type"], headers["connection"]) == (status, "application/json", "close")
    assert why in json.loads(body)["error"]
    assert client.ended()


def test_what_is_refused_is_read_to_its_end_where_that_is_near(client: Client) -> None:
    for _ in range(3):
        client.sock.sendall(sized(b"x" * 100_000).replace(b"m1", b"m9"))
        status, headers, _ = client.answer()
        assert status == 404
        assert "connection" not in headers
    client.sock.sendall(sized(JSON))
    assert client.answer()[0] == 200


@pytest.mark.parametrize("together", [True, False], ids=["with its head", "by itself"])
@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"datatype": "BYTES", "shape": [1 << 20]}, "input is BYTES, the net takes FP32"),
        ({"shape": [1 << 17, 9]}, "input"),
        ({"name": "other", "shape": [1 << 17, 8]}, "input 'other' is unknown"),
    ],
)
def test_a_long_body_is_refused_by_what_it_begins_with(
    client: Client, server: Server, told: dict[str, Any], why: str, together: bool
) -> None:
    tensor = {"name": "input", "datatype": "FP32", "parameters": {"binary_data_size": 4 << 20}, **told}
    text = json.dumps({"inputs": [tensor]}).encode()
    request = sized(text + bytes(4 << 20), b"%s: %d" % (HEADER.encode(), len(text)))
    head = request.index(b"\r\n\r\n") + 4
    pieces = [request[: head + len(text)]] if together else [request[:head], request[head : head + len(text)]]
    for piece in pieces:
        client.sock.sendall(piece)
    status, headers, body = client.answer()
    assert (status, headers["connection"]) == (400, "close")
    assert why in json.loads(body)["error"]
    client.sock.sendall(request[head + len(text) :])
    assert client.ended()
    assert server.get("/status")["inbox_bytes"] == 0


def test_a_long_body_that_is_as_it_should_be_is_answered(client: Client) -> None:
    x = np.zeros((50_000, 8), np.float32)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)])
    client.sock.sendall(sized(b"".join(pieces), b"%s: %d" % (HEADER.encode(), json_bytes)))
    assert client.answer()[0] == 200


def test_what_a_client_that_leaves_has_asked_for_is_given_up(server: Server) -> None:
    x = np.zeros((5000, 8), np.float32)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)])
    pid = server.pid("m1")
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(5):
            client = Client(server)
            client.sock.sendall(sized(b"".join(pieces), b"%s: %d" % (HEADER.encode(), json_bytes)))
            client.sock.close()
        eventually("all five have gone", lambda: b'status="499"} 5.0' in server.ask("GET", "/metrics")[2])
        members = server.get("/status")["members"]
        assert members[0]["computing"] <= 2, "what its process has not got is not sent to it"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert server.infer("m1", X)[0] == 200
    eventually("their memory is free", lambda: server.get("/status")["inbox_bytes"] == 0)


def test_all_memory_comes_back(server: Server) -> None:
    x = np.zeros((5000, 8), np.float32)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)], parameters={"binary_data_output": True})
    for n in range(30):
        wrong = b"".join(pieces)[: -4 if n % 3 == 1 else None]
        model = "m9" if n % 3 == 2 else "m1"
        status, headers, body = server.ask("POST", f"/v2/models/{model}/infer", wrong, **{HEADER: str(json_bytes)})
        assert status == (200, 400, 404)[n % 3], body
        if status == 200:
            (found,) = read_response(body, int(headers[HEADER.lower()]))[1]
            assert found.array.shape == (5000, 3)
    assert server.get("/status")["inbox_bytes"] == 0


def test_where_there_is_no_memory_for_a_body_it_is_to_come_again(tmp_path: Path) -> None:
    save_net(tmp_path / "1.onnx", 1)
    program = "import apportion; apportion.serve(['1.onnx'], serving=apportion.Serving(port=0, inbox_bytes=300_000))"
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", np.zeros((6000, 8), np.float32))])
    with serving(tmp_path, program=("-c", program)) as server:
        halves = Client(server)
        with halves.sock:
            request = sized(b"".join(pieces), b"%s: %d" % (HEADER.encode(), json_bytes))
            halves.sock.sendall(request[:-1])
            eventually("its memory is taken", lambda: server.get("/status")["inbox_bytes"] > 192_000)
            status, headers, body = server.ask(
                "POST", "/v2/models/m1/infer", b"".join(pieces), **{HEADER: str(json_bytes)}
            )
            assert (status, "retry-after" in headers) == (429, True), body
            assert "no memory is free for" in json.loads(body)["error"]
            halves.sock.sendall(request[-1:])
            assert halves.answer()[0] == 200


def test_what_was_asked_before_the_end_is_answered_and_nobody_else_is_waited_for(tmp_path: Path) -> None:
    save_net(tmp_path / "1.onnx", 1)
    with serving(tmp_path, "1.onnx", "--deadline", "10s") as server:
        asked, idle = Client(server), Client(server)
        with asked.sock, idle.sock:
            idle.sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            idle.answer()
            pid = server.pid("m1")
            os.kill(pid, signal.SIGSTOP)
            asked.sock.sendall(sized(JSON))
            eventually("it has the request", lambda: server.get("/status")["members"][0]["computing"])
            server.process.terminate()
            server.said("^draining")
            assert idle.ended()
            os.kill(pid, signal.SIGCONT)
            status, headers, body = asked.answer()
            assert (status, headers["connection"]) == (200, "close")
            np.testing.assert_allclose(outputs(body), wanted(X), rtol=1e-5)
            assert asked.ended()
        assert server.process.wait(SECONDS) == 0


# Time


class Transport:
    """What a connection has done to its socket."""

    def __init__(self) -> None:
        self.written, self.done, self.left = b"", "", 0

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.left

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def did(*_: object, **__: object) -> bool:
            self.done += f" {name}" if name in ("abort", "close", "write_eof") else ""
            return name == "is_reading"

        return did


@pytest.mark.parametrize(
    ("received", "seconds", "status", "done"),
    [
        (b"", connections.IDLE_SECONDS, None, " close"),
        (b"GET / HT", connections.HEAD_SECONDS, 408, " write_eof"),
        (INFER + b"content-length: 5\r\n\r\n123", 3.0, 408, " write_eof"),
        (b"NONSENSE\r\n", connections.LINGER_SECONDS, 400, " write_eof abort"),
    ],
)
def test_who_takes_too_long_is_let_go(received: bytes, seconds: float, status: int | None, done: str) -> None:
    class Asked:
        def room(self, length: int) -> tuple[memoryview, None]:
            return memoryview(bytearray(length)), None

        def failed(self, error: Exception) -> Response:
            assert isinstance(error, HTTPError)
            return error.reply()

        def abandon(self) -> None:
            raise AssertionError("nobody has left")

    def opened(head: Head) -> Any:
        return Asked()

    async def run() -> Transport:
        connection, transport = Connection(opened, set(), body_seconds=3.0), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        if received:
            connection.get_buffer(-1)[: len(received)] = received
            connection.buffer_updated(len(received))
        now = asyncio.get_running_loop().time()
        connection.enforce_time_limits(now + seconds - 0.5)
        before = transport.done.replace(" write_eof", "") if status == 400 else transport.done
        assert before == "", "it has time"
        connection.enforce_time_limits(now + seconds + 0.5)
        return transport

    transport = asyncio.run(run())
    assert transport.done == done
    assert transport.written[:12] == (b"" if status is None else b"HTTP/1.1 %d" % status)


def test_who_does_not_read_its_answer_is_let_go() -> None:
    async def run() -> Transport:
        connection, transport = Connection(lambda head: Response(200, b""), set(), body_seconds=3.0), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.pause_writing()
        now = asyncio.get_running_loop().time()
        at = now
        for left in (5000, 4000, 4000):
            transport.left = left
            at += SENT_SECONDS - 0.5
            connection.enforce_time_limits(at)
            assert transport.done == "", "some of it has been read"
        connection.enforce_time_limits(at + 1.0)
        return transport

    assert asyncio.run(run()).done == " abort"


@pytest.mark.usefixtures("cold_programs")  # in a warm one torch's own logging waits too
def test_a_log_that_nobody_reads_holds_nobody_up() -> None:
    program = """
import time
from apportion.serving.log import MOST_LINES, log
began = time.monotonic()
for n in range(3 * MOST_LINES):
    log("x" * 100)
print(time.monotonic() - began, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert float(process.stdout.readline()) < 5.0
        assert process.wait(SECONDS) == 0, "and it ends all the same"
    finally:
        process.kill()
        process.communicate()


def test_lines_that_were_dropped_are_counted() -> None:
    program = """
import sys, time
from apportion.serving import log
log.TOGETHER_SECONDS = 0.3
for n in range(log.MOST_LINES + 7):
    log.log("line")
"""
    ran = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=SECONDS, check=True)
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    dropped = sum(line.get("lines", 0) for line in lines)
    assert sum(line["event"] == "line" for line in lines) + dropped == 10_007


# What one connection does to others


class Child:
    """A process that takes what it is sent and sends nothing by itself."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.pid = 0

    def send(self, frame: bytes) -> None:
        self.sent.append(decode(memoryview(frame), memoryview(b"")).number)

    def kill(self) -> None:
        raise AssertionError("it is not hung")


class Instant(Pace):
    """Whatever is asked takes no time."""

    def took(self, rows: int, seconds: float) -> None:
        pass


def batcher() -> tuple[DynamicBatcher, Child]:
    made, child = DynamicBatcher("m", queue_length=64, most_rows=32), Child()
    made.process_started(child, batched=True)  # type: ignore[arg-type]
    made.times.pace = Instant()  # all that waits is computed together
    return made, child


def work(settle: Callable[[Any], None], seconds: float = 10.0) -> MemberTask:
    deadline = asyncio.get_running_loop().time() + seconds
    return MemberTask([Placed("FP32", X)], 1, deadline, settle)


def test_who_asks_again_while_answers_are_given_disturbs_no_one() -> None:
    """Of a batch of three: the outputs lie in memory that the next batch is written over."""

    async def run() -> None:
        requests, child = batcher()
        memory, got = bytearray(4 * 64), []

        def again(outcome: Any) -> None:
            got.append(outcome[0].tolist())
            requests.submit(work(lambda outcome: None))
            requests.submit(work(lambda outcome: None))
            memory[:] = bytes(len(memory))

        for _ in range(AT_ONCE):
            requests.submit(work(lambda outcome: None))
        for settle in (again, lambda outcome: got.append(outcome[0].tolist())):
            requests.submit(work(settle))
        requests._receive(Frame(Kind.DONE, 1, 0.0, (Placed("FP32", X),)))  # the two go together
        assert child.sent == [1, 2, 3]
        values = np.frombuffer(memory, np.float32)[:2].reshape(2, 1)
        values[:] = [[1.0], [2.0]]
        requests._receive(Frame(Kind.DONE, 2, 0.0, (Placed("FP32", X),)))
        requests._receive(Frame(Kind.DONE, 3, 0.0, (Placed("FP32", values, 0),)))
        assert got == [[[1.0]], [[2.0]]]
        assert len(requests.in_flight) <= AT_ONCE

    asyncio.run(run())


def test_who_asks_again_when_it_was_too_late_finds_a_queue_that_is_whole() -> None:
    async def run() -> None:
        requests, _ = batcher()
        late = []

        def again(outcome: Any) -> None:
            late.append(outcome)
            requests.submit(work(lambda outcome: None))

        for _ in range(AT_ONCE):
            requests.submit(work(lambda outcome: None))
        for _ in range(5):
            requests.submit(work(again, seconds=0.0))
        requests._receive(Frame(Kind.DONE, 1, 0.0, (Placed("FP32", X),)))
        assert len(late) == 5
        assert len(requests.in_flight) == AT_ONCE
        while requests.in_flight:
            number = next(iter(requests.in_flight))
            rows = np.zeros((requests.in_flight[number].rows, 3), np.float32)
            requests._receive(Frame(Kind.DONE, number, 0.0, (Placed("FP32", rows),)))
        assert not requests.queue

    asyncio.run(run())


def test_an_answer_that_cannot_be_taken_costs_the_others_nothing() -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: said.append(what["exception"]))
        requests, _ = batcher()
        for _ in range(AT_ONCE):
            requests.submit(work(lambda outcome: None))

        def fails(outcome: Any) -> None:
            raise OSError("it has gone")

        for settle in (fails, got.append):
            requests.submit(work(settle))
        for number in (1, 2):
            requests._receive(Frame(Kind.DONE, number, 0.0, (Placed("FP32", X),)))
        requests._receive(Frame(Kind.DONE, 3, 0.0, (Placed("FP32", np.zeros((2, 3), np.float32)),)))

    said: list[Any] = []
    got: list[Any] = []
    asyncio.run(run())
    assert [str(error) for error in said] == ["it has gone"]
    assert len(got) == 1


def test_what_comes_too_late_is_answered_without_asking_and_its_memory_is_free(tmp_path: Path) -> None:
    for n in (1, 2):
        save_net(tmp_path / f"{n}.onnx", n)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", np.zeros((5000, 8), np.float32))])
    request = sized(b"".join(pieces), b"%s: %d" % (HEADER.encode(), json_bytes)).replace(b"m1", b"ensemble")
    with serving(tmp_path, "1.onnx", "2.onnx", "--deadline", "50ms", "--replication", "between_graph") as server:
        client = Client(server)
        with client.sock:
            client.sock.sendall(request[:-1])
            eventually("its memory is taken", lambda: server.get("/status")["inbox_bytes"] > 0)
            began = time.monotonic()
            eventually("it is too late", lambda: time.monotonic() > began + 0.1)
            client.sock.sendall(request[-1:])
            assert client.answer()[0] == 504
        status = server.get("/status")
        assert status["inbox_bytes"] == 0
        assert [member["state"] for member in status["members"]] == ["closed", "closed"]


@pytest.mark.thorough
def test_large_answers_come_whole_however_slowly_they_are_read(server: Server) -> None:
    x = np.random.default_rng(3).normal(size=(400_000, 8)).astype(np.float32)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)], parameters={"binary_data_output": True})
    request = sized(b"".join(pieces), b"%s: %d" % (HEADER.encode(), json_bytes), b"connection: close")
    client = Client(server)
    with client.sock:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sock.sendall(request)
        client.rest = client.sock.recv(1)
        end = time.monotonic() + connections.LINGER_SECONDS + 1.5
        eventually("it has waited", lambda: time.monotonic() > end)
        status, headers, body = client.answer()
        assert status == 200
        (found,) = read_response(body, int(headers[HEADER.lower()]))[1]
        np.testing.assert_allclose(found.array[:100], wanted(x[:100]), rtol=1e-3, atol=1e-4)


def test_who_asks_and_asks_and_reads_nothing_is_not_listened_to(server: Server) -> None:
    page = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    before = memory(server.process.pid)
    client = Client(server)
    with client.sock:
        client.sock.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.sock.sendall(page * 200_000)
        assert memory(server.process.pid) < before + 30e6
        assert server.get("/v2/health/live") == {"live": True}


def memory(pid: int) -> int:
    """Bytes in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_wants_the_connection_to_end_gets_that(client: Client, method: str) -> None:
    client.sock.sendall(f"{method} /v2/health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    said = b""
    while piece := client.sock.recv(1 << 16):
        said += piece
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in said
