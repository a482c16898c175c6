"""All ranks call the collective functions in one order, and a function that says that all ranks call it is marked."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from commands import finish, free_port, start

import apportion
from apportion.comm import group

PACKAGE = Path(apportion.__file__).parent
SAYS = re.compile(r"called (inside each process, )?by (all|every)\b|all ranks call it", re.IGNORECASE)
STRATEGIES = ("data_parallel", "map_reduce", "fully_sharded", "tensor_parallel", "pipeline_parallel")
RANK = """
import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

for name in [name for name in sys.modules if name.partition(".")[0] == "apportion"]:
    del sys.modules[name]  # what is recorded is recorded from the import on

import apportion
from apportion.comm.group import RECORDED


def network():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))


def examples():
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


workload = apportion.Workload(
    model=network,
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    clip_grad_norm=1.0,
    batch_size=12,
    steps=3,
    evaluation=apportion.Evaluation(data=examples, every=1),
)
called = {}
for strategy in sys.argv[2:]:
    RECORDED.clear()
    options = {"launcher": apportion.env(device="cpu"), "run_dir": f"{sys.argv[1]}/{strategy}", "check": False}
    for _ in apportion.run(workload, strategy, **options):
        pass
    called[strategy] = list(RECORDED)
print(json.dumps(called))
"""


@pytest.mark.thorough
def test_a_function_that_all_ranks_call_is_marked() -> None:
    unmarked = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and SAYS.search(" ".join((ast.get_docstring(node) or "").split())):
                marks = {ast.unparse(mark) for mark in node.decorator_list}
                if "collective" not in marks:
                    unmarked.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    assert unmarked == []


def test_a_mark_leaves_the_function_as_it_is_where_nothing_is_recorded() -> None:
    def marked() -> None: ...

    assert group.RECORDED is None
    assert group.collective(marked) is marked


def test_a_function_that_stands_for_a_collective_one_is_collective() -> None:
    step = apportion.data_parallel
    assert step.build.is_collective  # type: ignore[attr-defined]
    assert not hasattr(step.reference, "is_collective")


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.thorough
def test_all_ranks_call_the_same_collectives_in_the_same_order(ranks: int, tmp_path: Path) -> None:
    environment = {
        "APPORTION_RECORD_COLLECTIVES": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    command = (sys.executable, "-c", RANK, str(tmp_path), *STRATEGIES)
    said = finish([start(command, RANK=str(rank), LOCAL_RANK=str(rank), **environment) for rank in range(ranks)])
    first, *others = (json.loads(text.splitlines()[-1]) for text in said)
    for strategy in STRATEGIES:
        assert [other[strategy] for other in others] == [first[strategy]] * (ranks - 1), strategy
        assert {"StepCoordinator.poll", "RunCheckpoints.save", "evaluate"} <= set(first[strategy]), strategy
        assert any(name.endswith("Step.state_dict") for name in first[strategy]), strategy
