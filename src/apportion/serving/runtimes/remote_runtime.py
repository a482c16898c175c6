"""The runtime for a model on another server of the Open Inference Protocol. The deadline goes with the request.

``Alarm`` is a thread that calls a function at a deadline, a time of ``time.monotonic``. The deadline is moved every few
milliseconds and seldom passes, so the thread is not woken where it is moved to a later time or cleared: it wakes at the
time that it knew, finds that nothing is due, and sleeps on.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final
from urllib.parse import urlsplit

from apportion.errors import ApportionError
from apportion.serving.protocol.datatypes import Array
from apportion.serving.protocol.v2 import HEADER, NamedTensor, read_response, write_request
from apportion.serving.runtimes.runtime import Expired, Runtime, Spec


class Alarm:
    """An alarm that is set to one time after another. ``ring`` is called in the thread; what it does must be quick."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._at = float("inf")
        self._sleeps_until = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="alarm", daemon=True)
        self._thread.start()

    def set(self, at: float) -> None:
        """Set the time at which to ring, in the place of the one before."""
        with self._changed:
            self._at = at
            # Only an earlier time has to wake the thread: for a later one it wakes by itself, finds that nothing is due
            # and sleeps on. So a request costs no thread switch.
            if at < self._sleeps_until:
                self._changed.notify()

    def clear(self) -> None:
        """Set no time. Once this has returned, the alarm has rung or will not."""
        with self._changed:
            self._at = float("inf")

    def close(self) -> None:
        """Stop the thread, which has ended afterwards."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._over:
                left = self._at - time.monotonic()
                if left <= 0.0:
                    self._at = float("inf")
                    self._ring()
                    continue
                self._sleeps_until = self._at
                self._changed.wait(None if left == float("inf") else min(left, threading.TIMEOUT_MAX))
                self._sleeps_until = 0.0


CONNECT_SECONDS = 5.0
MOST_SECONDS = 60.0
"""The longest time in seconds that an answer is waited for; where the deadline is later, the other server is asked
without a timeout, so that its own deadline holds."""
MOST_BYTES = 256 << 20
"""The largest size in bytes of an answer."""


class Unreachable(ApportionError):
    """The other server does not answer, or its answer cannot be read."""


def check_address(address: str) -> None:
    """Raise ValueError where the address does not name a model."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or "/v2/models/" not in parts.path:
        raise ValueError(f"{address} must be written http://host:port/v2/models/NAME")


@final
class RemoteRuntime(Runtime):
    """A model on another server. ``address``: http://host:port/v2/models/NAME. One connection is kept open, and made
    again where it has ended."""

    def __init__(self, address: str) -> None:
        check_address(address)
        parts = urlsplit(address)
        assert parts.hostname is not None
        self._path, self.address = parts.path.rstrip("/"), address
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port)
        self._rung = False
        self._socket: socket.socket | None = None
        self._alarm = Alarm(self._stop)
        try:
            status, _, body = self._asked("GET", self._path, b"", {}, time.monotonic() + CONNECT_SECONDS)
            if status != 200:
                raise ValueError(f"{address} is not a model: it answers {status}")
        except Expired as error:
            self.close()
            raise Unreachable(f"{address} does not answer within {CONNECT_SECONDS:g} s") from error
        except BaseException:
            self.close()
            raise
        about: dict[str, Any] = json.loads(body)
        self.runtime = f"{about.get('platform', 'unknown')} at {parts.netloc}"
        self.inputs, self.outputs = (tuple(map(_spec, about[what])) for what in ("inputs", "outputs"))

    def run(self, inputs: Sequence[Array], deadline: float) -> list[Array]:
        """Compute the outputs for these inputs, as ``Runtime.run`` says."""
        now = time.monotonic()
        left = deadline - now
        named = [NamedTensor(spec.name, spec.datatype, array) for spec, array in zip(self.inputs, inputs, strict=True)]
        parameters: dict[str, Any] = {"binary_data_output": True}
        if left < MOST_SECONDS:
            parameters["timeout"] = max(1, int(left * 1e6))
        pieces, json_bytes = write_request(named, parameters=parameters)
        headers = {HEADER: str(json_bytes), "content-type": "application/octet-stream"}
        ends = min(deadline, now + MOST_SECONDS)
        status, said, body = self._asked("POST", f"{self._path}/infer", b"".join(pieces), headers, ends)
        if status == 504:
            raise Expired
        if status != 200:
            why = f"{self.address} answers {status}: {body[:500].decode(errors='replace')}"
            raise ValueError(why) if status == 400 else Unreachable(why)
        try:
            _, outputs = read_response(body, said)
        except ValueError as error:
            raise Unreachable(f"{self.address} answers what cannot be read: {error}") from error
        by_name = {(tensor.name, tensor.datatype): tensor.array for tensor in outputs}
        if missing := [s.name for s in self.outputs if (s.name, s.datatype) not in by_name]:
            raise Unreachable(f"{self.address} answers without {missing[0]}, or with another datatype")
        return [by_name[spec.name, spec.datatype] for spec in self.outputs]

    def close(self) -> None:
        """Close the connection, and stop the thread that watches the deadlines."""
        self._alarm.close()
        self._connection.close()

    def _asked(
        self, method: str, path: str, body: bytes, headers: dict[str, str], deadline: float
    ) -> tuple[int, int | None, bytes]:
        """Send a request and return (status, bytes of JSON, body)."""
        connection = self._connection
        # A kept connection may have been closed by the other side while it was idle: one failure on it is retried on a
        # new one, a failure on a new one is reported.
        for fresh in (connection.sock is None, True):
            try:
                return self._asked_once(method, path, body, headers, deadline)
            except TimeoutError as error:
                connection.close()
                raise Expired from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if self._rung:
                    raise Expired from error
                if fresh:  # else the server may only have ended a connection that was idle
                    raise Unreachable(f"{self.address} does not answer: {error}") from error
            except Unreachable:
                connection.close()
                raise
        raise AssertionError("the second time is the last")

    def _asked_once(
        self, method: str, path: str, body: bytes, headers: dict[str, str], deadline: float
    ) -> tuple[int, int | None, bytes]:
        connection, self._rung = self._connection, False
        if (left := deadline - time.monotonic()) <= 0.0:
            raise TimeoutError
        connection.timeout = left
        if connection.sock is None:
            connection.connect()
        else:
            connection.sock.settimeout(left)
        self._socket = connection.sock  # the connection forgets it where the answer is to be the last
        self._alarm.set(deadline)  # the socket's own limit is of each piece that comes, however small
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            found = self._read(answer)
        finally:
            self._alarm.clear()
        if self._rung:
            raise TimeoutError
        said = answer.headers.get(HEADER)
        if said is not None and not said.isdecimal():
            raise Unreachable(f"{self.address} answers with {HEADER}: {said!r:.40}, which must be a number of bytes")
        return answer.status, None if said is None else int(said), found

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        long = answer.length is not None and answer.length > MOST_BYTES
        found = b"" if long else answer.read() if answer.length is not None else answer.read(MOST_BYTES + 1)
        if long or len(found) > MOST_BYTES:
            raise Unreachable(f"{self.address} answers with more than {MOST_BYTES} bytes")
        return found

    def _stop(self) -> None:
        """Shut the socket down, so that a thread that waits for it goes on."""
        self._rung = True
        assert self._socket is not None
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of TLS as well: nothing is said any more
        except OSError:  # the other server was first
            pass


def _spec(described: dict[str, Any]) -> Spec:
    return Spec(described["name"], described["datatype"], tuple(None if n < 0 else n for n in described["shape"]))
