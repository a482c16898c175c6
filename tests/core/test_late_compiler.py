"""torch's compiler is imported by those who compile, and changes nothing for those who do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import finish, places, start
from launched_runs import MINE

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("cold_programs")]

TRAINS = """
import json
import sys

import torch
from torch import nn

from apportion.core.torch_private import import_compiler_late

if sys.argv[1] == "late":
    import_compiler_late()


def is_there():
    return "torch._dynamo.eval_frame" in sys.modules


def trained(make):
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = make(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    return [parameter.tolist() for parameter in net.parameters()]


def all_trained():
    return [trained(make) for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)]


before, was_there = all_trained(), is_there()
compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin() + 1)
assert is_there() and hasattr(torch._dynamo, "__file__") and torch._dynamo is sys.modules["torch._dynamo"]
import torch._dynamo.config

assert all_trained() == before
step = torch.compile(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step, backend="eager")
step()
print(json.dumps([was_there, before]))
"""


@pytest.mark.slow
def test_optimizers_make_the_same_updates_without_it_and_what_is_compiled_finds_it() -> None:
    told = {}
    for how in ("late", "at once"):
        done = subprocess.run([sys.executable, "-c", TRAINS, how], capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        told[how] = json.loads(done.stdout)
    assert [told["late"][0], told["at once"][0]] == [False, True]
    assert told["late"][1] == told["at once"][1]


@pytest.mark.parametrize(
    "statement", ["import torch._dynamo.config", "from torch._dynamo import config", "torch._inductor"]
)
@pytest.mark.thorough
def test_whoever_imports_a_part_of_it_gets_that(statement: str) -> None:
    code = f"""
import torch
from apportion.core.torch_private import import_compiler_late
import_compiler_late()
assert not hasattr(torch._dynamo, "__file__")
{statement}
assert torch._dynamo.config.verbose in (True, False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_process_group_and_a_replica_leave_it_where_it_is() -> None:
    code = """
import sys

import torch
from apportion.core.torch_private import compiler_is_imported, import_compiler_late
import_compiler_late()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
replica(torch.ones(4, 3)).sum().backward()
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer" and not compiler_is_imported()
torch.distributed.destroy_process_group()
assert not compiler_is_imported() and "torch._dynamo.eval_frame" not in sys.modules
assert torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST is not None
assert compiler_is_imported() and "torch._dynamo.eval_frame" in sys.modules
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_tensors_without_memory_need_its_settings_alone() -> None:
    """What is set there before the compiler is imported holds after it."""
    code = """
import sys

import torch
from apportion.core.torch_private import compiler_is_imported, import_compiler_late, import_compiler_settings
import_compiler_settings()
assert "torch._dynamo.config" not in sys.modules
import_compiler_late()
import_compiler_settings()
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    assert (torch.ones(3, 4) @ torch.ones(4, 5)).shape == (3, 5)
assert not compiler_is_imported() and "torch._dynamo.eval_frame" not in sys.modules
settings = sys.modules["torch._dynamo.config"]
torch._dynamo.config.recompile_limit = 5
compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin() + 1)
assert compiler_is_imported() and torch._dynamo.config is settings and settings.recompile_limit == 5
from torch._dynamo import config
assert config is settings
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_layers_are_spread_over_ranks_without_it() -> None:
    """The driver, which only names the strategy, does not import what spreads them either."""
    code = """
import sys

import torch
from apportion.core.torch_private import compiler_is_imported, import_compiler_late
import_compiler_late()
from apportion.core.value import parse

strategy = parse("fully_sharded(min_num_params=10)", "apportion.strategies")
assert strategy.imports and not {*strategy.imports, "sympy", "torch.distributed.fsdp"} & sys.modules.keys()
from torch.distributed.device_mesh import init_device_mesh

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from apportion.parallel.replica.fsdp import fully_shard

model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
torch.distributed.destroy_process_group()
assert not compiler_is_imported() and "torch._dynamo.eval_frame" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


WATCHED = """


def loss(outputs, targets):
    there = [name for name in ("torch._dynamo.eval_frame", "sympy") if name in sys.modules]
    assert not there, f"this rank has imported {there}"
    return nn.functional.cross_entropy(outputs, targets)


watched = made(loss=loss, batch_size=15, steps=3)
"""


@pytest.mark.parametrize("launcher", ["local", "env"])
@pytest.mark.thorough
def test_ranks_that_compile_nothing_import_no_compiler(launcher: str, tmp_path: Path) -> None:
    """Two ranks make three updates, of batches whose rows do not divide evenly between them."""
    (tmp_path / "mine.py").write_text("import sys\n" + MINE + WATCHED)
    work = f"{tmp_path / 'mine.py'}:watched"
    train = [sys.executable, "-m", "apportion", "train", work, "data_parallel", "--no-check"]
    train += ["--run-dir", str(tmp_path / "run")]
    if launcher == "local":
        ranks = [start([*train, "--workers", "2"])]
    else:
        ranks = [start([*train, "--launcher", "env"], **place) for place in places(2)]
    assert any("final loss" in said for said in finish(ranks))
