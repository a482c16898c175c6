"""Requests to a server of the Open Inference Protocol, one after the other on each of some connections: what they took.

    python benchmarks/sides/serve_client.py '{"port": 8000, "path": "/v2/models/m/infer", "body": "FILE",
                                        "headers": {...}, "connections": 4, "seconds": 5, "rate": 200}'

Without "rate" a connection sends as soon as it has its answer. With it, so many a second are due at even times,
whatever the server does: one that finds no connection free waits, and its latency counts from when it was due.

One line of JSON: {"began", "took": [[seconds since began, latency, status, degraded], ...]}. Plain sockets and one
thread: what the client itself takes is small, and the same for every server.
"""

import json
import selectors
import socket
import sys
import time
from collections import deque
from pathlib import Path

TIMEOUT = 30.0


class Connection:
    """One request at a time."""

    def __init__(self, port, request):
        self.port, self.request = port, request
        self.open()

    def open(self):
        self.sock = socket.create_connection(("127.0.0.1", self.port), TIMEOUT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray()

    def send(self, began):
        """``began``: when it was due."""
        self.began = began
        self.sock.sendall(self.request)

    def receive(self):
        """(status, head, body) once all is there; None until then; status 0 where the connection has ended."""
        data = self.sock.recv(1 << 20)
        if not data:
            return 0, b"", b""
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        lower = bytes(head).lower()
        if not ended(lower, body):
            return None
        self.buffer = bytearray()
        return int(head.split(b" ", 2)[1]), lower, bytes(body)


def ended(head, body):
    """Is it all there?"""
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"\r\n0\r\n\r\n")  # which no JSON has within
    at = head.index(b"content-length:") + 15
    return len(body) >= int(head[at : (head + b"\r\n").index(b"\r\n", at)])


def request(order):
    body = Path(order["body"]).read_bytes()
    headers = {"host": "127.0.0.1", "content-length": str(len(body)), **order.get("headers", {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {order['path']} HTTP/1.1\r\n{lines}\r\n".encode() + body


class Load:
    """What is sent when, and what came of it."""

    def __init__(self, order):
        self.order, self.sent, self.took = order, 0, []
        self.selector, self.free, self.flying = selectors.DefaultSelector(), deque(), set()
        whole = request(order)
        for _ in range(order["connections"]):
            connection = Connection(order["port"], whole)
            self.selector.register(connection.sock, selectors.EVENT_READ, connection)
            self.free.append(connection)
        self.began = time.perf_counter()

    def due(self):
        """When the next one is; None: there is none."""
        rate, seconds = self.order.get("rate"), self.order["seconds"]
        if rate is None:
            now = time.perf_counter()
            return now if now < self.began + seconds else None
        return self.began + self.sent / rate if self.sent < int(rate * seconds) else None

    def run(self):
        while (at := self.due()) is not None or self.flying:
            sends = at is not None and self.free
            wait = max(0.0, at - time.perf_counter()) if sends else TIMEOUT
            if sends and wait == 0.0:
                connection = self.free.popleft()
                connection.send(at)
                self.flying.add(connection)
                self.sent += 1
                continue
            ready = self.selector.select(wait)
            if not ready and not sends:
                raise SystemExit(f"no answer in {TIMEOUT} s")
            for key, _ in ready:
                self.take(key.data)
        for connection in self.free:
            connection.sock.close()

    def take(self, connection):
        answer = connection.receive()
        if answer is None:
            return
        now = time.perf_counter()
        status, _, body = answer
        if connection in self.flying:  # one that is not may be closed by the server
            degraded = b'"degraded":true' in body
            self.took.append([connection.began - self.began, now - connection.began, status, degraded])
            self.flying.remove(connection)
            self.free.append(connection)
        if status == 0:
            self.selector.unregister(connection.sock)
            connection.sock.close()
            connection.open()
            self.selector.register(connection.sock, selectors.EVENT_READ, connection)


def main():
    load, epoch = Load(json.loads(sys.argv[1])), time.time()
    load.run()
    print(json.dumps({"began": epoch, "took": load.took}))


if __name__ == "__main__":
    main()
