"""Requests to a server of the Open Inference Protocol, one after the other on each of some connections: what they took.

    python benchmarks/serve_client.py '{"port": 8000, "path": "/v2/models/m/infer", "body": "FILE", "headers": {...},
                                        "connections": 4, "seconds": 5}'

One line of JSON: {"began", "took": [[seconds since began, latency, status, degraded], ...]}. Plain sockets and one
thread: what the client itself takes is small, and the same for every server.
"""

import json
import selectors
import socket
import sys
import time
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

    def send(self):
        self.began = time.perf_counter()
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
        at = lower.index(b"content-length:") + 15
        size = int(lower[at : (lower + b"\r\n").index(b"\r\n", at)])
        if len(body) < size:
            return None
        self.buffer = bytearray()
        return int(head.split(b" ", 2)[1]), lower, bytes(body)


def request(order):
    body = Path(order["body"]).read_bytes()
    headers = {"host": "127.0.0.1", "content-length": str(len(body)), **order.get("headers", {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {order['path']} HTTP/1.1\r\n{lines}\r\n".encode() + body


def main():
    order = json.loads(sys.argv[1])
    selector, took = selectors.DefaultSelector(), []
    whole = request(order)
    began, epoch = time.perf_counter(), time.time()
    end = began + order["seconds"]
    for _ in range(order["connections"]):
        connection = Connection(order["port"], whole)
        selector.register(connection.sock, selectors.EVENT_READ, connection)
        connection.send()
    waiting = order["connections"]
    while waiting:
        ready = selector.select(TIMEOUT)
        if not ready:
            raise SystemExit(f"no answer in {TIMEOUT} s")
        for key, _ in ready:
            connection = key.data
            answer = connection.receive()
            if answer is None:
                continue
            now = time.perf_counter()
            status, _, body = answer
            degraded = b'"degraded":true' in body
            took.append([connection.began - began, now - connection.began, status, degraded])
            if status == 0:
                selector.unregister(connection.sock)
                connection.sock.close()
                connection.open()
                selector.register(connection.sock, selectors.EVENT_READ, connection)
            if now < end:
                connection.send()
            else:
                waiting -= 1
                selector.unregister(connection.sock)
                connection.sock.close()
    print(json.dumps({"began": epoch, "took": took}))


if __name__ == "__main__":
    main()
