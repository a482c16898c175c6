"""Nets as a member's process runs them: by ONNX Runtime and by torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from apportion.exporting.exporter import export
from apportion.serving.row_independence.decision import why_rows_differ
from apportion.serving.runtimes.onnx_runtime import OnnxRuntime
from apportion.serving.runtimes.runtime import Expired, Runtime, timed
from apportion.serving.runtimes.torch_runtime import TorchRuntime, opened

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)


class Centred(nn.Module):
    """Each row depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Long(nn.Module):
    """Takes a tenth of a second or more, in a hundred steps."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        many = x.repeat(1, 64).reshape(-1, 512).repeat(300, 1)
        for _ in range(100):
            many = self.part(many)
        return many.sum(1, keepdim=True)[: len(x)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def by_onnx(module: nn.Module, folder: Path) -> Runtime:
    export(module, torch.from_numpy(X[:2]), folder / "net.onnx")
    return OnnxRuntime(folder / "net.onnx")


@pytest.mark.parametrize("kind", ["onnx", "torch", "a program of torch.export"])
def test_each_runtime_computes_the_net(kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        program = by_onnx(net(), tmp_path)
    elif kind == "torch":
        program = TorchRuntime(net(), torch.from_numpy(X[:1]))
    else:
        rows = ({0: torch.export.Dim.DYNAMIC},)
        exported = torch.export.export(net(), (torch.from_numpy(X),), dynamic_shapes=rows)
        program = TorchRuntime(exported.module(), torch.from_numpy(X))
    (found,) = program.run([X], time.monotonic() + 5)
    np.testing.assert_allclose(found, net()(torch.from_numpy(X)).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert [spec.shape for spec in (*program.inputs, *program.outputs)] == [(None, 8), (None, 3)]
    assert why_rows_differ(program, [X[:1]]) is None
    assert set(timed(program, None, seconds=5.0, sizes=[1, 2, 4]).seconds) == {1, 2, 4}
    with pytest.raises(Expired):
        program.run([X], time.monotonic() - 1)
    program.close()


@pytest.mark.parametrize("kind", ["onnx", "torch"])
@pytest.mark.thorough
def test_what_is_past_its_deadline_is_stopped_while_it_is_computed(kind: str, tmp_path: Path) -> None:
    long = Long().eval()
    program = by_onnx(long, tmp_path) if kind == "onnx" else TorchRuntime(long, torch.from_numpy(X[:1]))
    began = time.monotonic()
    program.run([X], float("inf"))
    whole = time.monotonic() - began
    began = time.monotonic()
    with pytest.raises(Expired):
        program.run([X], began + whole / 10)
    assert time.monotonic() - began < whole / 2
    (found,) = program.run([X], float("inf"))
    assert found.shape == (3, 1), "the next one is computed whole"
    program.close()


@pytest.mark.parametrize("kind", ["onnx", "torch"])
@pytest.mark.cases(1)
def test_rows_that_depend_on_each_other_are_never_computed_together(kind: str, tmp_path: Path) -> None:
    program = by_onnx(Centred(), tmp_path) if kind == "onnx" else TorchRuntime(Centred(), torch.from_numpy(X[:1]))
    assert program.batched, "by its shapes it could be"
    assert why_rows_differ(program, [X[:1]]) == "a row has another output beside other rows than alone, in a trial"
    program.close()


def test_what_a_net_does_not_take_is_said(tmp_path: Path) -> None:
    for program in (by_onnx(net(), tmp_path), TorchRuntime(net(), torch.from_numpy(X))):
        with pytest.raises(ValueError, match=r"."):
            program.run([X[:, :5]], float("inf"))
        program.close()


class Counting(nn.Module):
    """How many threads compute it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + torch.get_num_threads()


def test_each_program_is_computed_by_its_own_number_of_threads() -> None:
    programs = {threads: TorchRuntime(Counting(), torch.ones(1, 1), threads=threads) for threads in (1, 2, 3)}
    try:
        for threads in (1, 3, 2, 2, 1):
            (found,) = programs[threads].run([np.ones((1, 1), dtype=np.float32)], float("inf"))
            assert found == threads
    finally:
        torch.set_num_threads(1)


class Narrow(nn.Module):
    """bfloat16 in and out, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x.float() + 1).bfloat16()


def test_a_file_of_bfloat16_takes_and_gives_its_bits(tmp_path: Path) -> None:
    sample = torch.from_numpy(X).bfloat16()
    export(Narrow(), sample, tmp_path / "net.onnx")
    program = OnnxRuntime(tmp_path / "net.onnx")
    assert [spec.datatype for spec in (*program.inputs, *program.outputs)] == ["BF16", "BF16"]
    for x in (sample, sample[:0]):
        (found,) = program.run([x.view(torch.uint16).numpy()], time.monotonic() + 5)
        np.testing.assert_array_equal(found, Narrow()(x).view(torch.uint16).numpy())
    assert why_rows_differ(program, [x.view(torch.uint16).numpy() for x in (sample[:1],)]) is None
    with pytest.raises(ValueError, match=r"."):
        program.run([x.view(torch.uint16).numpy()[:, :5].T], float("inf"))
    program.close()


def test_a_file_that_is_no_net_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"net.onnx cannot be run: "):
        OnnxRuntime(tmp_path / "net.onnx")
    ends: list[Any] = [helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends, [
        helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    ])  # fmt: skip
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "s.onnx")
    with pytest.raises(ValueError, match=r"only tensors of"):
        OnnxRuntime(tmp_path / "s.onnx")


@pytest.mark.parametrize(("rows", "dynamic", "fits"), [(1, False, True), (3, True, True), (3, False, False)])
def test_a_program_of_one_number_of_examples_is_refused(rows: int, dynamic: bool, fits: bool, tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
    program = torch.export.export(nn.Linear(4, 2), (torch.zeros(rows, 4),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "p.pt2")
    if fits:
        opened(tmp_path / "p.pt2")
    else:
        with pytest.raises(ValueError, match="takes 3 examples at once and no other number: export it with"):
            opened(tmp_path / "p.pt2")
