"""Several modules of torch as one program: what it computes is what each of them does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import net
from torch import Tensor, nn

from apportion.exporting.target import called
from apportion.serving.replication import in_graph
from apportion.serving.runtimes import torch_runtime
from apportion.serving.runtimes.runtime import Expired
from apportion.serving.runtimes.source import Source, save_rows
from apportion.serving.runtimes.torch_runtime import InTurn, Stacked, TorchRuntime, together


def convolutional(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    made(torch.randn(8, 3, 8, 8))
    return made.eval()


class Two(nn.Module):
    """Two inputs by name, two outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(a), a * b


CASES: dict[str, tuple[Any, Any]] = {
    "convolutions with batch normalisation": (convolutional, torch.randn(3, 3, 8, 8)),
    "inputs by name": (Two, {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}),
    "inputs by position": (Two, (torch.randn(3, 4), torch.randn(3, 4))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [InTurn, Stacked])
def test_the_outputs_are_those_of_the_first_then_of_the_second(kind: Any, case: str) -> None:
    make, sample = CASES[case]
    modules = [make(seed) for seed in range(3)]
    with torch.inference_mode():
        found = called(kind(modules), sample)
        wanted = [x for module in modules for x in torch.utils._pytree.tree_leaves(called(module, sample))]
    assert len(found) == len(wanted)
    for some, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(some, other, rtol=1e-5, atol=1e-6)


def test_what_is_not_alike_is_computed_in_turn() -> None:
    modules = [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3))]
    assert isinstance(together(modules, torch.zeros(2, 4)), InTurn)


def test_the_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [net(seed) for seed in range(3)]
    seconds = {InTurn: 2.0, Stacked: 1.0}
    clock = [0.0]

    def timed(module: nn.Module, sample: Any) -> Any:
        clock[0] += seconds[type(module)]  # type: ignore[index]
        return module(sample)

    monkeypatch.setattr(torch_runtime, "called", timed)
    monkeypatch.setattr(torch_runtime.time, "perf_counter", lambda: clock[0])
    assert isinstance(together(modules, torch.zeros(2, 8)), Stacked)
    seconds[Stacked] = 3.0
    assert isinstance(together(modules, torch.zeros(2, 8)), InTurn)


def test_it_stops_at_the_deadline_within_a_member() -> None:
    members = [net(seed) for seed in range(2)]
    program = TorchRuntime(Stacked(members), torch.zeros(1, 8))
    with pytest.raises(Expired):
        program.run([np.zeros((1, 8), np.float32)], 0.0)
    members[0](torch.zeros(1, 8))  # whoever else has the module calls it without a deadline


def test_members_that_torch_runs_are_one_program(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    rows = {0: torch.export.Dim.DYNAMIC}
    sources = []
    for n in (1, 2):
        path = tmp_path / f"{n}.pt2"
        torch.export.save(torch.export.export(net(n), (torch.from_numpy(x),), dynamic_shapes=(rows,)), path)
        sample = save_rows(tmp_path / f"{n}.npz", [x[:1]])
        sources.append(Source(name=f"m{n}", runtime="torch", path=str(path), sample=sample))
    whole = in_graph.merged(sources, tmp_path)
    program = whole.open()
    assert [spec.name for spec in program.outputs] == ["m1/output", "m2/output"]
    found = program.run([x], float("inf"))
    for n, output in zip((1, 2), found, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(output, net(n)(torch.from_numpy(x)).numpy(), rtol=1e-5, atol=1e-6)
    program.close()


def test_members_of_other_inputs_or_runtimes_are_refused(tmp_path: Path) -> None:
    for name, width in (("a", 8), ("b", 4)):
        program = torch.export.export(nn.Linear(width, 3), (torch.zeros(1, width),))
        torch.export.save(program, tmp_path / f"{name}.pt2")
    sources = [Source(name=name, runtime="torch", path=str(tmp_path / f"{name}.pt2")) for name in "ab"]
    with pytest.raises(ValueError, match="in_graph: b does not take what a does"):
        in_graph.merged(sources, tmp_path).open()
    mixed = [sources[0], Source(name="c", runtime="onnx", path="c.onnx")]
    with pytest.raises(ValueError, match="that torch runs, all of them: a is run by torch"):
        in_graph.merged(mixed, tmp_path)
