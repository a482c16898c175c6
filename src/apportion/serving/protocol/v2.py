"""The Open Inference Protocol (V2), REST: requests and responses as bytes, with Triton's binary tensors.

::

    {"id", "parameters", "inputs": [{"name", "shape", "datatype", "data": [...]}], "outputs": [{"name"}]}

    with a header Inference-Header-Content-Length: 142
    142 bytes of JSON, where a tensor has no "data" but "parameters": {"binary_data_size": 12288}
    12288 bytes of the first such tensor, then those of the next

Specification: https://github.com/kserve/open-inference-protocol and Triton's "binary tensor data extension". All of it
is pure: what is wrong with a request is a ``ValueError`` with a sentence for the client.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from apportion.serving.protocol import json_numbers
from apportion.serving.protocol.datatypes import DATATYPES, Array, from_bf16, from_bytes, from_json, to_bytes, to_json

HEADER = "Inference-Header-Content-Length"
MOST_DIMS = 32
MOST_SIDE = 2**31
"""The longest side of a shape, also where another side is 0."""
MOST_OUTPUTS = 1000
MOST_TENSORS = 1000
MOST_TIMEOUT = 3600 * 10**6
"""The longest timeout that a request may ask for, in microseconds."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor with its name and its datatype."""

    name: str
    datatype: str
    array: Array


@dataclass(frozen=True, slots=True)
class Asked:
    """An output that is asked for."""

    name: str
    binary: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A request for inference."""

    inputs: tuple[NamedTensor, ...]
    id: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[Asked, ...] | None = None
    """The outputs that are asked for; None asks for all."""
    binary: bool = False
    """Tells whether outputs that are not asked for by name are sent as bytes rather than JSON."""

    @property
    def timeout(self) -> float | None:
        """The seconds that the request may take; None where the server's own deadline holds."""
        given = self.parameters.get("timeout", 0)
        return given / 1e6 if given else None


class Unfit(ValueError):
    """The tensor is not one that the model takes."""


Check = Callable[[str, str, Sequence[int]], None]
"""A check of a tensor's name, datatype and shape, before its elements are made: it raises ``Unfit`` where the model
does not take such a tensor."""


def read_request(
    body: bytes | memoryview,
    json_bytes: int | None = None,
    *,
    takes: Sequence[str] | None = None,
    check: Check | None = None,
) -> Request:
    """Read a request. ``json_bytes``: the bytes of JSON as the header gives them; None without a header.
    ``takes``: the names of the model's inputs."""
    content, binary = _parted(body, json_bytes, "inputs")
    parameters = _parameters(content)
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or not 0 <= timeout <= MOST_TIMEOUT:
        raise ValueError(
            f"parameters.timeout={shown(timeout)} must be microseconds, an integer from 0 to {MOST_TIMEOUT}"
        )
    identity = content.get("id")
    if identity is not None and not isinstance(identity, str):
        raise ValueError("id must be a string")
    whole = parameters.get("binary_data_output", False)
    if not isinstance(whole, bool):
        raise ValueError(f"parameters.binary_data_output={shown(whole)} must be true or false")
    listed = content.get("inputs")
    if takes is not None and isinstance(listed, list):
        _must_be_whole(listed, takes)
    inputs = _tensors(content, "inputs", binary, check)
    if not inputs:
        raise ValueError("inputs is empty: a request has at least one")
    return Request(
        inputs=inputs, id=identity, parameters=parameters, outputs=_asked(content, binary=whole), binary=whole
    )


def check_declared(text: memoryview, *, takes: Sequence[str], check: Check) -> None:
    """Raise ValueError where the JSON of a request declares tensors that the model does not take, whatever bytes
    follow.

    Other errors in it are found when the request is read.
    """
    content, _ = _parted(text, None, "inputs")
    listed = content.get("inputs")
    if not isinstance(listed, list):
        return
    _must_be_whole(listed, takes)
    for item in listed:
        if isinstance(item, dict) and isinstance(name := item.get("name"), str):
            _declared(item, name, check)


def _must_be_whole(listed: Sequence[Any], takes: Sequence[str]) -> None:
    """Raise ValueError where a tensor is missing, or there are too many, before any is looked at."""
    if len(listed) > len(takes):
        raise ValueError(f"inputs has {len(listed)} tensors, the net takes {len(takes)}")
    named = {item["name"] for item in listed if isinstance(item, dict) and isinstance(item.get("name"), str)}
    if len(named) == len(listed) and named.issubset(takes):  # else another sentence says what is wrong
        for name in takes:
            if name not in named:
                raise ValueError(f"input {name} is missing")


def _parted(body: bytes | memoryview, json_bytes: int | None, what: str) -> tuple[dict[str, Any], memoryview]:
    """Return (the JSON, the bytes after it). ``what``: the name under which the tensors are listed."""
    whole = memoryview(body)
    if not whole:
        raise ValueError("the body is empty: it must be a JSON object")
    if json_bytes is None:
        json_bytes = len(whole)
    if not 0 < json_bytes <= len(whole):
        raise ValueError(f"{HEADER}: {json_bytes} must be from 1 to the {len(whole)} bytes of the body")
    try:
        text = bytes(whole[:json_bytes])
        content = json_numbers.loads(text, what)
        if content is None:
            json_numbers.check_lists(text)
            content = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("the body must be a JSON object")
    return content, whole[json_bytes:]


def shown(value: Any) -> str:
    """Return a value that a client has sent, short enough for a sentence however long or deep it is."""
    return reprlib.repr(value)


def _parameters(content: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = content.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise ValueError("parameters must be an object")
    for name in parameters:
        if name.startswith("shared_memory_"):
            raise ValueError(f"parameters.{name}: shared memory is not offered; send the tensor itself")
        if name.startswith("sequence_"):
            raise ValueError(
                f"parameters.{name}: sequences are not offered, since no state is kept between requests; send all of a "
                "sequence in one request"
            )
    return parameters


def _tensors(
    content: Mapping[str, Any], what: str, binary: memoryview, check: Check | None = None
) -> tuple[NamedTensor, ...]:
    listed = content.get(what)
    if not isinstance(listed, list):
        raise ValueError(f"{what} must be a list of tensors")
    if len(listed) > MOST_TENSORS:
        raise ValueError(f"{what} has {len(listed)} tensors, of {MOST_TENSORS} at most")
    found, at, names = [], 0, set()
    for place, item in enumerate(listed):
        if not isinstance(item, dict):
            raise ValueError(f"{what}[{place}] must be an object")
        name = item.get("name")
        if not isinstance(name, str):
            raise ValueError(f"{what}[{place}].name must be a string")
        if name in names:
            raise ValueError(f"{what} has two tensors named {shown(name)}")
        names.add(name)
        try:
            tensor, at = _tensor(item, name, binary, at, check)
        except Unfit:
            raise
        except ValueError as error:
            raise ValueError(f"{what}[{place}] ({name[:60]}): {error}") from error
        found.append(tensor)
    if at != len(binary):
        raise ValueError(f"{len(binary) - at} bytes follow the JSON that no tensor claims by binary_data_size")
    return tuple(found)


def _declared(item: Mapping[str, Any], name: str, check: Check | None) -> tuple[str, list[int]]:
    """Return the datatype and the shape of a tensor, before its elements are made."""
    shape, datatype = item.get("shape"), item.get("datatype")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise ValueError(f"datatype={shown(datatype)} must be one of {', '.join(DATATYPES)}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape={shown(shape)} must be a list of integers that are not negative")
    if len(shape) > MOST_DIMS:
        raise ValueError(f"shape has {len(shape)} dimensions, of {MOST_DIMS} at most")
    if max(shape, default=0) > MOST_SIDE:
        raise ValueError(f"shape={shown(shape)} has a side that is longer than {MOST_SIDE}")
    if check is not None:
        check(name, datatype, shape)
    return datatype, shape


def _tensor(
    item: Mapping[str, Any], name: str, binary: memoryview, at: int, check: Check | None
) -> tuple[NamedTensor, int]:
    datatype, shape = _declared(item, name, check)
    elements, size = math.prod(shape), _parameters(item).get("binary_data_size")
    if size is None:
        if item.get("data") is None:
            raise ValueError("it has neither data nor parameters.binary_data_size")
        array = from_json(item["data"], datatype, elements)
    else:
        if item.get("data") is not None:
            raise ValueError("it has both data and parameters.binary_data_size")
        if type(size) is not int or not 0 <= size <= len(binary) - at:
            raise ValueError(
                f"binary_data_size={shown(size)} must be an integer up to {len(binary) - at}, which are left"
            )
        array = from_bytes(binary[at : at + size], datatype, elements)
        at += size
    return NamedTensor(name, datatype, array.reshape(shape)), at


def _asked(content: Mapping[str, Any], *, binary: bool) -> tuple[Asked, ...] | None:
    listed = content.get("outputs")
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise ValueError("outputs must be a list")
    if len(listed) > MOST_OUTPUTS:
        raise ValueError(f"outputs has {len(listed)} entries, of {MOST_OUTPUTS} at most")
    found: list[Asked] = []
    for place, item in enumerate(listed):
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise ValueError(f"outputs[{place}] must be an object with a name")
        parameters = _parameters(item)
        if "classification" in parameters:
            raise ValueError(f"outputs[{place}].parameters.classification is not offered; take the largest scores")
        own = parameters.get("binary_data", binary)
        if not isinstance(own, bool):
            raise ValueError(f"outputs[{place}].parameters.binary_data={shown(own)} must be true or false")
        if any(asked.name == item["name"] for asked in found):
            raise ValueError(f"outputs names {shown(item['name'])} twice")
        found.append(Asked(item["name"], own))
    return tuple(found) or None


def write_response(
    head: Mapping[str, Any], outputs: Sequence[NamedTensor], request: Request
) -> tuple[list[bytes | memoryview], int | None]:
    """Return (the body in pieces, the header's number or None). ``head``: model_name, parameters and the like."""
    binary = {asked.name: asked.binary for asked in request.outputs or ()}
    return _written(head, "outputs", [(t, binary.get(t.name, request.binary)) for t in outputs])


def write_request(
    inputs: Sequence[NamedTensor], *, binary: bool = True, **head: Any
) -> tuple[list[bytes | memoryview], int | None]:
    """Return what a client sends: (the body in pieces, the header's number or None). ``head``: id, parameters,
    outputs."""
    return _written(head, "inputs", [(tensor, binary) for tensor in inputs])


def _written(
    head: Mapping[str, Any], what: str, tensors: Sequence[tuple[NamedTensor, bool]]
) -> tuple[list[bytes | memoryview], int | None]:
    content: list[dict[str, Any]] = []
    pieces: list[bytes | memoryview] = []
    for tensor, binary in tensors:
        item: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.array.shape}
        if binary:
            piece = to_bytes(tensor.array, tensor.datatype)
            item["parameters"] = {"binary_data_size": len(piece)}
            pieces.append(piece)
        else:
            item["data"] = to_json(tensor.array, tensor.datatype)
        content.append(item)
    text = orjson.dumps({**head, what: content}, option=orjson.OPT_SERIALIZE_NUMPY)
    if b"null" in text:  # as orjson writes what JSON has no number for; few texts have the word at all
        _check_finite(tensor for tensor, binary in tensors if not binary)
    return [text, *pieces], len(text) if pieces or any(binary for _, binary in tensors) else None


def _check_finite(tensors: Iterable[NamedTensor]) -> None:
    """Raise ValueError where a tensor has a number that JSON cannot express."""
    for tensor in tensors:
        floating = tensor.datatype == "BF16" or tensor.array.dtype.kind == "f"
        numbers = from_bf16(tensor.array) if tensor.datatype == "BF16" else tensor.array
        if floating and not np.isfinite(numbers).all():
            raise ValueError(
                f"{tensor.name} has infinite numbers or NaN, which JSON cannot express: ask for binary_data, by "
                f'"parameters": {{"binary_data": true}} in that output of the request'
            )


def read_response(
    body: bytes | memoryview, json_bytes: int | None = None
) -> tuple[dict[str, Any], tuple[NamedTensor, ...]]:
    """Read a response. Returns (all of the JSON, the outputs)."""
    content, binary = _parted(body, json_bytes, "outputs")
    return content, _tensors(content, "outputs", binary)
