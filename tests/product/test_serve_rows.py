"""Requests of several clients are computed together only where no row changes another's answer: networks whose rows
depend on each other, and networks whose rows do not, of which most are computed together."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Command

WIDTH, CLIENTS, TURNS = 4, 8, 25
HEAD = '<ir_version: 9, opset_import: ["" : 18]>'
TYPES = {"FP32": "float", "INT64": "int64", "BOOL": "bool", "BYTES": "string"}

DEPENDENT = {
    "mean of the rows": "m = ReduceMean (x, zero)  y = Sub (x, m)",
    "largest of all": "m = ReduceMax <keepdims = 1> (x)  y = Sub (x, m)",
    "softmax over the rows": "y = Softmax <axis = 0> (x)",
    "running sum of the rows": "y = CumSum (x, first)",
    "sorted rows": "n = Shape <start = 0, end = 1> (x)  y, i = TopK <axis = 0> (x, n)",
    "every row with every row": "t = Transpose (x)  g = MatMul (x, t)  s = Softmax (g)  y = MatMul (s, x)",
    "one range for all rows": "q, s, z = DynamicQuantizeLinear (x)  y = DequantizeLinear (q, s, z)",
    "batch normalization in training": "y, a, b = BatchNormalization <training_mode = 1>"
    " (x, ones, noughts, means, variances)",
    "the number of rows": "n = Shape <start = 0, end = 1> (x)  f = Cast <to = 1> (n)  y = Mul (x, f)",
    "the row before": "h = Slice (x, zero, one, zero)  t = Slice (x, one, much, zero)  y = Concat <axis = 0> (t, h)",
}
INDEPENDENT = {
    "mean of a row": "m = ReduceMean (x, one)  y = Sub (x, m)",
    "largest of a row": "m = ReduceMax <keepdims = 1> (x, one)  y = Sub (x, m)",
    "softmax over a row": "y = Softmax <axis = -1> (x)",
    "running sum within a row": "y = CumSum (x, second)",
    "a row sorted": "y, i = TopK <axis = 1> (x, width)",
    "a row with itself": "a = Unsqueeze (x, one)  t = Transpose <perm = [0, 2, 1]> (a)  g = MatMul (t, a)"
    "  s = Softmax (g)  b = MatMul (s, t)  y = Squeeze (b, two)",
    "a range that is known": "q = QuantizeLinear (x, scale, point)  y = DequantizeLinear (q, scale, point)",
    "batch normalization": "y = BatchNormalization (x, ones, noughts, noughts, ones)",
    "a shape from the number of rows": "n = Shape <start = 0, end = 1> (x)  s = Concat <axis = 0> (n, pair)"
    "  a = Reshape (x, s)  b = ReduceMax <keepdims = 1> (a, two)  c = Sub (a, b)  e = Concat <axis = 0> (n, width)"
    "  y = Reshape (c, e)",
    "columns before": "h = Slice (x, zero, one, one)  t = Slice (x, one, much, one)  y = Concat <axis = 1> (t, h)",
}


def save(path: Path, body: str, datatype: str) -> None:
    text = f"""{HEAD}
    net ({TYPES[datatype]}[n, {WIDTH}] rows) => (float[n, {WIDTH}] y)
    <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] much = {{9223372036854775807}},
     int64[1] width = {{{WIDTH}}}, int64[2] pair = {{2, 2}}, int64 first = {{0}}, int64 second = {{1}},
     float scale = {{8.0}}, uint8 point = {{128}},
     float[4] ones = {{1.0, 1.0, 1.0, 1.0}}, float[4] noughts = {{0.0, 0.0, 0.0, 0.0}},
     float[4] means = {{0.0, 0.0, 0.0, 0.0}}, float[4] variances = {{1.0, 1.0, 1.0, 1.0}}>
    {{ x = Cast <to = 1> (rows)  {body} }}"""
    onnx.save(onnx.parser.parse_model(text), path)


def rows_of(datatype: str) -> list[list[Any]]:
    """A row for each client: of other values, kinds and magnitudes."""
    random = np.random.default_rng(3)
    rows: list[list[Any]] = []
    for client in range(CLIENTS):
        if datatype == "FP32":
            rows.append((random.normal(size=WIDTH) * (1.0, 1000.0)[client % 2]).tolist())
        elif datatype == "BOOL":
            rows.append([bool(client >> bit & 1) for bit in range(WIDTH)])
        else:
            numbers = random.integers((3, 1000)[client % 2], size=WIDTH).tolist()
            rows.append(numbers if datatype == "INT64" else [f"{number}.5" for number in numbers])
    return rows


def wrong(server: Any, model: str, datatype: str) -> int:
    """How many answers to eight clients at once are others than to each of them alone."""

    def answer(row: list[Any]) -> Any:
        status, outputs = server.infer(model, {"rows": (datatype, [row])}, timeout=30_000_000)
        assert status == 200, outputs
        return outputs["y"].astype(np.float64)

    rows = rows_of(datatype)
    alone = [answer(row) for row in rows]
    at_once = threading.Barrier(CLIENTS)

    def ask(client: int) -> int:
        at_once.wait(30)
        answers = [answer(rows[client]) for _ in range(TURNS)]
        scale = np.abs(alone[client]).max()
        return sum(not np.allclose(x, alone[client], rtol=1e-4, atol=1e-4 * scale) for x in answers)

    with ThreadPoolExecutor(CLIENTS) as clients:
        return sum(clients.map(ask, range(CLIENTS)))


def hold(
    serve: Callable[..., Any], folder: Path, datatype: str, dependent: Sequence[str], independent: Sequence[str]
) -> int:
    """Serve these networks, hold them to their answers, and return how many of the latter are computed together."""
    nets = {f"d{n}": DEPENDENT[name] for n, name in enumerate(dependent)}
    nets |= {f"i{n}": INDEPENDENT[name] for n, name in enumerate(independent)}
    for name, body in nets.items():
        save(folder / f"{name}.onnx", body, datatype)
    members = [f"{name}={folder / name}.onnx" for name in nets]
    server = serve(*members, "--replication", "between_graph", "--deadline", "30s", within=240)
    together = {
        found[1] for event in server.events if (found := re.match(r"(\w+): requests are computed together", event))
    }
    apart = {
        found[1] for event in server.events if (found := re.match(r"(\w+): requests are computed one by one: .", event))
    }
    assert together | apart == {*nets}, "the log says it of each"
    assert not [name for name in together if name.startswith("d")]
    assert {name: wrong(server, name, datatype) for name in nets} == dict.fromkeys(nets, 0)
    return len(together)


def test_integers_of_other_clients_change_no_answer(serve_command: Callable[..., Any], tmp_path: Path) -> None:
    together = hold(serve_command, tmp_path, "INT64", ["mean of the rows"], ["a shape from the number of rows"])
    assert together == 1


@pytest.mark.thorough
def test_a_network_that_remembers_other_requests_is_refused(apportion_command: Command, tmp_path: Path) -> None:
    """ONNX Runtime writes the running mean over the bias, which is the same tensor in this file."""
    body = "y, a, b = BatchNormalization <training_mode = 1> (x, ones, noughts, noughts, ones)"
    save(tmp_path / "net.onnx", body, "FP32")
    refused = apportion_command("serve", "net.onnx", "--port", "0", within=60)
    assert refused.returncode == 2
    assert "member m1" in refused.stderr
    assert "another output after other inputs" in refused.stderr
    assert "model.eval()" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_40_networks_of_dependent_rows_and_40_of_independent_ones(
    serve_command: Callable[..., Any], tmp_path: Path
) -> None:
    together = 0
    for datatype in TYPES:
        folder = tmp_path / datatype
        folder.mkdir()
        together += hold(serve_command, folder, datatype, [*DEPENDENT], [*INDEPENDENT])
    assert together >= 36
