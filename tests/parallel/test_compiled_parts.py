"""Networks that compile a part of themselves are cut and looked at as they are written, and train the same."""

from __future__ import annotations

from pathlib import Path

import compiled_nets
import networks
import pytest
import torch
from compiled_nets import Inductor, InPlace, Method, Module, Named, of_logits, workload
from proofs import assert_equal
from ranks import by_value
from torch import Tensor, nn

import apportion
from apportion.parallel.tracing.tracer import follow

pytestmark = pytest.mark.processes


def state(model: type[nn.Module], strategy: str, workers: int, folder: Path) -> dict[str, Tensor]:
    run = folder / f"{strategy}{workers}"
    trained = workload(model, precision="float64")
    with by_value(networks), by_value(compiled_nets):
        apportion.train(trained, strategy, launcher=apportion.local(workers), run_dir=run, check=False)
    return apportion.load(run, model=model).state_dict()


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (Module, "tensor_parallel"), (Module, "layer_placement"), (Named, "layer_placement"),
        (InPlace, "tensor_parallel"), (InPlace, "pipeline_parallel"), (Method, "tensor_parallel"),
        (Method, "layer_placement"), (Named, "pipeline_parallel"), (Module, "data_parallel"),
    ],
)  # fmt: skip
def test_a_network_with_a_compiled_part_equals_one_device(model: type[nn.Module], strategy: str) -> None:
    with by_value(networks), by_value(compiled_nets):
        loss = {"loss": of_logits} if model is Named else {}
        trained = workload(model, precision="float64", **loss)
        assert_equal(apportion.check(trained, strategy, workers=2, steps=3))


@pytest.mark.parametrize("strategy", ["data_parallel", "tensor_parallel", "layer_placement"])
@pytest.mark.thorough
def test_a_run_with_a_compiled_part_ends_where_one_device_does(strategy: str, tmp_path: Path) -> None:
    expected, found = (state(Module, s, n, tmp_path) for s, n in (("single_device", 1), (strategy, 2)))
    assert all(torch.allclose(found[name], expected[name], rtol=0.0, atol=1e-12) for name in expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch itself has deprecated
@pytest.mark.parametrize("strategy", ["data_parallel", "tensor_parallel", "layer_placement"])
def test_a_part_that_inductor_compiles_ends_where_one_device_does(strategy: str, tmp_path: Path) -> None:
    expected, found = (state(Inductor, s, n, tmp_path) for s, n in (("single_device", 1), (strategy, 2)))
    assert all(torch.allclose(found[name], expected[name], rtol=0.0, atol=1e-12) for name in expected)


@pytest.mark.parametrize("model", [Module, InPlace, Method])
def test_a_compiled_part_is_followed_into(model: type[nn.Module]) -> None:
    graph = follow(model(), torch.zeros(2, compiled_nets.INPUTS))
    assert sum(node.op == "call_module" for node in graph.nodes) >= 4
