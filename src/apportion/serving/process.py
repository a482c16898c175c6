"""A member's process: it loads what it is told to, and answers one batch after the other until its socket is closed.

Started as ``python -m apportion.serving.process SOCKET MEMORY BYTES PARENT``. It imports the runtimes it needs and
nothing else, so that it is there in a fraction of a second.
"""

from __future__ import annotations

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

from apportion.errors import ApportionError
from apportion.lifetime import die_with_parent
from apportion.serving.arena import Arena
from apportion.serving.datatypes import Array
from apportion.serving.frames import HEAD_BYTES, Frame, Kind, Placed, decode, encode, rest_of
from apportion.serving.program import SIZES, Expired, Program, rows_by_themselves, timed
from apportion.serving.source import Source

INLINE_BYTES = 32 << 10
"""Up to here a tensor is sent; a larger one lies in shared memory."""
NEVER = math.inf


class Member:
    """One process's side of its socket."""

    def __init__(self, sock: socket.socket, arena: Arena) -> None:
        self._socket, self._arena = sock, arena
        self._known: dict[str, Program] = {}
        self._program: Program | None = None

    def serve(self) -> None:
        """Until the server closes the socket."""
        while (frame := self._receive()) is not None:
            if frame.kind == Kind.RUN:
                self._socket.sendall(self._answer(frame))
            else:
                self._tell(self._told(json.loads(frame.text)))

    def _receive(self) -> Frame | None:
        head = bytearray(HEAD_BYTES)
        if not self._filled(memoryview(head)):
            return None
        whole = bytearray(HEAD_BYTES + rest_of(head))
        whole[:HEAD_BYTES] = head
        if not self._filled(memoryview(whole)[HEAD_BYTES:]):
            return None
        return decode(memoryview(whole), self._arena.memory)

    def _filled(self, wanted: memoryview) -> bool:
        while wanted.nbytes:
            if (received := self._socket.recv_into(wanted)) == 0:
                return False
            wanted = wanted[received:]
        return True

    def _tell(self, told: dict[str, Any]) -> None:
        self._socket.sendall(encode(Kind.TOLD, 0, NEVER, text=json.dumps(told).encode()))

    # What is told

    def _told(self, order: dict[str, Any]) -> dict[str, Any]:
        what = order["what"]
        try:
            if what == "prepare":  # as a spare: whoever dies can be replaced at once
                for source in order["sources"]:
                    self._load(Source(**source))
                return {"what": "prepared"}
            assert what == "become", order
            return self._become(Source(**order["source"]), order)
        except (ValueError, ApportionError, Expired, OSError, ImportError) as error:
            return {"what": "refused", "why": f"{error}"}

    def _load(self, source: Source) -> Program:
        if source.name not in self._known:
            self._known[source.name] = source.open()
        return self._known[source.name]

    def _become(self, source: Source, order: dict[str, Any]) -> dict[str, Any]:
        self._program = program = self._load(source)
        for other in [name for name in self._known if name != source.name]:
            self._known.pop(other).close()
        batched = rows_by_themselves(program, source.rows()) if order["batched"] is None else order["batched"]
        told: dict[str, Any] = {"what": "became", "runtime": program.runtime, "batched": batched}
        told |= {what: [spec.to_json() for spec in getattr(program, what)] for what in ("inputs", "outputs")}
        if order["seconds"] > 0.0:
            sizes = [rows for rows in SIZES if rows <= order["most_rows"]] if batched else [1]
            pace = timed(program, source.rows(), seconds=order["seconds"], sizes=sizes)
            told["seconds"] = sorted(pace.seconds.items())
        return told

    # What is computed

    def _answer(self, frame: Frame) -> bytes:
        if time.monotonic() >= frame.deadline:
            return encode(Kind.EXPIRED, frame.number, frame.deadline)
        assert self._program is not None
        try:
            outputs = self._program.run([tensor.array for tensor in frame.tensors], frame.deadline)
        except Expired:
            return encode(Kind.EXPIRED, frame.number, frame.deadline)
        except ValueError as error:
            return encode(Kind.REFUSED, frame.number, frame.deadline, text=str(error).encode())
        except Exception as error:  # one request's: the next one may be another's
            text = f"{type(error).__name__}: {error}"
            return encode(Kind.FAILED, frame.number, frame.deadline, text=text.encode())
        return encode(Kind.DONE, frame.number, frame.deadline, self._placed(frame, outputs))

    def _placed(self, frame: Frame, outputs: Sequence[Array]) -> list[Placed]:
        """Over the inputs where these lie in shared memory and the outputs are large and fit; else they are sent."""
        assert self._program is not None
        types = [spec.datatype for spec in self._program.outputs]
        shared = [(t.offset, t.array.nbytes) for t in frame.tensors if t.offset is not None]
        start = min((offset for offset, _ in shared), default=0)
        end = max((offset + size for offset, size in shared), default=0)
        placed = []
        given = [tensor.array for tensor in frame.tensors]
        own = [x.copy() if any(np.may_share_memory(x, y) for y in given) else x for x in outputs]
        for datatype, output in zip(types, own, strict=True):
            place = -(-start // 64) * 64
            if datatype == "BYTES" or output.nbytes <= INLINE_BYTES or place + output.nbytes > end:
                placed.append(Placed(datatype, output))
                continue
            there = np.frombuffer(self._arena.memory, output.dtype, output.size, place).reshape(output.shape)
            np.copyto(there, output)
            placed.append(Placed(datatype, there, place))
            start = place + output.nbytes
        return placed


def main() -> None:
    """Of the process."""
    die_with_parent(int(sys.argv[4]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; the server ends them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor, memory, nbytes = map(int, sys.argv[1:4])
    with socket.socket(fileno=descriptor) as sock:
        try:
            Member(sock, Arena(nbytes, memory)).serve()
        except (BrokenPipeError, ConnectionResetError):  # the server has gone
            pass
    os._exit(0)  # nothing is left to be saved


if __name__ == "__main__":
    main()
