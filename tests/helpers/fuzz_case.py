"""A request as nobody should send it, or as anybody should: what is sent, and what may be answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import Any

import numpy as np

from apportion.serving.protocol.datatypes import objects
from apportion.serving.protocol.v2 import HEADER, NamedTensor, write_request

CLOSED = 0
"""The connection was closed, and nothing answered."""
REFUSED = frozenset({400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 426, 429, 431})
BAD = frozenset({400})
ANY = REFUSED | {CLOSED, 200, 503, 504}
LIMIT = 64 << 10
"""Of a request's head, in bytes: what is well above it is refused, what is well below is read."""
INFER = b"POST /v2/models/m/infer HTTP/1.1"


class Then(Enum):
    """What the client does once it has sent all."""

    WAIT = auto()  # the request is whole: its answer comes by itself
    COAX = auto()  # whether it is whole nobody knows: without an answer it is half-closed, which ends it
    HALF_CLOSE = auto()  # at once
    LEAVE = auto()  # closes without reading


@dataclass(frozen=True)
class Wanted:
    """An answer. ``outputs``: by name, flat; None where it is not known which are right."""

    statuses: frozenset[int] = ANY
    id: str | None = None
    outputs: dict[str, list[Any]] | None = None


@dataclass(frozen=True)
class Case:
    """``pieces`` are sent one by one. ``keeps``: the connection can be used again. ``asks``: after the first piece it
    waits for leave to go on (100), as Expect: 100-continue says."""

    pieces: Sequence[bytes]
    wanted: Sequence[Wanted] = (Wanted(),)
    then: Then = Then.WAIT
    keeps: bool = False
    asks: bool = False
    name: str = ""


@dataclass
class Sound:
    """A request that is as it should be, in parts that can be spoilt."""

    told: dict[str, Any]
    binary: bytes
    wanted: Wanted
    headers: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        text = json.dumps(self.told).encode()
        if self.binary:
            self.headers = [f"{HEADER}: {len(text)}".encode()]
        return text + self.binary

    @property
    def raw(self) -> bytes:
        body = self.body
        return http(body, *self.headers)


def http(body: bytes = b"", *headers: bytes, line: bytes = INFER, sized: bool = True) -> bytes:
    size = [b"content-length: %d" % len(body)] if sized else []
    return b"\r\n".join([line, b"host: localhost", *headers, *size, b"", body])


def sound(rng: Random, n: int, *, binary: bool | None = None) -> Sound:
    rows = rng.randint(1, 4)
    x = [rng.randint(-400, 400) / 4 for _ in range(3 * rows)]
    i = [rng.choice([0, 1, -1, 2**63 - 1, -(2**63), rng.getrandbits(40)]) for _ in range(rows)]
    flag = [rng.random() < 0.5 for _ in range(rows)]
    text = ["".join(rng.choices('aZ \u00e9\u4e2d\U0001f600"\\\n', k=rng.randint(0, 9))) for _ in range(rows)]
    tensors = [
        NamedTensor("x", "FP32", np.array(x, np.float32).reshape(rows, 3)),
        NamedTensor("i", "INT64", np.array(i, np.int64)),
        NamedTensor("flag", "BOOL", np.array(flag)),
        NamedTensor("text", "BYTES", objects([t.encode() for t in text])),
    ]
    binary = rng.random() < 0.5 if binary is None else binary
    parameters = {"binary_data_output": rng.random() < 0.5}
    pieces, _ = write_request(tensors, binary=binary, id=str(n), parameters=parameters)
    right = {"twice": [2 * v for v in x], "i_back": i, "flipped": [not f for f in flag], "text_back": text}
    rest = b"".join(bytes(piece) for piece in pieces[1:])
    return Sound(json.loads(bytes(pieces[0])), rest, Wanted(frozenset({200}), str(n), right))


def cut(rng: Random, raw: bytes) -> list[bytes]:
    """Into one to four pieces."""
    places = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice([0, 0, 0, 1, 3])))
    pieces = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
    return [piece for piece in pieces if piece]


def refused(raw: bytes, statuses: frozenset[int] = BAD, *, keeps: bool = True) -> Case:
    return Case([raw], [Wanted(statuses)], keeps=keeps)
