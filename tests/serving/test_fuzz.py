"""Ten thousand requests as nobody should send them, to a server: it answers or refuses each in time, says why, keeps
nothing of them, and answers those that are as they should be."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import onnx
import psutil
import pytest
from fuzz_bodies import good
from fuzz_case import CLOSED, HEADER, Case, Then, Wanted
from fuzz_http import case as fuzzed
from onnx import TensorProto, helper
from served import Server, children, descriptors, eventually, serving

from apportion.serving.protocol.v2 import read_response

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("cold_servers")]

REQUESTS, WARM = 10_000, 2_000
EACH, ROUNDS = REQUESTS - WARM, 3
"""A leak grows in every round; what a busy machine makes the allocator keep grows once."""
CLIENTS = 12
QUIET_SECONDS = 0.1
"""Without an answer to what may not be whole."""
HANG_SECONDS, ALL_SECONDS = 20.0, 80.0
GROWTH_BYTES = 8 << 20
"""Of one process in the 8,000 requests between the samples: a kilobyte for each would be more."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Ended(Exception):
    """The server has closed the connection."""


class Connection:
    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), HANG_SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def send(self, data: bytes) -> None:
        """Who refuses a request need not read all of it."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def half_close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def answer(self, seconds: float, *, bodiless: bool = False) -> Answer:
        """The next one. TimeoutError after so long; Ended."""
        end = time.monotonic() + seconds
        while b"\r\n\r\n" not in self.buffer:
            self._more(end)
        head, _, rest = self.buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        found = re.fullmatch(r"HTTP/1\.1 (\d\d\d) .+", first)
        assert found, f"no status line: {first[:200]!r}"
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if found[1] == "100":
            self.buffer = rest
            return Answer(100, headers, b"")
        size = 0 if bodiless else int(headers["content-length"])
        while len(rest) < size:
            self._more(end)
            rest = self.buffer[len(head) + 4 :]
        self.buffer = rest[size:]
        return Answer(int(found[1]), headers, rest[:size])

    def _more(self, end: float) -> None:
        self.sock.settimeout(max(0.001, end - time.monotonic()))
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        finally:
            self.sock.settimeout(HANG_SECONDS)
        if not data:
            raise Ended
        self.buffer += data


def closed_after(case: Case, connection: Connection) -> bool:
    """Sends it and takes what is answered. Can the connection not be used again? AssertionError where the answer is
    none that it may be."""
    first, *others = case.pieces
    connection.send(first)
    if case.asks:
        assert connection.answer(HANG_SECONDS).status == 100, "not told to go on"
    for piece in others:
        connection.send(piece)
    if case.then is Then.LEAVE:
        return True
    if case.then is Then.HALF_CLOSE:
        connection.half_close()
    for wanted in case.wanted:
        try:
            answer = taken(case, connection)
        except Ended:
            assert CLOSED in wanted.statuses, "closed without an answer"
            return True
        check(answer, wanted, bodiless=first.startswith(b"HEAD "))
    return not case.keeps or answer.headers.get("connection") == "close"


def taken(case: Case, connection: Connection) -> Answer:
    """The next answer; leave to go on (100) is none."""
    bodiless, seconds = case.pieces[0].startswith(b"HEAD "), HANG_SECONDS
    if case.then is Then.COAX:
        seconds = QUIET_SECONDS
    while True:
        try:
            answer = connection.answer(seconds, bodiless=bodiless)
        except TimeoutError:
            if seconds == HANG_SECONDS:
                raise
            connection.half_close()
            seconds = HANG_SECONDS
        else:
            if answer.status != 100:
                return answer


def check(answer: Answer, wanted: Wanted, *, bodiless: bool = False) -> None:
    assert answer.status in wanted.statuses, f"{answer.status} {answer.body[:300]!r}, not {sorted(wanted.statuses)}"
    if answer.status != 200 and not bodiless:
        assert answer.headers["content-type"] == "application/json", answer
        told = json.loads(answer.body)
        assert list(told) == ["error"], told
        assert isinstance(told["error"], str), told
        assert 0 < len(told["error"]) < 2000, told
    if wanted.outputs is not None and answer.status == 200:
        size = answer.headers.get(HEADER.lower())
        head, tensors = read_response(answer.body, None if size is None else int(size))
        assert head["id"] == wanted.id, "the answer to another request"
        assert {t.name: plain(t.array) for t in tensors} == wanted.outputs


def plain(array: Any) -> list[Any]:
    return [v.decode() if isinstance(v, bytes) else v for v in array.reshape(-1).tolist()]


def sent(port: int, numbers: Iterator[int]) -> list[str]:
    """What was wrong. Whoever can be is sent on the connection of the one before."""
    wrong: list[str] = []
    connection: Connection | None = None
    for n in numbers:
        case = fuzzed(n)
        connection = connection or Connection(port)
        over = True
        try:
            over = closed_after(case, connection)
        except (AssertionError, Ended, TimeoutError, ValueError, KeyError) as error:
            wrong.append(f"{case.name}: {error!r}"[:600])
        if over:
            connection.sock.close()
            connection = None
    if connection is not None:
        connection.sock.close()
    return wrong


def sent_by_all(port: int, numbers: range) -> list[str]:
    """By several clients at once: each takes the next number."""
    wrong: list[str] = []
    left, lock = iter(numbers), threading.Lock()

    def taking() -> Iterator[int]:
        while True:
            with lock:
                n = next(left, None)
            if n is None:
                return
            yield n

    def client() -> None:
        wrong.extend(sent(port, taking()))

    threads = [threading.Thread(target=client, daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + ALL_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return wrong + [f"not over in {ALL_SECONDS} s"] * sum(thread.is_alive() for thread in threads)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a net with inputs of four datatypes."""
    folder = tmp_path_factory.mktemp("fuzz")
    tensor = helper.make_tensor_value_info
    inputs = [tensor("x", TensorProto.FLOAT, ["rows", 3]), tensor("i", TensorProto.INT64, ["rows"])]
    inputs += [tensor("flag", TensorProto.BOOL, ["rows"]), tensor("text", TensorProto.STRING, ["rows"])]
    outputs = [tensor("twice", TensorProto.FLOAT, ["rows", 3]), tensor("i_back", TensorProto.INT64, ["rows"])]
    outputs += [tensor("flipped", TensorProto.BOOL, ["rows"]), tensor("text_back", TensorProto.STRING, ["rows"])]
    nodes = [helper.make_node("Add", ["x", "x"], ["twice"]), helper.make_node("Identity", ["i"], ["i_back"])]
    nodes += [helper.make_node("Not", ["flag"], ["flipped"]), helper.make_node("Identity", ["text"], ["text_back"])]
    graph = helper.make_graph(nodes, "mixed", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "mixed.onnx")
    with serving(folder, "m=mixed.onnx", "--deadline", "10s") as made:
        made.said("^spare ready")
        eventually("ready", lambda: made.ask("GET", "/v2/health/ready")[0] == 200)
        yield made


def held(server: Server) -> dict[int, tuple[int, int]]:
    """(bytes of memory, descriptors) of the server and its processes, once it has closed the connections."""
    pids = [server.process.pid, *children(server.process.pid)]
    found: list[int] = []

    def settled() -> bool:
        """The same twice."""
        found.append(descriptors(server.process.pid))
        return len(found) > 1 and found[-1] == found[-2] <= min(found)

    eventually("its connections are closed", settled)
    return {pid: (psutil.Process(pid).memory_info().rss, descriptors(pid)) for pid in pids}


@pytest.mark.thorough
def test_ten_thousand_requests_as_nobody_should_send_them(server: Server) -> None:
    wrong = sent_by_all(server.port, range(WARM))
    grown = []
    for number in range(ROUNDS):
        before = held(server)
        wrong += sent_by_all(server.port, range(WARM + number * EACH, WARM + (number + 1) * EACH))
        after = held(server)
        kinds = Counter(line.split()[0] for line in wrong)
        assert not wrong, f"{len(wrong)}: {dict(kinds)}\n" + "\n".join(sorted(wrong)[:40])
        assert after.keys() == before.keys(), "a process has ended"
        assert all(after[pid][1] <= before[pid][1] for pid in before), (before, after)
        if all(after[pid][0] - before[pid][0] < GROWTH_BYTES for pid in before):
            break
        grown.append((before, after))
    assert len(grown) < ROUNDS, f"its memory grows in every round: {grown}"
    loud = [line for line in server.lines if line.get("level") == "error" or line.keys() == {"event"}]
    assert not loud, loud[:5]
    connection = Connection(server.port)
    again = [good(Random(n), n) for n in range(20)]
    for case in again:
        assert not closed_after(case, connection)
    connection.sock.close()
