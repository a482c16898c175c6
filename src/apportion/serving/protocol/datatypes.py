"""The Open Inference Protocol's datatypes, and their forms in numpy, in JSON and as bytes.

BYTES are arrays of ``bytes`` objects. BF16, which numpy does not have, are the upper halves of float32's bits, as
uint16.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "BYTES": np.dtype(object),
    "BF16": np.dtype(np.uint16),
}
"""The numpy dtypes by the protocol's name."""
NAMES = {dtype: name for name, dtype in DATATYPES.items() if name != "BF16"}
MOST_DIMS = 32
"""The largest number of dimensions of a nested list."""
MOST_TEXTS = 1 << 20
"""The number of BYTES values that a tensor may have: each is an object, and while they are made nothing else is
done."""
_LENGTH = struct.Struct("<I")


def to_bf16(values: Array) -> Array:
    """Round to the nearest bfloat16, ties to even, and return the bits; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding 0x7FFF and the lowest bit that is kept rounds to nearest with ties to even; the carry into the exponent is
    # right as well. NaN could become infinity by it, and is replaced below.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bf16(bits: Array) -> Array:
    """Return the values of bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


# JSON


def from_json(data: object, datatype: str, elements: int) -> Array:
    """Read ``elements`` values in row-major order, given flat or nested, or as the array of numbers that
    ``json_numbers`` made of them. Raises ValueError where they are of another type or number."""
    if isinstance(data, np.ndarray):
        values = _fitted(data, datatype).reshape(-1)
    elif isinstance(data, list):
        values = _texts(data, elements) if datatype == "BYTES" else _numbers(data, datatype)
    else:
        raise ValueError(f"data is {_kind(data)}: it must be a list, flat or nested as the shape is")
    if values.size != elements:
        raise ValueError(f"data has {values.size} values, its shape asks for {elements}")
    return values


def _numbers(data: list[Any], datatype: str) -> Array:
    """Convert a nested list to a flat array. Only values of the right Python type reach numpy, which would make numbers
    of almost anything."""
    leaves = data
    for _ in range(MOST_DIMS):
        if not leaves or type(leaves[0]) is not list:
            break
        if set(map(type, leaves)) != {list} or len(set(map(len, leaves))) > 1:
            raise ValueError("data is uneven: all rows of a nested list must be as long as each other")
        leaves = list(chain.from_iterable(leaves))
    dtype = DATATYPES[datatype]
    floating = dtype.kind == "f" or datatype == "BF16"
    accepted: set[type] = {bool} if datatype == "BOOL" else {int, float} if floating else {int}
    wanted = "true or false" if datatype == "BOOL" else "numbers" if floating else "integers"
    if not set(map(type, leaves)) <= accepted:
        raise ValueError(f"data has values that are not {datatype}: they must be {wanted}")
    try:
        return _fitted(np.array(leaves, dtype=np.float64), datatype) if floating else np.array(leaves, dtype=dtype)
    except OverflowError as error:
        raise _outside(datatype) from error


def _fitted(numbers: Array, datatype: str) -> Array:
    """Convert numbers to this type: floating ones are rounded, as numpy does it. Raises ValueError where one is outside
    of it."""
    dtype = DATATYPES[datatype]
    if numbers.dtype.kind == "f":
        try:
            with np.errstate(over="raise"):
                return to_bf16(numbers) if datatype == "BF16" else numbers.astype(dtype, copy=False)
        except FloatingPointError as error:
            raise ValueError(f"data has a value that is too large for {datatype}") from error
    limits = np.iinfo(dtype)
    if numbers.size and (numbers.min() < limits.min or numbers.max() > limits.max):
        raise _outside(datatype)
    return numbers.astype(dtype, copy=False)


def _outside(datatype: str) -> ValueError:
    limits = np.iinfo(DATATYPES[datatype])
    return ValueError(f"data has a value outside of {datatype}, which is from {limits.min} to {limits.max}")


def _texts(data: list[Any], elements: int) -> Array:
    found = list(islice(_flat(data), elements + 1))
    for text in found:
        if not isinstance(text, str):
            raise ValueError(f"data has {_kind(text)}: values of BYTES are strings in JSON")
    return objects([text.encode(errors="surrogatepass") for text in found])


def _flat(data: list[Any]) -> Iterator[Any]:
    stack = [iter(data)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                break
            yield item
        else:
            stack.pop()


def objects(values: Sequence[bytes]) -> Array:
    """Return an array of the datatype BYTES."""
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def to_json(array: Array, datatype: str) -> Any:
    """Return what orjson writes as a flat list (with OPT_SERIALIZE_NUMPY). Raises ValueError where the values cannot be
    JSON."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if datatype == "BYTES":
        try:
            return [value.decode() for value in flat]
        except UnicodeDecodeError as error:
            raise ValueError("an output of BYTES is not UTF-8 and cannot be JSON: ask for binary_data") from error
    if datatype == "BF16":
        return from_bf16(flat)
    return flat.astype(np.float32) if datatype == "FP16" else flat


def _kind(value: object) -> str:
    names = {dict: "an object", str: "a string", type(None): "null", bool: "true or false", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else f"a {type(value).__name__}")


# Bytes


def from_bytes(data: memoryview, datatype: str, elements: int) -> Array:
    """Read ``elements`` values in row-major order, little-endian: a view of the bytes where the values are numbers.
    Raises ValueError where they are more or fewer."""
    if datatype == "BYTES":
        if elements > MOST_TEXTS:
            raise ValueError(f"its shape asks for {elements} values of BYTES, of {MOST_TEXTS} at most")
        return objects(list(_strings(data, elements)))
    dtype = DATATYPES[datatype]
    if data.nbytes != elements * dtype.itemsize:
        raise ValueError(f"{data.nbytes} bytes of {datatype}: its shape asks for {elements * dtype.itemsize}")
    values = np.frombuffer(data, dtype=dtype)
    # numpy computes with any byte as a bool, and results would depend on the operator: only 0 and 1 are well defined.
    if datatype == "BOOL" and elements and values.view(np.uint8).max() > 1:
        raise ValueError("a byte of BOOL is neither 0 nor 1")
    return values


def _strings(data: memoryview, elements: int) -> Iterator[bytes]:
    at = 0
    for _ in range(elements):
        if at + _LENGTH.size > data.nbytes:
            raise ValueError(f"bytes of BYTES end before the {elements} values that its shape asks for")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > data.nbytes:
            raise ValueError(f"a value of BYTES is {length} bytes long by its length, of which {data.nbytes - at} came")
        yield bytes(data[at : at + length])
        at += length
    if at != data.nbytes:
        raise ValueError(f"{data.nbytes - at} bytes are left over after {elements} values of BYTES")


def to_bytes(array: Array, datatype: str) -> bytes | memoryview:
    """Return the values as bytes in row-major order, little-endian; each value of BYTES has its length before it."""
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(value)) + value for value in array.reshape(-1))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
