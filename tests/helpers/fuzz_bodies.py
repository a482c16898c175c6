"""Bodies of requests as nobody should send them; how they are sent is as it should be."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

from fuzz_case import BAD, Case, cut, http, refused, sound


def good(rng: Random, n: int) -> Case:
    made = sound(rng, n)
    return Case(cut(rng, made.raw), [made.wanted], keeps=True)


def spoilt_tree(rng: Random, n: int) -> Case:
    """Something in the JSON is something else, or is not there."""
    made = sound(rng, n)
    values: list[Any] = [None, True, -1, 0, 2**63, 2**64, 10**30, 1.5, 1e308, "", "x", "FP32", "\ud800", [], {}, [[]]]
    values += [[1, [2]], {"data": 1}, [None], "\0", "9" * 5000, [0] * 2000]
    for _ in range(rng.choice([1, 1, 1, 3])):
        place: Any = made.told
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = rng.choice(keys)
            if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.3:
                break
            place = place[key]
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = deepcopy(rng.choice(values))
        if not made.told:
            break
    return refused(made.raw, BAD | {200, 504})


def shape(rng: Random, n: int) -> Case:
    made = sound(rng, n)
    tensor = rng.choice(made.told["inputs"])
    right = tensor["shape"]
    wrong: list[Any] = [[-1], [1 << 40], [2**31, 2**31, 2**31], [*right[::-1], 7], [[1]], ["1"], [1.0], [True], 3]
    wrong += [{}, None, "1,3", [0, 2**62], [1] * 33, [n + 1 for n in right], [2**64], [-(2**70)]]
    tensor["shape"] = rng.choice(wrong)
    return refused(made.raw)


def datatype(rng: Random, n: int) -> Case:
    made = sound(rng, n)
    tensor = rng.choice(made.told["inputs"])
    names = [
        "FP32",
        "INT64",
        "BOOL",
        "BYTES",
        "FP64",
        "BF16",
        "UINT8",
        "fp32",
        "FP32 ",
        "",
        None,
        32,
        ["FP32"],
        "x" * 9999,
    ]
    tensor["datatype"] = rng.choice([name for name in names if name != tensor["datatype"]])
    return refused(made.raw)


def sizes(rng: Random, n: int) -> Case:
    """What is said of the bytes is not so."""
    made = sound(rng, n, binary=True)
    tensor = rng.choice(made.told["inputs"])
    right = tensor["parameters"]["binary_data_size"]
    wrong: list[Any] = [
        right + 1,
        right - 1,
        right + 4,
        -right,
        -1,
        2**31,
        2**64,
        10**40,
        str(right),
        right + 0.5,
        None,
    ]
    wrong += [True, [right], {}, 1 << 26]
    if rng.random() < 0.2:
        made.binary = made.binary[: -rng.randint(1, len(made.binary) - 1)]
    elif rng.random() < 0.2:
        made.binary += rng.randbytes(rng.choice([1, 4, 5000]))
    elif rng.random() < 0.2:  # a text that says it is longer than all
        tensor = made.told["inputs"][3]
        at = len(made.binary) - tensor["parameters"]["binary_data_size"]
        made.binary = made.binary[:at] + b"\xff\xff\xff\xff" + made.binary[at + 4 :]
    else:
        tensor["parameters"]["binary_data_size"] = rng.choice(wrong)
    return refused(made.raw)


def text(rng: Random, n: int) -> Case:
    """JSON that is none, or that is odd."""
    right = json.dumps(sound(rng, n, binary=False).told)
    deep = rng.choice([100, 1000, 10_000, 100_000])
    value = rng.choice(["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "1" + "0" * 5000, "0.1e", "01"])
    value = rng.choice([value, "[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, "[" * deep, '"\\ud800"'])
    odd: list[bytes] = [right.replace(f'"id": "{n}"', f'"id": {value}').encode()]
    odd += [
        right.replace('"data": [', f'"data": [{value}, ', 1).encode(),
        value.encode(),
        b"\xef\xbb\xbf" + right.encode(),
    ]
    odd += [right.encode("utf-16"), b"\xff" + right.encode(), right.encode().replace(b"x", b"\xc3\x28"), b"null", b"[]"]
    odd += [right[:-1].encode(), right.encode() + b"}", f"{right[:-1]},{right[1:]}".encode(), b"\0" * 100, b'"', b"{}"]
    odd += [right[:-1].encode() + b', "inputs": []}', right.replace('"name": "i"', '"name": "x", "name": "i"').encode()]
    return refused(http(rng.choice(odd)), BAD | {200})
