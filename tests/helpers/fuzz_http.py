"""Requests as nobody should send them, each made from a number, by what is wrong with them; here: as HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from fuzz_bodies import datatype, good, shape, sizes, spoilt_tree, text
from fuzz_case import BAD, CLOSED, HEADER, LIMIT, REFUSED, Case, Then, Wanted, cut, http, refused, sound


def about(rng: Random, n: int) -> Case:
    paths = [b"/v2", b"/v2/health/live", b"/v2/models/m", b"/v2/models/m/ready", b"/openapi.json", b"/status", b"/v3"]
    paths += [b"/v2/models/%FF", b"/v2/models/m/versions/2", b"/v2/../v2", b"//v2//", b"/v2?a=%00", b"/infer", b"*"]
    method = rng.choice([b"GET", b"HEAD", b"GET", b"POST", b"OPTIONS", b"DELETE"])
    return refused(http(line=method + b" " + rng.choice(paths) + b" HTTP/1.1"), REFUSED | {200})


def method(rng: Random, n: int) -> Case:
    word = rng.choice([b"BREW", b"PATCH", b"TRACE", b"CONNECT", b"get", b"PROPFIND", b"\xff", b"P" * 3000, b"M-SEARCH"])
    target = rng.choice([b"/v2/models/m/infer", b"/v2", b"there:80", b"*"])
    return Case([http(line=word + b" " + target + b" HTTP/1.1")], [Wanted(REFUSED)], Then.WAIT)


NO_NUMBERS = (b"-1", b"x", b"1e3", b"0x10", b"1.5", b"+5", b"1_0", b"9" * 30, b"\xb2", b"5 5", b"5,6", b"-" * 4000)


def json_size(rng: Random, n: int) -> Case:
    """The header that says where the JSON ends lies."""
    made = sound(rng, n, binary=True)
    body = made.body
    right = len(body) - len(made.binary)
    near = [b"%d" % size for size in (right - 1, right + 1, 0, 1, len(body), len(body) + 1, 1 << 40)]
    lie = rng.choice([*near, *NO_NUMBERS, b""])
    return refused(http(body, HEADER.encode() + b": " + lie), BAD | {413})


def length(rng: Random, n: int) -> Case:
    """Content-Length is no number, or there are two of it, or one that is too small or far too large."""
    made = sound(rng, n)
    body, size = made.body, b"content-length: "
    how, then = rng.randrange(5), Then.COAX
    if how == 0:
        lines, statuses = [size + rng.choice(NO_NUMBERS)], REFUSED | {CLOSED}
    elif how == 1:
        lines, statuses = [size + b"%d" % len(body), size + b"%d" % (len(body) - 1)], REFUSED | {CLOSED}
    elif how == 2:
        lines, statuses = [size + b"%d" % (len(body) - rng.randint(1, len(body) - 1))], BAD
        then = Then.WAIT
    elif how == 3:
        lines, statuses = [size + b"%d" % rng.choice([(64 << 20) + 1, 1 << 40, 10**17])], frozenset({413})
        then = Then.WAIT
    else:
        lines, statuses = [size + b"%d" % len(body), b"transfer-encoding: chunked"], REFUSED | {CLOSED}
    return Case([http(body, *made.headers, *lines, sized=False)], [Wanted(statuses)], then)


def truncated(rng: Random, n: int) -> Case:
    raw = sound(rng, n).raw
    then = rng.choice([Then.HALF_CLOSE, Then.LEAVE])
    return Case(cut(rng, raw[: rng.randrange(1, len(raw))]), [Wanted(REFUSED | {CLOSED})], then)


def left(rng: Random, n: int) -> Case:
    """Whole, but who has sent it does not wait for it."""
    return Case(cut(rng, sound(rng, n).raw), then=rng.choice([Then.LEAVE, Then.HALF_CLOSE]))


def large_head(rng: Random, n: int) -> Case:
    made = sound(rng, n)
    body = made.body
    if rng.random() < 0.3:
        lines = [b"a: " + b"b" * rng.randrange(LIMIT // 2), *made.headers]
        return Case(cut(rng, http(body, *lines)), [made.wanted], keeps=True)
    size = rng.choice([LIMIT * 5 // 4, LIMIT * 2, LIMIT * 4, 1 << 20])
    how = rng.randrange(5)
    if how == 0:
        raw = http(body, b"a: " + b"b" * size)
    elif how == 1:
        raw = http(body, *(b"a%d: b" % at for at in range(size // 8)))
    elif how == 2:
        raw = http(body, line=b"POST /v2/" + b"m" * size + b" HTTP/1.1")
    elif how == 3:
        raw = http(body, b"n" * size + b": v")
    else:
        raw = b"G" * size if rng.random() < 0.5 else b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (size // 6)
    return Case([raw], [Wanted(frozenset({400, 414, 431, CLOSED}))], Then.COAX)


def line(rng: Random, n: int) -> Case:
    """What begins no request, or one that is odd."""
    lines = [
        b"GET",
        b"GET /v2",
        b"GET /v2 HTTP/9.9",
        b"GET /v2 HTTP/1.1 x",
        b"\0\1\2",
        b" GET /v2 HTTP/1.1",
        b"GET  /v2",
    ]
    lines += [b"GET /\xff\xfe HTTP/1.1", b"GET /v2\tHTTP/1.1", b"PRI * HTTP/2.0", b"GET v2 HTTP/1.1", b"", b"\n\n\n"]
    lines += [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200), b"HTTP/1.1 200 OK", b"GET /v2 HTTP"]
    lines += [b"GET http://there/v2 HTTP/1.1", b"GET /v2 HTTP/1.0", b"GET /v2\0 HTTP/1.1", b"GET /v2#\x7f HTTP/1.1"]
    heads = [b"", b"no colon", b": no name", b"a b: c", b"a : b", b" folded: x", b"a: \0", b"a: b\rc", b"\xff: \xff"]
    heads += [b"connection: close", b"connection: keep-alive, close, upgrade", b"host: another"]
    end = rng.choice([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"])
    raw = end.join([rng.choice([*lines, b"GET /v2 HTTP/1.1"]), b"host: localhost", rng.choice(heads), b"", b""])
    return Case(cut(rng, raw), then=Then.COAX)


def chunked(rng: Random, n: int) -> Case:
    made = sound(rng, n)
    pieces = cut(rng, made.body)
    coding, sizes = (
        b"transfer-encoding: chunked",
        [rng.choice([b"%x", b"%X", b"00%x", b"%x;a=b"]) % len(p) for p in pieces],
    )
    parts = [size + b"\r\n" + piece + b"\r\n" for size, piece in zip(sizes, pieces, strict=True)]
    end = rng.choice([b"0\r\n\r\n", b"0\r\na: b\r\n\r\n"])
    head = http(b"", *made.headers, coding, sized=False)
    if rng.random() < 0.4:
        return Case([head, *parts, end], [made.wanted], keeps=True)
    wrong = [
        b"x\r\n",
        b"-1\r\n",
        b"f" * 17 + b"\r\n",
        b"\r\n",
        b"5\r\nab\r\n",
        b"1\r\nabc\r\n0\r\n\r\n",
        b"\xff\r\n",
        b"5",
    ]
    wrong += [b"1;" + b"e" * 100_000 + b"\r\na\r\n0\r\n\r\n", b"0\r\n" + b"t: v\r\n" * 30_000 + b"\r\n", b"0\r\nt"]
    if rng.random() < 0.2:
        coding = b"transfer-encoding: " + rng.choice(
            [b"gzip, chunked", b"chunked, chunked", b"chunked, gzip", b"x", b""]
        )
        head = http(b"", *made.headers, coding, sized=False)
        return Case([head, *parts, end], then=Then.COAX)
    spoilt = [*parts[: rng.randrange(len(parts) + 1)], rng.choice(wrong)]
    return Case([head + b"".join(spoilt)], [Wanted(REFUSED | {CLOSED})], Then.COAX)


def pipelined(rng: Random, n: int) -> Case:
    raw, wanted = b"", []
    for _ in range(rng.randint(2, 6)):
        made = sound(rng, n)
        if rng.random() < 0.3:
            made.told["inputs"].pop()
            made.wanted = Wanted(BAD)
        raw += made.raw
        wanted.append(made.wanted)
    return Case(cut(rng, raw), wanted, keeps=True)


def expecting(rng: Random, n: int) -> Case:
    made = sound(rng, n)
    body = made.body
    if rng.random() < 0.3:
        odd = rng.choice([b"200-maybe", b"", b"100-continue, x", b"\xff"])
        return Case([http(body, *made.headers, b"expect: " + odd)], [Wanted(frozenset({200, 400, 417}))])
    raw = http(body, *made.headers, rng.choice([b"expect: 100-continue", b"Expect: 100-Continue"]))
    at = len(raw) - len(body)
    return Case([raw[:at], body], [made.wanted], asks=True, keeps=True)


def upgrade(rng: Random, n: int) -> Case:
    """Which is not offered: the request is answered as it is."""
    made = sound(rng, n)
    body = made.body
    h2c = [b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__"]
    websocket = [b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
                 b"sec-websocket-version: 13"]  # fmt: skip
    odd = [b"connection: upgrade", b"upgrade: " + rng.choice([b"", b"TLS/1.0", b"\xff", b"h2c, websocket"])]
    return Case([http(body, *made.headers, *rng.choice([h2c, websocket, odd]))], [made.wanted], keeps=True)


def encoded(rng: Random, n: int) -> Case:
    made = sound(rng, n)
    coding = rng.choice([b"gzip", b"br", b"deflate, gzip", b"\xff", b"x" * 2000])
    return refused(http(made.body, *made.headers, b"content-encoding: " + coding), frozenset({415}))


def mutated(rng: Random, n: int) -> Case:
    """Bits flipped, pieces taken out, doubled, moved, or from another request."""
    raw = bytearray(sound(rng, n).raw)
    other = sound(rng, n).raw
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        a, b = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
        match rng.randrange(6):
            case 0 | 1 if raw:
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            case 2:
                del raw[a : min(b, a + 20)]
            case 3:
                raw[a:a] = raw[a:b]
            case 4:
                raw[a:b] = rng.randbytes(rng.randrange(8))
            case 5:
                c, d = sorted(rng.randrange(len(other) + 1) for _ in range(2))
                raw[a:b] = other[c:d]
    return Case(cut(rng, bytes(raw)) or [b"\0"], then=Then.COAX)


KINDS: dict[Callable[[Random, int], Case], int] = {
    good: 14, about: 4, method: 3, spoilt_tree: 14, shape: 5, datatype: 4, sizes: 6, json_size: 4, length: 4,
    truncated: 6, left: 3, large_head: 2, line: 5, text: 7, chunked: 6, pipelined: 2, expecting: 3, upgrade: 2,
    encoded: 1, mutated: 8,
}  # fmt: skip
"""How many of a hundred or so."""


def case(n: int) -> Case:
    """The n-th: always the same."""
    rng = Random(n)
    (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
    return replace(kind(rng, n), name=f"{kind.__name__} {n}")
