"""What is read from a graph of whether its rows depend on each other, held to what the network computes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from apportion.exporting.exporter import export
from apportion.serving.row_independence.decision import why_rows_differ
from apportion.serving.row_independence.graph_reader import read
from apportion.serving.runtimes.onnx_runtime import OnnxRuntime

HEAD = '<ir_version: 9, opset_import: ["" : 18, "ai.onnx.ml" : 3]>'
NUMBERS = """int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] most = {9223372036854775807},
    int64[1] four = {4}, int64 first = {0}, int64 step = {1}, int64[2] pair = {2, 2}, int64[2] turned = {4, -1},
    int64[2] halves = {-1, 2}, int64[2] back = {-1, 4}, int64[2] twice = {1, 2}, int64[2] rowwise = {2, 1},
    float[4, 4] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.5},
    float[4] b = {1.0, 2.0, 3.0, 4.0}, int64[3] some = {2, 0, 1}, float scale = {4.0}, uint8 point = {128},
    int64[1] forty = {40}"""
ROWS = "n = Shape <start = 0, end = 1> (x)"
APART = {
    "linear": "y = Gemm (x, w, b)",
    "linear of the transposed": "t = Transpose (x)  g = MatMul (w, t)  y = Transpose (g)",
    "halves of rows": "h = Reshape (x, halves)  s = Softmax <axis = 1> (h)  y = Reshape (s, back)",
    "halves by the number of rows": f"{ROWS}  m = Mul (n, two)  s = Concat <axis = 0> (m, two)  h = Reshape (x, s)"
    "  q = ReduceSum (h, one)  d = Sub (h, q)  y = Reshape (d, back)",
    "rows in the middle": "u = Unsqueeze (x, zero)  t = Transpose <perm = [2, 1, 0]> (u)  c = CumSum (t, first)"
    "  r = Transpose <perm = [2, 1, 0]> (c)  y = Squeeze (r, zero)",
    "a table": "i = Cast <to = 7> (x)  k = Mod (i, four)  g = Gather (w, k)  y = ReduceSum <keepdims = 0> (g, two)",
    "chosen columns": "y = Gather <axis = 1> (x, some)",
    "all rows, sliced": f"{ROWS}  y = Slice (x, zero, n, zero)",
    "zeros for each row": f"{ROWS}  s = Concat <axis = 0> (n, four)  z = ConstantOfShape (s)  y = Add (x, z)",
    "expanded to each row": f"{ROWS}  s = Concat <axis = 0> (n, four)  e = Expand (b, s)  y = Mul (x, e)",
    "positions in a row": "s = Shape <start = 1, end = 2> (x)  l = Squeeze (s)  p = Range (first, l, step)"
    "  f = Cast <to = 1> (p)  y = Add (x, f)",
    "halves by a division": f"{ROWS}  m = Mul (n, four)  h = Div (m, two)  s = Concat <axis = 0> (h, two)"
    "  q = Reshape (x, s)  t = Softmax <axis = 1> (q)  y = Reshape (t, back)",
    "expanded as torch does": f"{ROWS}  s = Concat <axis = 0> (n, four)  m = Neg (one)  w1 = Equal (s, m)"
    "  t = Where (w1, rowwise, s)  e = Expand (b, t)  y = Mul (x, e)",
    "einsum": 'y = Einsum <equation = "nk,km->nm"> (x, w)',
    "columns twice": "y = Tile (x, twice)",
    "one-hot": "i = Cast <to = 7> (x)  k = Mod (i, four)  v = Constant <value = float[2] {0.0, 1.0}> ()"
    "  d = Squeeze (four)  o = OneHot (k, d, v)  y = ReduceMax <keepdims = 0> (o, two)",
    "its own element": f"{ROWS}  l = Squeeze (n)  r = Range (first, l, step)  u = Unsqueeze (r, one)"
    "  a = ArgMax <axis = 1> (x)  i = Concat <axis = 1> (u, a)  g = GatherND (x, i)  y = Unsqueeze (g, one)",
    "fixed range": "q = QuantizeLinear (x, scale, point)  y = DequantizeLinear (q, scale, point)",
    "normalised": "y = Normalizer <norm: string = \"L2\"> (x)",
    "a branch that is not used": "m = ReduceMean (x, zero)  y = Relu (x)",
}  # fmt: skip
MIXED = {
    "turned": "t = Reshape (x, turned)  y = Transpose (t)",
    "sum over the transposed": "t = Transpose (x)  s = ReduceSum (t, one)  d = Sub (t, s)  y = Transpose (d)",
    "halves of all rows": "h = Reshape (x, halves)  c = CumSum (h, first)  y = Reshape (c, back)",
    "reversed": "m = Neg (one)  e = Neg (most)  y = Slice (x, m, e, zero, m)",
    "the first row": "f = Gather (x, first)  y = Add (x, f)",
    "but one row": "y = Slice (x, one, most, zero)",
    "rows twice": "y = Tile (x, rowwise)",
    "the number of a row": f"{ROWS}  l = Squeeze (n)  r = Range (first, l, step)  f = Cast <to = 1> (r)"
    "  u = Unsqueeze (f, one)  y = Add (x, u)",
    "rows against rows": "u = Unsqueeze (x, one)  v = Unsqueeze (x, zero)  d = Sub (u, v)"
    "  y = ReduceSum <keepdims = 0> (d, one)",
    "einsum over rows": 'g = Einsum <equation = "nk,nm->km"> (x, x)  y = MatMul (x, g)',
    "one range": "q, s, z = DynamicQuantizeLinear (x)  y = DequantizeLinear (q, s, z)",
    "the mean of all": "m = ReduceMean (x)  y = Sub (x, m)",
    "an index without the number of its row": f"{ROWS}  l = Squeeze (n)  r = Range (first, l, step)"
    "  u = Unsqueeze (r, one)  a = ArgMax <axis = 1> (x)  i = Concat <axis = 1> (u, a)  j = Slice (i, one, two, one)"
    "  y = GatherND (x, j)",
    "if any is large": "m = ReduceMax <keepdims = 0> (x)  t = Constant <value = float {500.0}> ()  c = Greater (m, t)"
    "  z = Sub (x, x)  y = Where (c, z, x)",
    "an element of another row": "a = ArgMax <axis = 0> (x)  y = GatherElements <axis = 0> (x, a)",
    "the size of the batch": f"{ROWS}  f = Cast <to = 1> (n)  y = Div (x, f)",
    "softmax over the rows": "y = Softmax <axis = 0> (x)",
}  # fmt: skip
INDEX = f"{ROWS}  l = Squeeze (n)  r = Range (first, l, step)"
LARGE = {
    "more than 40 rows": f"{ROWS}  g = Greater (n, forty)  f = Cast <to = 1> (g)  y = Add (x, f)",
    "40 rows counted as one": f"{ROWS}  d = Div (n, forty)  f = Cast <to = 1> (d)  y = Add (x, f)",
    "looked up by the number": f"{ROWS}  d = Div (n, forty)  k = Mod (d, four)  f = Gather (b, k)  y = Add (x, f)",
    "repeated to each row": f"{ROWS}  g = Greater (n, forty)  f = Cast <to = 1> (g)  s = Concat <axis = 0> (n, four)"
    "  e = Expand (f, s)  y = Add (x, e)",
    "rows from 40 on": f"{INDEX}  g = Greater (r, forty)  u = Unsqueeze (g, one)  f = Cast <to = 1> (u)"
    "  y = Add (x, f)",
    "a shape for more than 40 rows": f"{ROWS}  g = Greater (n, forty)  s = Where (g, turned, back)  h = Reshape (x, s)"
    "  p = Softmax <axis = 1> (h)  y = Reshape (p, back)",
    "40 rows at most in a shape": f"{ROWS}  l = Min (n, forty)  m = Neg (one)  s = Concat <axis = 0> (l, m)"
    "  h = Reshape (x, s)  p = Softmax <axis = 1> (h)  y = Reshape (p, back)",
    "a part of the columns": f"{ROWS}  g = Greater (n, forty)  i = Cast <to = 7> (g)  e = Sub (four, i)"
    "  y = Slice (x, zero, e, one)",
    "the first 40 rows": "y = Slice (x, zero, forty, zero)",
    "the row of 40 at most": f"{INDEX}  v = Min (r, forty)  u = Unsqueeze (v, one)  a = ArgMax <axis = 1> (x)"
    "  i = Concat <axis = 1> (u, a)  g = GatherND (x, i)  y = Unsqueeze (g, one)",
    "a square of the number": f"{ROWS}  c = Sub (n, two)  d = Sub (c, one)  e = Mul (c, d)  f = Cast <to = 1> (e)"
    "  y = Add (x, f)",
    "a fraction of the number": f"{ROWS}  f = Cast <to = 1> (n)  h = Constant <value = float {{0.025}}> ()"
    "  g = Mul (f, h)  i = Cast <to = 7> (g)  j = Cast <to = 1> (i)  y = Add (x, j)",
    "how many rows beyond 40": f"{ROWS}  e = Sub (n, forty)  l = Squeeze (e)  r = Range (first, l, step)"
    "  c = Shape (r)  f = Cast <to = 1> (c)  y = Add (x, f)",
    "the first 40 of zeros": f"{ROWS}  z = ConstantOfShape (n)  v = Slice (z, zero, forty, zero)  c = Shape (v)"
    "  m = Neg (one)  s = Concat <axis = 0> (c, m)  h = Reshape (x, s)  p = Softmax <axis = 1> (h)"
    "  y = Reshape (p, back)",
    "the first 40 numbers": f"{INDEX}  v = Slice (r, zero, forty, zero)  c = Shape (v)  m = Neg (one)"
    "  s = Concat <axis = 0> (c, m)  h = Reshape (x, s)  p = Softmax <axis = 1> (h)  y = Reshape (p, back)",
    "as many as 40 rows begin": f"{ROWS}  l = Squeeze (n)  z = Squeeze (forty)  r = Range (first, l, z)"
    "  c = Shape (r)  f = Cast <to = 1> (c)  y = Mul (x, f)",
}  # fmt: skip
"""Networks of dependent rows of which no trial with 11 rows shows it."""


def saved(path: Path, body: str) -> Path:
    text = f"{HEAD} net (float[n, 4] x) => (float[m, k] y) <{NUMBERS}> {{ {body} }}"
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.domain = "ai.onnx.ml" if node.op_type == "Normalizer" else node.domain
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_found(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", APART[name])
    program, row = OnnxRuntime(path), [np.ones((1, 4), np.float32)]
    assert read(path, row).why is None
    assert why_rows_differ(program, row) is None
    program.close()


@pytest.mark.parametrize("name", [*MIXED, *LARGE])
def test_rows_that_depend_on_each_other_are_found_by_reading_alone(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", (MIXED | LARGE)[name])
    program, row = OnnxRuntime(path), [np.ones((1, 4), np.float32)]
    program.run(row, math.inf)
    assert read(path, row).why
    program.close()


@pytest.mark.parametrize("name", ["the mean of all", "the first row", "an element of another row"])
def test_rows_that_depend_on_each_other_are_found_by_trials_alone(name: str, tmp_path: Path) -> None:
    program = OnnxRuntime(saved(tmp_path / "net.onnx", MIXED[name]))
    assert "beside other rows" in str(why_rows_differ(program, [np.ones((1, 4), np.float32)]))
    program.close()


class Tokens(nn.Module):
    """Words and their places, by attention."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(8, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
        self.layers, self.scores = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layers(self.words(x) + self.places(torch.arange(x.shape[1])))
        return torch.as_tensor(self.scores(found.mean(1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True), nn.GRU(16, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.gru(self.lstm(x)[0])[0][:, -1])


def image_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8),
        nn.ConvTranspose2d(8, 4, 2, 2), nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.LayerNorm(4), nn.Linear(4, 3), nn.Softmax(1),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "sample", "apart"),
    [
        (image_network(), torch.randn(2, 3, 16, 16), True),
        (Recurrent(), torch.randn(2, 6, 4), True),
        (Tokens(batch_first=True), torch.randint(20, (2, 6)), True),
        (Tokens(batch_first=False), torch.randint(20, (2, 6)), False),
    ],
    ids=["images", "recurrent", "attention", "attention over the batch"],
)
def test_networks_of_torch(network: nn.Module, sample: torch.Tensor, apart: bool, tmp_path: Path) -> None:
    export(network.eval(), sample, tmp_path / "net.onnx")
    assert (read(tmp_path / "net.onnx", [sample[:1].numpy()]).why is None) is apart


@pytest.mark.thorough
def test_a_file_in_dynamic_int8_is_not_batched_and_one_in_static_int8_is(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    path = saved(tmp_path / "net.onnx", APART["linear"])
    quantize_dynamic(path, tmp_path / "dynamic.onnx")
    row = [np.ones((1, 4), np.float32)]
    assert "dynamic quantization" in str(read(tmp_path / "dynamic.onnx", row).why)
    assert read(saved(tmp_path / "static.onnx", APART["fixed range"]), row).quantized
