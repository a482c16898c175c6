"""A model on another server that is slow, large or gone: a server of a few lines, which does as each test says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from apportion.serving.runtimes import remote_runtime
from apportion.serving.runtimes.remote_runtime import RemoteRuntime, Unreachable
from apportion.serving.runtimes.runtime import Expired

X = np.zeros((1, 8), dtype=np.float32)
ABOUT = json.dumps(
    {
        "platform": "test",
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 8]}],
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}],
    }
).encode()
Answer = Callable[[socket.socket, threading.Event], None]
"""To one request; the event is set when the test is over."""


def about(sock: socket.socket, over: threading.Event) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(ABOUT), ABOUT))


def slowly(head: bytes, piece: bytes) -> Answer:
    """A piece now and then, for ever."""

    def answer(sock: socket.socket, over: threading.Event) -> None:
        sock.sendall(head)
        while not over.wait(0.02):
            sock.sendall(piece)

    return answer


def hangs_up(seconds: float) -> Answer:
    """Unanswered, after so long."""

    def answer(sock: socket.socket, over: threading.Event) -> None:
        over.wait(seconds)
        sock.shutdown(socket.SHUT_RDWR)

    return answer


@contextmanager
def answering(*answers: Answer) -> Iterator[str]:
    """The address of a server that answers so, one request after the other, on whatever connections they come."""
    over, left, threads = threading.Event(), list(answers), []

    def talk(sock: socket.socket) -> None:
        with sock:
            try:
                while sock.recv(1 << 16):
                    if not left:
                        over.wait(30)
                        return
                    left.pop(0)(sock, over)
            except OSError:  # the other side has gone
                pass

    def listen() -> None:
        while not over.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=talk, args=(sock,)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=listen))
        threads[-1].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v2/models/m"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10)


@contextmanager
def opened(address: str) -> Iterator[RemoteRuntime]:
    program = RemoteRuntime(address)
    try:
        yield program
    finally:
        program.close()


def expires(program: RemoteRuntime, seconds: float) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    with pytest.raises(Expired):
        program.run([X], began + seconds)
    return time.monotonic() - began


@pytest.mark.thorough
def test_a_second_attempt_has_only_what_the_first_has_left() -> None:
    with answering(about, hangs_up(0.8)) as address, opened(address) as program:
        assert expires(program, 1.0) < 1.5, "not 0.8 s and then another 1 s"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
    ],
    ids=["length", "chunks", "until it ends", "headers"],
)
def test_an_answer_that_comes_in_drops_is_not_waited_for_past_the_deadline(head: bytes, piece: bytes) -> None:
    with answering(about, slowly(head, piece), about) as address, opened(address) as program:
        assert expires(program, 0.3) < 1.0
        with pytest.raises(Unreachable, match="answers what cannot be read"):  # by a connection that is sound again
            program.run([X], time.monotonic() + 10)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1099511627776\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"400\r\n" + 1024 * b" " + b"\r\n"),
    ],
    ids=["length", "chunks"],
)
def test_an_answer_that_is_too_large_is_not_read(head: bytes, piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_runtime, "MOST_BYTES", 4096)
    refused = pytest.raises(Unreachable, match="answers with more than 4096 bytes")
    with answering(about, slowly(head, piece)) as address, opened(address) as program, refused:
        program.run([X], time.monotonic() + 10)


def test_a_server_that_says_nothing_is_said_not_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_runtime, "CONNECT_SECONDS", 0.2)
    with answering() as address, pytest.raises(Unreachable, match=r"does not answer within 0.2 s"):
        RemoteRuntime(address)
