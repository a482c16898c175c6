"""A JSON reader that makes lists of numbers arrays at once. A Python object for each number takes twice as long to
make, to convert and to throw away, and much of what a server does for a request in JSON is that.

It reads what is usual; all else, and all that is wrong, is left to orjson and to the checks of what orjson found.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simdjson import Array, Object, Parser

from apportion.serving.protocol.datatypes import DATATYPES

LEAST_BYTES = 512
"""The size in bytes below which a text is left to orjson: reading it here would gain nothing."""
CACHED_PARSER_BYTES = 256 << 10
"""The largest size in bytes of a text for the parser that is kept: a parser keeps many times the memory of the longest
text that it has read, so a longer one has a parser of its own."""
MOST_TENSORS = 1000
"""The number of tensors that a request or an answer with many lists may have."""
MOST_LISTS, MOST_OBJECTS = 250_000, 20_000
"""The numbers of lists and of objects that a text may have if Python objects are made of it: while they are made,
nothing else is done. Even lists of numbers, which become arrays, are not counted."""
FEW_LISTS = 10_000
"""The number of lists and objects up to which nothing in a text needs to be counted."""
FEW_MARKS = 16
"""The number of marks up to which they are found one after the other."""
PLAIN_BYTES = 64 << 10
"""The largest size in bytes of a value that is not data, in a text with many lists."""
_KINDS: dict[str, tuple[Any, type[np.generic]]] = {
    **{name: ("d", np.float64) for name in ("FP16", "FP32", "FP64", "BF16")},
    **{name: ("i", np.int64) for name in DATATYPES if name.startswith("INT")},
    **{name: ("u", np.uint64) for name in DATATYPES if name.startswith("UINT")},
}
"""The type that numbers of each datatype are read as; simdjson refuses numbers that are not of it."""
_NESTED = (dict, list, np.ndarray)
_OF_NUMBERS = b"0123456789+-.eE \t\r\n"


_parser = Parser()


def check_lists(text: bytes) -> None:
    """Raise ValueError where the text has more lists or objects than may be made at once."""
    if text.count(b"[") <= MOST_LISTS and text.count(b"{") <= MOST_OBJECTS:
        return
    marks = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    bare = np.bitwise_xor.accumulate((marks == ord('"')).view(np.uint8)) == 0  # outside of its strings
    for what, mark, most in (("lists", "[", MOST_LISTS), ("objects", "{", MOST_OBJECTS)):
        if (many := np.count_nonzero(bare & (marks == ord(mark)))) > most:
            raise ValueError(f"the body has {many} {what} in JSON, of {most} at most: send its tensors as bytes")


def loads(text: bytes, what: str) -> dict[str, Any] | None:
    """Read a text as ``orjson.loads`` does, but with ``data`` of each of the tensors listed under ``what`` as an array,
    of the shape in which it is nested. Returns None where it is anything but even lists of numbers of its datatype's
    kind."""
    global _parser
    if len(text) < LEAST_BYTES or b"\\" in text:
        return None
    lists = _count(text, b"[")
    careful = lists + _count(text, b"{") > FEW_LISTS
    try:
        found = _read((_parser if len(text) <= CACHED_PARSER_BYTES else Parser()).parse(text), what, careful)
        arrays = [tensor["data"] for tensor in found[what] if "data" in tensor]
        # As many lists as brackets: then no list is nested in another's numbers.
        even = lists == _lists(found) if all(x.ndim == 1 for x in arrays) else _nested(text, arrays)
        return found if even else None  # of any nest simdjson gives all numbers that are in it
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError):  # no JSON, or no numbers, or no tensors
        _parser = Parser()  # the old one reads nothing more while somebody, such as a traceback, has some of its text
        return None


def _count(text: bytes, mark: bytes) -> int:
    """Return how often a mark is in the text. Most texts have few of them, which ``find`` skips to; ``count`` looks at
    every byte, and takes ten times as long over a text with few."""
    at = -1
    for found in range(FEW_MARKS):
        at = text.find(mark, at + 1)
        if at < 0:
            return found
    return text.count(mark)


def _read(root: Any, what: str, careful: bool) -> dict[str, Any]:
    if careful and len(root[what]) > MOST_TENSORS:
        raise ValueError("it has too many tensors")
    made = partial(_tensor, careful=careful)
    return {key: [*map(made, root[key])] if key == what else _plain(root[key], careful) for key in _keys(root)}


def _tensor(tensor: Any, *, careful: bool) -> dict[str, Any]:
    return {key: _numbers(tensor, careful) if key == "data" else _plain(tensor[key], careful) for key in _keys(tensor)}


def _keys(value: Any) -> list[str]:
    keys = list(value.keys())
    if len({*keys}) < len(keys):  # simdjson would take the first, as no other does
        raise ValueError("a name is there twice")
    return keys


def _numbers(tensor: Any, careful: bool) -> Any:
    code, dtype = _KINDS[tensor["datatype"]]
    data = tensor["data"]
    array = np.frombuffer(data.as_buffer(of_type=code), dtype)
    if careful and not array.size:
        raise ValueError("there are many lists and no numbers")
    return array.reshape(_shape(data))


def _shape(data: Any) -> list[int]:
    """Return the shape of a nested list, if all of it is nested as the first rows are."""
    shape, row = [], data
    while isinstance(row, Array):
        shape.append(len(row))
        row = row[0] if len(row) else None
    return shape


def _plain(value: Any, careful: bool) -> Any:
    if careful and isinstance(value, Object | Array) and len(value.mini) > PLAIN_BYTES:
        raise ValueError("what is not data is too long")
    if isinstance(value, Object):
        return value.as_dict()
    return value.as_list() if isinstance(value, Array) else value


def _lists(value: Any) -> int:
    """Return how many lists and arrays there are within a value, itself among them."""
    found, stack = 0, [value]
    while stack:
        value = stack.pop()
        if type(value) is dict:
            stack += [inner for inner in value.values() if type(inner) in _NESTED]
            continue
        found += 1
        if type(value) is list:
            stack += [inner for inner in value if type(inner) in _NESTED]
    return found


def _nested(text: bytes, arrays: Sequence[NDArray[Any]]) -> bool:
    """Return whether the text has just these arrays, nested in just these shapes: what is left of it without the
    numbers shows it."""
    _, *parts = text.translate(None, _OF_NUMBERS).split(b'"data":')
    if len(parts) != len(arrays):
        return False
    for part, array in zip(parts, arrays, strict=True):
        nest = b""
        for size in reversed(array.shape):
            nest = b"[" + b",".join([nest] * size) + b"]"
        if not part.startswith(nest):
            return False
    return True
