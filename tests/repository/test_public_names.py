"""What the package is called by, and what importing it costs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

import apportion

pytestmark = pytest.mark.usefixtures("cold_programs")

NAMES = [
    "ApportionError",
    "Batch",
    "CheckpointError",
    "Cluster",
    "DataShard",
    "Disproved",
    "Draws",
    "Evaluation",
    "Event",
    "Finding",
    "Plan",
    "Policy",
    "Profile",
    "Proof",
    "Result",
    "ScriptAnswer",
    "Serving",
    "State",
    "Step",
    "Strategy",
    "WorkerFailed",
    "Workload",
    "World",
    "accuracy",
    "actor_critic",
    "batches",
    "check",
    "check_script",
    "compare",
    "evaluate",
    "export",
    "load",
    "measure",
    "plan",
    "predict",
    "run",
    "serve",
    "train",
]
VALUES = [
    "bf16", "conv_parallel", "csv", "custom", "data_parallel", "ema", "env", "fp16", "fully_sharded", "grouped",
    "hogwild", "hybrid_parallel", "int8", "layer_placement", "local", "local_sgd", "map_reduce", "mlflow",
    "parameter_server", "pipeline_parallel", "power_sgd", "ray", "single_device", "slurm", "ssh", "swa",
    "tensor_parallel", "tensorboard", "top_k", "trackio", "wandb", "wavefront_parallel", "weighted",
    "with_replacement",
]  # fmt: skip
HEAVY = ["click", "rich", "tensorboard", "matplotlib", "onnx", "onnxruntime", "ray", "gymnasium"]
LIMIT_SHARE = 0.15
"""Of the time that torch itself takes: processors differ, and so does one from minute to minute."""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_these() -> None:
    assert apportion.__all__ == NAMES
    assert dir(apportion) == sorted([*NAMES, *VALUES])


def test_every_name_can_be_imported_and_says_what_it_is() -> None:
    found = {name: getattr(apportion, name) for name in [*NAMES, *VALUES]}
    assert [name for name, value in found.items() if not value.__doc__] == []
    assert [name for name, value in found.items() if not (value.__module__ or "").startswith("apportion.")] == []


def test_a_name_that_is_none_is_an_attribute_error_that_lists_them() -> None:
    with pytest.raises(AttributeError, match="apportion has no 'Trainer': its public names are ApportionError"):
        apportion.Trainer  # noqa: B018
    assert not hasattr(apportion, "strategies_")


@pytest.mark.processes
def test_importing_all_of_the_package_opens_no_connection() -> None:
    code = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "urllib.Request"):
        raise RuntimeError(f"{event}{arguments}")

sys.addaudithook(refuse)
import apportion
print(len([getattr(apportion, name) for name in dir(apportion)]))
"""
    assert int(python(code)) > 40


@pytest.mark.processes
def test_importing_the_package_imports_neither_torch_nor_what_shows_and_draws() -> None:
    code = f"import sys, apportion; print([name for name in {['torch', 'numpy', *HEAVY]} if name in sys.modules])"
    assert python(code) == "[]\n"


@pytest.mark.processes
@pytest.mark.thorough
def test_no_public_name_imports_what_shows_and_draws() -> None:
    every = "; ".join(f"apportion.{name}" for name in [*NAMES, *VALUES])
    code = f"import sys, apportion; {every}; print([name for name in {HEAVY} if name in sys.modules])"
    assert python(code) == "[]\n"


@pytest.mark.processes
@pytest.mark.thorough
def test_using_it_adds_little_to_importing_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """Processor time, which a busy machine stretches less than the clock; the median of several processes. Without
    collections of garbage: a full one looks through all that torch has made, and falls to whoever imports the module
    that is one too many."""
    code = """
import gc, json, sys, time
gc.disable()
start = time.process_time()
import torch
began, before = time.process_time(), set(sys.modules)
import apportion
apportion.Workload, apportion.World, apportion.run, apportion.local, apportion.data_parallel
print(json.dumps([time.process_time() - began, began - start, len(set(sys.modules) - before)]))
"""
    told = [json.loads(python(code)) for _ in range(3)]
    seconds, torchs = (statistics.median(t[n] for t in told) for n in (0, 1))
    with capsys.disabled():
        print(f"\nimport apportion and its main names: {seconds:.3f} s more than import torch ({told[0][2]} modules)")
    assert seconds <= LIMIT_SHARE * torchs
