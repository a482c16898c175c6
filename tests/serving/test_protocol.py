"""The Open Inference Protocol's bytes: every datatype both ways, and what is wrong with a request."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from apportion.serving.protocol import json_numbers
from apportion.serving.protocol.datatypes import DATATYPES, from_bf16, objects, to_bf16, to_bytes
from apportion.serving.protocol.v2 import (
    NamedTensor,
    Request,
    read_request,
    read_response,
    write_request,
    write_response,
)

NUMBERS = [name for name in DATATYPES if name not in ("BYTES", "BF16")]


def body(**told: Any) -> bytes:
    tensor = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
    return json.dumps({"inputs": [tensor | told.pop("tensor", {})], **told}).encode()


def sent(tensor: NamedTensor, *, binary: bool) -> NamedTensor:
    pieces, json_bytes = write_request([tensor], binary=binary)
    assert (json_bytes is not None) == binary
    (found,) = read_request(b"".join(pieces), json_bytes).inputs
    return found


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("datatype", NUMBERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_numbers_come_through_as_they_are(datatype: str, binary: bool, data: st.DataObject) -> None:
    shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    dtype = DATATYPES[datatype]
    kind = arrays.from_dtype(dtype, allow_nan=binary, allow_infinity=binary)
    array = data.draw(arrays.arrays(dtype, shapes, elements=kind))
    found = sent(NamedTensor("x", datatype, array), binary=binary)
    assert found.array.dtype == dtype
    np.testing.assert_array_equal(found.array, array)


@pytest.mark.parametrize("binary", [False, True])
@given(values=st.lists(st.text()))
def test_texts_come_through_as_they_are(binary: bool, values: list[str]) -> None:
    encodable = [text.encode(errors="ignore") for text in values]
    found = sent(NamedTensor("x", "BYTES", objects(encodable)), binary=binary)
    assert found.array.tolist() == encodable


@pytest.mark.parametrize("binary", [False, True])
def test_bf16_comes_through_as_its_bits(binary: bool) -> None:
    bits = to_bf16(np.array([1.0, -2.5, 3.140625, 65280.0]))
    assert sent(NamedTensor("x", "BF16", bits), binary=binary).array.tolist() == bits.tolist()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_is_the_nearest(value: float) -> None:
    near = float(from_bf16(to_bf16(np.array([value], dtype=np.float32)))[0])
    if math.isinf(near):
        assert abs(value) > 3.38e38
    else:
        assert abs(near - value) <= max(abs(value) * 2**-8, 2**-134)


def test_bf16_keeps_what_is_no_number() -> None:
    found = from_bf16(to_bf16(np.array([np.nan, np.inf, -np.inf])))
    assert np.isnan(found[0])
    assert found[1:].tolist() == [np.inf, -np.inf]


def test_rows_may_be_nested_or_flat() -> None:
    flat = read_request(body()).inputs[0].array
    nested = read_request(body(tensor={"data": [[1, 2], [3, 4]]})).inputs[0].array
    assert flat.tolist() == nested.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_request_says_what_it_wants() -> None:
    request = read_request(
        body(id="seven", parameters={"timeout": 2500}, outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    )
    assert (request.id, request.timeout) == ("seven", 0.0025)
    assert [(asked.name, asked.binary) for asked in request.outputs or ()] == [("y", True)]
    assert read_request(body(parameters={"timeout": 0})).timeout is None


def test_outputs_are_binary_where_that_was_asked_for() -> None:
    y, z = NamedTensor("y", "FP32", np.ones((1, 2), np.float32)), NamedTensor("z", "INT64", np.array([5]))
    request = read_request(body(outputs=[{"name": "y", "parameters": {"binary_data": True}}, {"name": "z"}]))
    pieces, json_bytes = write_response({"model_name": "m"}, [y, z], request)
    whole = b"".join(pieces)
    assert json_bytes is not None
    assert len(whole) - json_bytes == 8
    told = json.loads(whole[:json_bytes])
    assert told["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert told["outputs"][1]["data"] == [5]
    head, outputs = read_response(whole, json_bytes)
    assert head["model_name"] == "m"
    assert [t.array.tolist() for t in outputs] == [[[1.0, 1.0]], [5]]
    assert write_response({}, [y], Request(inputs=()))[1] is None


WRONG = {
    "no JSON": (b"{", "is not JSON"),
    "no object": (b"[]", "must be a JSON object"),
    "no inputs": (b"{}", "inputs must be a list"),
    "empty inputs": (b'{"inputs": []}', "inputs is empty"),
    "an input that is no object": (b'{"inputs": [3]}', r"inputs\[0\] must be an object"),
    "no name": (body(tensor={"name": 3}), "name must be a string"),
    "an unknown datatype": (body(tensor={"datatype": "FP31"}), "datatype='FP31' must be one of BOOL"),
    "a negative shape": (body(tensor={"shape": [-1, 2]}), "integers that are not negative"),
    "a true shape": (body(tensor={"shape": [True, 4]}), "integers that are not negative"),
    "too many dims": (body(tensor={"shape": [1] * 40}), "40 dimensions"),
    "a huge shape": (body(tensor={"shape": [2**62, 2**62]}), "has a side that is longer"),
    "too few values": (body(tensor={"data": [1, 2, 3]}), r"inputs\[0\] \(x\): data has 3 values, its shape asks for 4"),
    "uneven rows": (body(tensor={"data": [[1, 2, 3], [4]]}), "uneven"),
    "texts for numbers": (body(tensor={"data": ["1", "2", "3", "4"]}), "must be numbers"),
    "null for a number": (body(tensor={"data": [1, None, 3, 4]}), "must be numbers"),
    "objects": (body(tensor={"data": [{}, {}, {}, {}]}), "must be numbers"),
    "fractions for integers": (body(tensor={"datatype": "INT8", "data": [1, 2, 3, 0.5]}), "must be integers"),
    "out of range": (body(tensor={"datatype": "INT8", "data": [1, 2, 3, 128]}), "from -128 to 127"),
    "negative for unsigned": (body(tensor={"datatype": "UINT64", "data": [1, 2, 3, -1]}), "from 0 to"),
    "too large a float": (body(tensor={"data": [1, 2, 3, 1e39]}), "too large for FP32"),
    "numbers for truth": (body(tensor={"datatype": "BOOL"}), "must be true or false"),
    "a zero for a text": (body(tensor={"datatype": "BYTES", "data": [0, "", "", ""]}), "data has a number: values"),
    "truth among numbers": (body(tensor={"data": [1, True, 3, 4]}), "must be numbers"),
    "one long text among many": (body(tensor={"data": ["x" * 10**6, *["y"] * 10**5]}), "must be numbers"),
    "a long side": (body(tensor={"shape": [2**40, 0], "data": []}), "longer than"),
    "an output twice": (body(outputs=[{"name": "y"}, {"name": "y"}]), "names 'y' twice"),
    "very many outputs": (body(outputs=[{"name": str(n)} for n in range(2000)]), "of 1000 at most"),
    "numbers for texts": (body(tensor={"datatype": "BYTES"}), "values of BYTES are strings"),
    "no data": (b'{"inputs": [{"name": "x", "shape": [1], "datatype": "INT8"}]}', "neither data nor"),
    "both": (body(tensor={"parameters": {"binary_data_size": 0}}), "has both data and"),
    "shared memory": (body(tensor={"parameters": {"shared_memory_region": "r"}}), "shared memory is not offered"),
    "a timeout in words": (body(parameters={"timeout": "1s"}), "parameters.timeout='1s' must be microseconds"),
    "a negative timeout": (body(parameters={"timeout": -5}), "must be microseconds"),
    "an id that is a number": (body(id=7), "id must be a string"),
    "outputs without a name": (body(outputs=[{}]), r"outputs\[0\] must be an object with a name"),
    "classification": (body(outputs=[{"name": "y", "parameters": {"classification": 3}}]), "is not offered"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_request_is_said(what: str) -> None:
    data, why = WRONG[what]
    with pytest.raises(ValueError, match=why):
        read_request(data)


@pytest.mark.parametrize("field", ["shape", "datatype", "binary_data_size"])
def test_what_is_nested_too_deep_or_long_is_said_in_a_sentence(field: str) -> None:
    for strange in (b"[" * 900 + b"]" * 900, b'"' + b"x" * 10**6 + b'"'):
        tensor = {"name": b'"x"', "shape": b"[1]", "datatype": b'"INT8"', "parameters": b"{}"}
        if field == "binary_data_size":
            tensor["parameters"] = b'{"binary_data_size": %s}' % strange
        else:
            tensor[field] = strange
        text = b"{%s}" % b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in tensor.items())
        with pytest.raises(ValueError, match=field) as caught:
            read_request(b'{"inputs": [%s]}' % text)
        assert len(str(caught.value)) < 400


def test_two_tensors_of_one_name_are_refused() -> None:
    tensor = {"name": "x", "shape": [1], "datatype": "INT8", "data": [1]}
    with pytest.raises(ValueError, match="two tensors named 'x'"):
        read_request(json.dumps({"inputs": [tensor, tensor]}).encode())


@pytest.mark.parametrize(
    ("sizes", "extra", "why"),
    [
        ([8], b"\0" * 9, "1 bytes follow the JSON"),
        ([8], b"\0" * 7, "binary_data_size=8 must be an integer up to 7"),
        ([7], b"\0" * 7, "7 bytes of FP32: its shape asks for 8"),
        ([True], b"\0", "binary_data_size=True"),
        ([-1], b"", "binary_data_size=-1"),
    ],
)
def test_binary_tensors_are_as_long_as_they_say(sizes: list[Any], extra: bytes, why: str) -> None:
    tensor = {"name": "x", "shape": [2], "datatype": "FP32"}
    text = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": s}} for s in sizes]}).encode()
    with pytest.raises(ValueError, match=why):
        read_request(text + extra, len(text))


@pytest.mark.parametrize("json_bytes", [0, 10_000])
def test_the_header_fits_the_body(json_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be from 1 to the"):
        read_request(body(), json_bytes)


@given(st.binary(max_size=60), st.integers(0, 4))
def test_texts_in_bytes_end_where_they_say_or_are_refused(data: bytes, many: int) -> None:
    text = json.dumps(
        {"inputs": [{"name": "x", "shape": [many], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}]}
    ).encode()
    try:
        (found,) = read_request(text + data, len(text)).inputs
    except ValueError:
        return
    assert sum(4 + len(value) for value in found.array) == len(data)


def test_data_that_is_nested_a_thousand_times_is_refused() -> None:
    deep = b"[" * 900 + b"1" + b"]" * 900
    for datatype in ("FP32", "BYTES"):
        text = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "%s", "data": %s}]}' % (datatype.encode(), deep)
        with pytest.raises(ValueError, match="data"):
            read_request(text)


def both_ways(body: bytes) -> list[Any]:
    """What is read of it with ``json_numbers``, and without."""
    found: list[Any] = []
    for least in (0, len(body) + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_numbers, "LEAST_BYTES", least)
            assert least or json_numbers.loads(b'{"inputs":[]}', "inputs") == {"inputs": []}
            try:
                request = read_request(body)
            except ValueError as error:
                found.append(str(error))
            else:
                same = [(t.name, t.array.dtype, t.array.shape, to_bytes(t.array, t.datatype)) for t in request.inputs]
                found.append((same, request.id, request.parameters, request.outputs, request.binary))
    return found


VALUES = st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.integers(-300, 300) | st.just(-0.0)
ODD = st.booleans() | st.none() | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=2) | st.just({"a": 1})
NESTED = st.lists(st.lists(st.lists(st.integers(0, 3), max_size=2) | st.integers(0, 3), max_size=2), max_size=3)


@settings(max_examples=400)
@given(
    st.sampled_from([*DATATYPES, "FP99"]),
    st.lists(VALUES, max_size=4) | st.lists(VALUES | ODD, max_size=4) | NESTED | ODD,
    st.sampled_from([{}, {"id": "1"}, {"parameters": {"timeout": 5}}, {"outputs": [{"name": "y"}]}, {"id": ["[", []]}]),
    st.booleans(),
)
def test_numbers_are_read_at_once_as_they_are_one_by_one(datatype: str, data: Any, more: Any, twice: bool) -> None:
    size = len(data) if isinstance(data, list) else 1
    tensors = [{"name": name, "shape": [size], "datatype": datatype, "data": data} for name in "ab"[: 1 + twice]]
    at_once, one_by_one = both_ways(json.dumps({**more, "inputs": tensors}).encode())
    assert at_once == one_by_one


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "BF16", "INT8", "UINT8", "INT64", "UINT64"])
@pytest.mark.parametrize("nested", [(300,), (300, 1), (1, 3, 10, 10)])
def test_a_request_of_many_numbers_is_read_at_once(datatype: str, nested: tuple[int, ...]) -> None:
    data = np.resize(np.arange(100), nested).tolist()
    tensor = {"name": "x", "shape": [300], "datatype": datatype, "data": data}
    body = json.dumps({"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    told = json_numbers.loads(body, "inputs")
    assert told is not None
    assert isinstance(told["inputs"][0].pop("data"), np.ndarray)
    assert told == {
        "inputs": [{"name": "x", "shape": [300], "datatype": datatype}],
        "outputs": json.loads(body)["outputs"],
    }
    at_once, one_by_one = both_ways(body)
    assert at_once == one_by_one


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}',
        b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[[],1,2]}]}',
        b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[[1],2]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1],"data":[2]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","datatype":"INT8","data":[1]}]}',
        b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","d1ata":[[1],[2]],"data":[[1,2]]}]}',
        b'{"inputs":[{"name":"x","parameters":{"data":[[1]]},"shape":[3],"datatype":"FP32","data":[[1],[2,3]]}]}',
        b'{"inputs":[{"name":"x","shape":[3],"datatype":"FP32","data":[[1,[2]],[3]]}]}',
        b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[1,[2]]}]}',
        b'{"id":"a","id":"b","inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1e400]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[01]}]}',
        b'{"inputs":[{"name":"\xff","shape":[1],"datatype":"FP32","data":[1]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]} {}',
        b'{"inputs":{"name":"x"}}',
        b"[1]",
        b"1",
        b'{"inputs":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_odd_is_taken_alike_either_way(text: bytes) -> None:
    at_once, one_by_one = both_ways(text)
    assert at_once == one_by_one


@pytest.mark.parametrize("word", ["true", "false"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_boolean_is_no_number_wherever_it_is(word: str, place: int) -> None:
    data = ["1.0"] * 3
    data[place] = word
    body = '{"inputs":[{"name":"x","shape":[3],"datatype":"FP32","data":[' + ",".join(data) + "]}]}"
    with pytest.raises(ValueError, match="values that are not FP32"):
        read_request(body.encode())
