"""The process of a member: it loads the models that the server names, and answers one batch after the other until its
socket is closed.

It is started as ``python -m apportion.serving.pool.worker_main PARENT SOCKET INBOX BYTES OUTBOX BYTES``. It imports the
runtimes that it needs and nothing else, so that it is ready in a fraction of a second."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from apportion.comm.sync import round_up
from apportion.errors import ApportionError
from apportion.process import die_with_parent
from apportion.serving.pool.frames import INLINE_BYTES, Arena, Frame, Kind, Placed, Reader, decode, encode
from apportion.serving.protocol.datatypes import Array
from apportion.serving.runtimes.runtime import SIZES, Expired, Runtime, timed
from apportion.serving.runtimes.source import Source

NEVER = math.inf
_REFUSALS = (ValueError, ApportionError, Expired, OSError, ImportError)
"""The errors that loading a model raises where it cannot be loaded."""


class MemberProcess:
    """The process's side of its socket. ``inbox``: where large inputs lie. ``outbox``: where large outputs are laid, in
    one half of it for every other batch: while the server reads the one the other is written."""

    def __init__(self, sock: socket.socket, inbox: Arena, outbox: Arena) -> None:
        self._socket, self._inbox, self._outbox = sock, inbox, outbox
        self._known: dict[str, Runtime] = {}
        self._program: Runtime | None = None

    def serve(self) -> None:
        """Answer frames until the server closes the socket."""
        reader = Reader()
        while received := self._socket.recv_into(reader.room):
            for whole in reader.advance(received):
                frame = decode(whole, self._inbox.memory)
                if frame.kind == Kind.RUN:
                    self._socket.sendall(self._answer(frame))
                else:
                    self._send_control(self._handle_control(json.loads(frame.text)))

    def _send_control(self, message: dict[str, Any]) -> None:
        self._socket.sendall(encode(Kind.CONTROL, 0, NEVER, text=json.dumps(message).encode()))

    # Control messages

    def _handle_control(self, order: dict[str, Any]) -> dict[str, Any]:
        what = order["what"]
        try:
            if what == "prepare":  # as a spare, which can replace a member that dies at once
                return {"what": "prepared", "refused": self._prepare(order["sources"])}
            assert what == "become", order
            return self._become(Source.from_json(order["source"]), order)
        except _REFUSALS as error:
            return {"what": "refused", "why": f"{error}"}

    def _prepare(self, sources: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Load these models, and return by member name why some of them could not be loaded."""
        refused = {}
        for source in sources:
            try:
                self._load(Source.from_json(source))
            except _REFUSALS as error:
                refused[source["name"]] = f"{error}"
        return refused

    def _load(self, source: Source) -> Runtime:
        if source.name not in self._known:
            self._known[source.name] = source.open()
        return self._known[source.name]

    def _become(self, source: Source, order: dict[str, Any]) -> dict[str, Any]:
        self._program = program = self._load(source)
        for other in [name for name in self._known if name != source.name]:
            self._known.pop(other).close()
        batched = source.batched and program.batched if order["batched"] is None else order["batched"]
        gc.freeze()  # what is there now stays: to look through it again and again would hold up answers
        answer: dict[str, Any] = {"what": "became", "runtime": program.runtime, "batched": batched}
        answer |= {what: [spec.to_json() for spec in getattr(program, what)] for what in ("inputs", "outputs")}
        if order["seconds"] > 0.0:
            sizes = [rows for rows in SIZES if rows <= order["most_rows"]] if batched else [1]
            pace = timed(program, source.rows(), seconds=order["seconds"], sizes=sizes)
            answer["seconds"] = sorted(pace.seconds.items())
        return answer

    # Batches

    def _answer(self, frame: Frame) -> bytes:
        # The deadline is absolute on CLOCK_MONOTONIC, which all processes of a host share: time that the frame spent in
        # the socket counts.
        if time.monotonic() >= frame.deadline:
            return encode(Kind.EXPIRED, frame.number, frame.deadline)
        assert self._program is not None
        try:
            outputs = self._program.run(self._inputs(frame.tensors), frame.deadline)
            return encode(Kind.DONE, frame.number, frame.deadline, self._place_outputs(frame.number, outputs))
        except Expired:
            return encode(Kind.EXPIRED, frame.number, frame.deadline)
        except ValueError as error:
            return encode(Kind.REFUSED, frame.number, frame.deadline, text=_encoded(str(error)))
        except Exception as error:  # one request's: the next one may be another's
            text = _encoded(f"{type(error).__name__}: {error}")
            return encode(Kind.FAILED, frame.number, frame.deadline, text=text)

    def _inputs(self, tensors: Sequence[Placed]) -> list[Array]:
        """Return the rows of all requests, one after the other, for each input. Tensors that are not aligned, as they
        lie in a client's body, are copied."""
        assert self._program is not None
        count = len(self._program.inputs)
        arrays = [t.array if t.array.flags.aligned else t.array.copy() for t in tensors]
        return arrays if len(arrays) == count else [np.concatenate(arrays[n::count]) for n in range(count)]

    def _place_outputs(self, number: int, outputs: Sequence[Array]) -> list[Placed]:
        """Lay outputs in shared memory where they are large and fit; the others are sent."""
        assert self._program is not None
        # Batches are numbered in turn and at most two are in flight (AT_ONCE). The server has copied the outputs of
        # batch n before it sends batch n + 2, which uses the same half again: no lock is needed.
        half = self._outbox.nbytes // 2
        place = number % 2 * half
        end, placed = place + half, []
        for spec, output in zip(self._program.outputs, outputs, strict=True):
            # Each output begins on a cache line, which also aligns it for its dtype.
            place = round_up(place)
            if output.nbytes <= INLINE_BYTES or spec.datatype == "BYTES" or place + output.nbytes > end:
                placed.append(Placed(spec.datatype, output))
                continue
            there = np.frombuffer(self._outbox.memory, output.dtype, output.size, place).reshape(output.shape)
            np.copyto(there, output)
            placed.append(Placed(spec.datatype, there, place))
            place += output.nbytes
        return placed


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")


def main() -> None:
    """Run the process of a member."""
    parent, descriptor, inbox, inbox_bytes, outbox, outbox_bytes = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; the server ends them
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # and so may that: what the server has is still answered
    with socket.socket(fileno=descriptor) as sock:
        try:
            MemberProcess(sock, Arena(inbox_bytes, inbox, readonly=True), Arena(outbox_bytes, outbox)).serve()
        except (BrokenPipeError, ConnectionResetError):  # the server has gone
            pass
    # Without interpreter shutdown: threads of a runtime may still hold buffers, and waiting for them would delay the
    # end of the server.
    os._exit(0)  # nothing is left to be saved


if __name__ == "__main__":
    main()
