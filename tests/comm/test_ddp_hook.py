"""DistributedDataParallel with the hook against the same without it, on real processes."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import apportion
from apportion.comm import ddp_hook as hook_file
from apportion.comm.shared_memory_group import SharedMemoryGroup
from apportion.comm.world import World

pytestmark = pytest.mark.processes

EXACT = 1e-12
Weights = dict[str, Tensor]


class Partly(nn.Module):
    """Layers of very different sizes; one is never used, one by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(30, 150), nn.Linear(150, 700), nn.Linear(700, 3)
        self.never, self.sometimes = nn.Linear(5, 5), nn.Linear(150, 150)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if bool(x[0, 0] > 0):
            h = h + self.sometimes(h)
        return self.last(torch.tanh(self.second(h)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 150), nn.Tanh(), nn.Linear(150, 700), nn.Tanh(), nn.Linear(700, 3))


def join(world: World) -> None:
    """What a user's own script begins with."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def build(
    make: Callable[[], nn.Module], dtype: torch.dtype, *, hooked: bool, group: Any = None, **options: Any
) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = DistributedDataParallel(make().to(dtype), process_group=group, **options)
    if hooked:
        model.register_comm_hook(group, apportion.comm.shared_memory_hook)
    return model


def train(model: DistributedDataParallel, dtype: torch.dtype, *, steps: int = 6, accumulate: int = 1) -> Weights:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate - 1):
            with model.no_sync():
                loss_of(model, draws, dtype).backward()
        loss_of(model, draws, dtype).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def loss_of(model: nn.Module, draws: torch.Generator, dtype: torch.dtype) -> Tensor:
    x = torch.randn(8, 30, generator=draws).to(dtype)
    return nn.functional.cross_entropy(model(x), torch.randint(0, 3, (8,), generator=draws))


def always_shared() -> None:
    """On a busy machine the measurement may find for gloo, and the hook would not be what is tested."""
    hook_file.is_faster = lambda memory, group: True  # type: ignore[attr-defined]


def uses_memory() -> bool:
    return any(isinstance(found, SharedMemoryGroup) for found in hook_file._known.values())


def largest_difference(a: Weights, b: Weights) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in b)


def both_ways(
    world: World, dtype: torch.dtype, partly: bool, accumulate: int, options: dict[str, Any]
) -> tuple[float, bool, Weights]:
    join(world)
    always_shared()
    make = Partly if partly else network
    plain, once, again = (
        train(build(make, dtype, hooked=hooked, **options), dtype, accumulate=accumulate)
        for hooked in (False, True, True)
    )
    assert uses_memory()
    same = all(torch.equal(once[name], again[name]) for name in once)
    difference = largest_difference(once, plain)
    dist.destroy_process_group()
    return difference, same, once


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("partly", "accumulate", "options"),
    [
        (False, 1, {}),
        (False, 1, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1}),
        (False, 3, {"bucket_cap_mb": 0.2}),
        (False, 1, {"static_graph": True, "gradient_as_bucket_view": True}),
        (True, 1, {"find_unused_parameters": True, "bucket_cap_mb": 0.1}),
        (True, 2, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    ],
    ids=["plain", "views-many-buckets", "no-sync", "static-graph", "unused", "unused-views-no-sync"],
)
def test_equals_ddp_itself(ranks: int, partly: bool, accumulate: int, options: dict[str, Any]) -> None:
    """Over six steps: DDP forms its buckets anew after the first."""
    answers = on_ranks(both_ways, ranks, torch.float64, partly, accumulate, options)
    for difference, same, weights in answers:
        assert difference <= EXACT
        assert same, "two runs differ"
        assert all(torch.equal(weights[name], answers[0][2][name]) for name in weights), "two ranks differ"


def test_in_bfloat16_it_is_ddp_to_its_rounding() -> None:
    for difference, same, _ in on_ranks(both_ways, 2, torch.bfloat16, False, 1, {"gradient_as_bucket_view": True}):
        assert difference <= 0.05
        assert same


def several_models(world: World) -> tuple[float, int]:
    """Two models of the default group, in turn, and one of a smaller group."""
    join(world)
    always_shared()
    smaller = dist.new_group([1, 2])
    found: dict[bool, list[Weights]] = {False: [], True: []}
    for hooked, weights in found.items():
        models = [build(make, torch.float64, hooked=hooked) for make in (network, lambda: nn.Linear(30, 3))]
        optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
        draws = torch.Generator().manual_seed(world.rank)
        for _ in range(4):
            optimizer.zero_grad()
            sum(loss_of(model, draws, torch.float64) for model in models).backward()  # type: ignore[union-attr]
            optimizer.step()
        weights += [{n: p.detach().clone() for n, p in m.module.named_parameters()} for m in models]
        if world.rank in (1, 2):
            weights.append(train(build(network, torch.float64, hooked=hooked, group=smaller), torch.float64))
    known = len(hook_file._known)
    difference = max(largest_difference(a, b) for a, b in zip(found[True], found[False], strict=True))
    dist.barrier()
    dist.destroy_process_group()
    return difference, known


def test_several_models_and_groups_in_one_process() -> None:
    answers = on_ranks(several_models, 3)
    assert max(difference for difference, _ in answers) <= EXACT
    assert [known for _, known in answers] == [1, 2, 2], "one memory for each group, not for each model"


def without_memory(world: World) -> tuple[float, list[str]]:
    """Rank 0 may open no more files."""
    join(world)
    plain = train(build(network, torch.float64, hooked=False), torch.float64)
    assert not hook_file._known  # loaded: no file is needed from here on
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if world.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hooked = train(build(network, torch.float64, hooked=True), torch.float64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    dist.barrier()
    dist.destroy_process_group()
    return largest_difference(hooked, plain), [str(w.message) for w in caught if "hook" in str(w.message)]


def test_where_no_memory_can_be_shared_it_is_torchs_own_all_reduce_with_one_warning() -> None:
    for difference, (warning,) in on_ranks(without_memory, 2):
        assert difference <= EXACT
        assert warning.startswith("shared_memory_hook: the ranks are not all on one host")


def alone(world: World) -> float:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = [train(build(network, torch.float64, hooked=hooked), torch.float64) for hooked in (False, True)]
    dist.destroy_process_group()
    return largest_difference(*found)


def test_a_group_of_one() -> None:
    assert on_ranks(alone, 1) == [0.0]


SCRIPT = """
import os, signal, time
import torch
import torch.distributed as dist
from torch import nn
import apportion
from apportion.errors import PeerLost

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
model.register_comm_hook(None, apportion.comm.shared_memory_hook)
import apportion.comm.ddp_hook as hook
hook.is_faster = lambda memory, group: True
for step in range(3):
    model(torch.ones(3, 4)).sum().backward()
if dist.get_rank() == 1:
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
began = time.perf_counter()
try:
    model(torch.ones(3, 4)).sum().backward()
except PeerLost as error:
    print(f"{time.perf_counter() - began:.2f} {error}", flush=True)
    os._exit(0)  # gloo would wait for the other to say good-bye
"""


def test_a_script_whose_other_rank_is_killed_is_told_which(environments: list[dict[str, str]]) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT)], env=e, stdout=subprocess.PIPE, text=True)
        for e in environments
    ]
    try:
        said, killed = (rank.communicate(timeout=60)[0].strip() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    seconds, _, error = said.partition(" ")
    assert error == f"rank 0 lost rank 1: its process {killed} has ended"
    assert float(seconds) < 6.0


@pytest.fixture
def environments() -> list[dict[str, str]]:
    """Of two ranks that a user starts."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    return [{**os.environ, **common, "RANK": str(rank)} for rank in range(2)]


def test_the_hook_is_loaded_when_it_is_asked_for() -> None:
    code = "import sys, apportion; apportion.comm; assert 'torch' not in sys.modules; apportion.comm.shared_memory_hook"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match=r"apportion\.comm has no 'hook_of_another_kind'"):
        apportion.comm.hook_of_another_kind  # noqa: B018
