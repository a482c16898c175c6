"""What a server answers, asked as a client asks: ensembles by name, numbers that JSON has not, lengths, deadlines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Command

HEAD = '<ir_version: 9, opset_import: ["" : 18]>'
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
Serve = Callable[..., Any]


def save(path: Path, text: str) -> str:
    onnx.save(onnx.parser.parse_model(f"{HEAD} {text}"), path)
    return path.name


def two_outputs(path: Path, inputs: str, outputs: str, *, p: str = "p", q: str = "q") -> str:
    """p = a - b, and q = 100 * a."""
    body = f"{p} = Sub (a, b)  {q} = Mul (a, hundred)"
    return save(path, f"net ({inputs}) => ({outputs}) <float[1] hundred = {{100.0}}> {{ {body} }}")


A, B, P, Q = (f"float[n, 1] {name}" for name in "abpq")
ASKED = {"a": ("FP32", [[5.0]]), "b": ("FP32", [[2.0]])}


@pytest.fixture
def members(tmp_path: Path) -> list[str]:
    """The same network three times, with its inputs and outputs in another order or of another name."""
    return [
        two_outputs(tmp_path / "1.onnx", f"{A}, {B}", f"{P}, {Q}"),
        two_outputs(tmp_path / "2.onnx", f"{B}, {A}", f"{Q}, {P}"),
        two_outputs(tmp_path / "3.onnx", f"{A}, {B}", f"{Q}, float[n, 1] logits", p="logits"),
    ]


def check_by_name(server: Any) -> None:
    for model in ("ensemble", "m1", "m2", "m3"):
        status, outputs = server.infer(model, ASKED)
        assert (status, {name: x.item() for name, x in outputs.items()}) == (200, {"p": 3.0, "q": 500.0}), model


def test_members_are_matched_by_name_in_one_program(serve_command: Serve, members: list[str]) -> None:
    settings = "serving(rename={'m3': {'logits': 'p'}})"
    check_by_name(serve_command(*members, "--replication", "in_graph", "--serving", settings))


@pytest.mark.thorough
def test_members_are_matched_by_name_in_processes_of_their_own(serve_command: Serve, members: list[str]) -> None:
    settings = "serving(rename={'m3': {'logits': 'p'}}, replication='between_graph')"
    check_by_name(serve_command(*members, "--serving", settings))


@pytest.mark.slow
@pytest.mark.parametrize("replication", ["in_graph", "between_graph"])
def test_members_of_torch_are_matched_by_the_names_of_their_outputs(
    replication: str, serve_command: Serve, tmp_path: Path
) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            self.names = names

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            found = {"p": 4 * x, "q": torch.fft.ifft(400 * torch.fft.fft(x)).real}  # which ONNX may have no words for
            return {name: found[name] for name in self.names}

    for at, names in enumerate(("pq", "qp"), start=1):
        rows = {0: torch.export.Dim.DYNAMIC}
        program = torch.export.export(Net(names), (torch.ones(2, 3),), dynamic_shapes=(rows,))
        torch.export.save(program, tmp_path / f"{at}.pt2")
    server = serve_command("1.pt2", "2.pt2", "--replication", replication)
    for model in ("ensemble", "m1", "m2"):
        status, outputs = server.infer(model, {"input": ("FP32", [[1.0, 2.0, 3.0]])})
        assert status == 200
        np.testing.assert_allclose(outputs["p"], [[4, 8, 12]], rtol=1e-5)
        np.testing.assert_allclose(outputs["q"], [[400, 800, 1200]], rtol=1e-5)


@pytest.mark.thorough
def test_members_of_one_input_and_one_output_match_whatever_the_names(serve_command: Serve, tmp_path: Path) -> None:
    for at, (x, y) in enumerate((("x", "y"), ("pixels", "logits")), start=1):
        save(tmp_path / f"{at}.onnx", f"net (float[n, 2] {x}) => (float[n, 2] {y}) {{ {y} = Neg ({x}) }}")
    for replication in ("in_graph", "between_graph"):
        server = serve_command("1.onnx", "2.onnx", "--replication", replication)
        for model, x, y in (("ensemble", "x", "y"), ("m1", "x", "y"), ("m2", "pixels", "logits")):
            status, outputs = server.infer(model, {x: ("FP32", [[1.0, 2.0]])})
            assert status == 200, outputs
            assert outputs[y].tolist() == [[-1.0, -2.0]]


@pytest.mark.thorough
def test_members_of_other_names_are_refused_with_the_line_that_maps_them(
    apportion_command: Command, members: list[str]
) -> None:
    refused = apportion_command("serve", *members, "--port", "0", within=60)
    assert refused.returncode == 2
    assert "members m1 and m3 have different outputs, p, q and q, logits" in refused.stderr
    assert "Serving(rename={'m3': {'logits': 'p'}})" in refused.stderr
    strange = "serving(rename={'m3': {'scores': 'p'}})"
    refused = apportion_command("serve", *members, "--port", "0", "--serving", strange, within=60)
    assert refused.returncode == 2
    assert "member m3 has no input or output 'scores': it has a, b, q, logits" in refused.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("serving(most_row=3)", "serving has no 'most_row'"),
        ("serving(aggregation='voting')", "aggregation='voting' must be one of mean, weighted_mean, vote"),
        ("serving(threads='2')", "threads='2' must be a whole number of at least 1, or None"),
        ("policy(keep=3)", "must be written serving(...)"),
    ],
)
def test_settings_that_are_wrong_are_named(settings: str, message: str) -> None:
    """As on the command line, where each start of Python would take a second."""
    import apportion

    with pytest.raises(ValueError, match=re.escape(message)):
        apportion.serve(["net.onnx"], serving=settings)


def test_one_member_is_an_ensemble_and_numbers_that_json_has_not_are_named(
    serve_command: Serve, tmp_path: Path
) -> None:
    text = "net (float[n, length] x) => (float[n, length] y, float[n] total)"
    text += " <int64[1] one = {1}> { y = Log (x)  total = ReduceSum <keepdims = 0> (x, one) }"
    server = serve_command(save(tmp_path / "net.onnx", text), "--serving", "serving(drain_seconds=2.0, queue_length=9)")
    for length in (1, 2, 7, 30, 500):
        row = np.linspace(1, 2, length)
        status, outputs = server.infer("ensemble", {"x": ("FP32", [row.tolist()] * 2)})
        assert status == 200, outputs
        np.testing.assert_allclose(outputs["y"], np.log([row, row]), atol=1e-6)
    for model, row in (("m1", [0.0, 1.0]), ("ensemble", [-1.0, 1.0])):  # -inf; nan
        status, error = server.infer(model, {"x": ("FP32", [row])})
        assert status == 400
        assert error.startswith("y has infinite numbers or NaN")
        assert "binary_data" in error
        request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": row}]}
        status, answer = server.ask(f"/v2/models/{model}/infer", request | {"outputs": [{"name": "total"}]})
        assert (status, answer["outputs"][0]["data"]) == (200, [sum(row)])
    ones = {"x": ("FP32", [[1.0]])}
    assert server.infer("m1", ones, timeout=1)[0] == 504
    status, error = server.infer("m1", ones, sequence_id=7)
    assert status == 400
    assert "parameters.sequence_id: sequences are not offered" in error


@pytest.mark.thorough
def test_sizes_that_vary_are_served_as_the_network_computes_them(serve_command: Serve, tmp_path: Path) -> None:
    import torch
    from torch import nn

    import apportion

    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.scores = nn.Embedding(50, 8), nn.Linear(16, 3)
            self.lstm = nn.LSTM(8, 16, batch_first=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.scores(self.lstm(self.words(tokens))[0][:, -1])
            return found

    def tokens(length: int, rows: int = 2) -> torch.Tensor:
        return torch.randint(50, (rows, length))

    def images(side: int, rows: int = 2) -> torch.Tensor:
        return torch.randn(rows, 3, side, side + 2)

    torch.manual_seed(0)
    pooled = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    cases = (
        ("texts", Texts(), tokens, "INT64", (7, 5, 12), (1, 2, 7, 30, 111)),
        ("images", pooled, images, "FP32", (16, 12, 21), (5, 16, 17, 32, 40)),
    )
    for name, network, made, datatype, known, sizes in cases:
        network.eval()
        apportion.export(network, made(known[0]), tmp_path / f"{name}.onnx", check=[made(n) for n in known[1:]])
        server = serve_command(f"{name}.onnx")
        (given,) = server.ask("/v2/models/ensemble")[1]["inputs"]
        for size in sizes:
            for rows in (1, 3):
                x = made(size, rows)
                status, outputs = server.infer("ensemble", {given["name"]: (datatype, x.tolist())})
                assert status == 200, (name, size, outputs)
                (scores,) = outputs.values()
                with torch.inference_mode():
                    np.testing.assert_allclose(scores, network(x).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_passed_deadline_is_504_while_the_server_is_busy(serve_command: Serve, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    text = """net (float[n, 512] x, float[1] times) => (float[n, 512] y) <bool go = {1}, float[1] half = {0.5}> {
        whole = Cast <to = 7> (times)  count = Squeeze (whole)
        y = Loop (count, go, x) <body = body (int64 i, bool c, float[n, 512] s) => (bool d, float[n, 512] t) {
            d = Identity (c)  e = Mul (s, half)  t = Tanh (e) }>
    }"""
    server = serve_command(save(tmp_path / "net.onnx", text), "--deadline", "100ms")
    endless = {"x": ("FP32", np.full((1, 512), 0.5).tolist()), "times": ("FP32", [1e9])}
    large = {"x": ("FP32", np.full((1500, 512), 0.5).tolist()), "times": ("FP32", [0.0])}
    with ThreadPoolExecutor(1) as other:
        busy = other.submit(lambda: [server.infer("m1", large)[0] for _ in range(5)])
        got = Counter(server.infer("m1", endless)[0] for _ in range(8))
        busy.result(60)
    assert got == {504: 8}


@pytest.mark.thorough
@pytest.mark.parametrize("labels", ["classlabels_ints", "classlabels_strings"])
def test_classifiers_with_labels_vote(labels: str, serve_command: Serve, tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    kinds = {
        "classlabels_ints": ([0, 1, 2], TensorProto.INT64),
        "classlabels_strings": (["a", "b", "c"], TensorProto.STRING),
    }
    values, kind = kinds[labels]
    random = np.random.default_rng(0)
    for n in range(3):
        node = helper.make_node(
            "LinearClassifier", ["x"], ["label", "probabilities"], domain="ai.onnx.ml", post_transform="SOFTMAX",
            coefficients=random.normal(size=12).tolist(), intercepts=[0.0] * 3, **{labels: values},
        )  # fmt: skip
        ends = (
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 4])],
            [
                helper.make_tensor_value_info("label", kind, [None]),
                helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, 3]),
            ],
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
        onnx.save(
            helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=opsets, ir_version=9),
            tmp_path / f"{n}.onnx",
        )
    server = serve_command(
        "0.onnx", "1.onnx", "2.onnx", "--serving", "serving(aggregation='vote', replication='between_graph')"
    )
    x = {"x": ("FP32", random.normal(size=(8, 4)).tolist())}
    alone = [server.infer(f"m{n}", x)[1] for n in (1, 2, 3)]
    status, voted = server.infer("ensemble", x)
    assert status == 200
    chosen = np.stack([values.index(label) for own in alone for label in own["label"].tolist()]).reshape(3, 8)
    for row in range(8):
        counts = np.bincount(chosen[:, row], minlength=3)
        np.testing.assert_allclose(voted["probabilities"][row], counts / 3, atol=1e-6)
        assert counts[values.index(voted["label"][row])] == counts.max()


@pytest.mark.thorough
def test_a_file_that_is_left_out_is_named(serve_command: Serve, tmp_path: Path) -> None:
    text = "net (float[n, 2] x) => (float[n, 2] y) { y = Neg (x) }"
    save(tmp_path / "net.onnx", text)
    save(tmp_path / "net.int8.onnx", text)
    server = serve_command("net.onnx")
    (line,) = [event for event in server.events if "left out" in event]
    assert line.startswith("m1: net.int8.onnx is left out: ")


def test_the_page_begins_with_a_request_and_a_client_that_work(serve_command: Serve, tmp_path: Path) -> None:
    weights = "net (float[n, 4] input) => (float[n, 4] output) { output = Softmax (input) }"
    server = serve_command(save(tmp_path / "net.onnx", weights))
    first, client = re.findall(
        r"```(?:sh|python)\n(.*?)```", PAGE.read_text().replace("http://localhost:8000", server.url), re.DOTALL
    )[:2]
    assert first.startswith("curl ")
    asked = subprocess.run(["bash", "-ec", first], capture_output=True, text=True, timeout=30, cwd=tmp_path)
    described, answered = (json.loads(line) for line in asked.stdout.replace("}{", "}\n{").splitlines())
    assert [x["name"] for x in described["inputs"]] == ["input"]
    assert answered["outputs"][0]["shape"] == [2, 4]
    (tmp_path / "client.py").write_text(client)
    printed = subprocess.run([sys.executable, "client.py"], capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert printed.stdout.startswith("{'output': array(["), printed.stderr
