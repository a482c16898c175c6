"""Clients that others have written, against a server of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from every_datatype import VALUES
from onnx import helper
from served import Server, eventually, serving
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.processes

KSERVE = Path(sys.prefix) / "kserve"
"""Of packages at versions that are not ours."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a net that gives back what it gets, of every datatype."""
    folder = tmp_path_factory.mktemp("clients")
    inputs, outputs, nodes = [], [], []
    for name in VALUES:
        kind = helper.np_dtype_to_tensor_dtype(VALUES[name].dtype)
        inputs.append(helper.make_tensor_value_info(name, kind, ["rows"]))
        outputs.append(helper.make_tensor_value_info(f"{name}_back", kind, ["rows"]))
        nodes.append(helper.make_node("Identity", [name], [f"{name}_back"]))
    graph = helper.make_graph(nodes, "every", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "every.onnx")
    with serving(folder, "every=every.onnx") as made:
        eventually("ready", lambda: made.ask("GET", "/v2/health/ready")[0] == 200)
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        yield made


def test_triton_s_client_finds_what_it_looks_for(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("every")
    assert client.get_server_metadata()["name"] == "apportion"
    about = client.get_model_metadata("every", model_version="1")
    assert about["inputs"] == [{"name": name, "datatype": name, "shape": [-1]} for name in VALUES]


@pytest.mark.parametrize("binary_out", [False, True])
@pytest.mark.parametrize("binary_in", [False, True])
def test_triton_s_client_gets_every_datatype_back(client: Any, binary_in: bool, binary_out: bool) -> None:
    tensors, asked = [], []
    for datatype, values in VALUES.items():
        tensor = triton.InferInput(datatype, values.shape, datatype)
        tensor.set_data_from_numpy(values, binary_data=binary_in or datatype == "FP16")  # which it sends as bytes alone
        tensors.append(tensor)
        asked.append(triton.InferRequestedOutput(f"{datatype}_back", binary_data=binary_out))
    found = client.infer("every", tensors, outputs=asked, request_id="7", timeout=5_000_000)
    assert found.get_response()["id"] == "7"
    for datatype, values in VALUES.items():
        output = found.as_numpy(f"{datatype}_back")
        if datatype == "BYTES":
            assert [v if isinstance(v, bytes) else v.encode() for v in output] == values.tolist()
        else:
            assert output.dtype == values.dtype
            assert output.tolist() == values.tolist()


def test_triton_s_client_is_told_what_is_wrong(client: Any) -> None:
    tensor = triton.InferInput("FP32", (3,), "FP64")
    tensor.set_data_from_numpy(np.zeros(3))
    with pytest.raises(InferenceServerException, match="input BOOL is missing"):
        client.infer("every", [tensor])
    with pytest.raises(InferenceServerException, match="model 'none' does not exist"):
        client.get_model_metadata("none")


@pytest.mark.thorough
def test_kserve_s_client_gets_every_datatype_back(server: Server) -> None:
    if not (KSERVE / "kserve").is_dir():
        pytest.skip(f"KServe's client is not in {KSERVE}: scripts/test installs it (not for Python 3.14)")
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "helpers" / "kserve_client.py"),
        f"http://127.0.0.1:{server.port}",
    ]
    path = os.pathsep.join([str(KSERVE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": path})
    assert (done.returncode, done.stdout) == (0, "all as it should be\n"), done.stderr[-6000:]


@pytest.mark.thorough
def test_the_openapi_file_holds_whatever_is_asked(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{server.port}/openapi.json"]
    command += ["--max-examples", "25", "--seed", "1", "--no-color", "--generation-database", "none"]
    command += ["--exclude-checks", "positive_data_acceptance"]  # no schema says that data has its shape's many values
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
