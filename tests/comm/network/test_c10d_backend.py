"""The process group of torch.distributed over our groups, against torch's own collectives by hand: real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import apart, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from apportion.comm.network.c10d_backend import NAME, init_process_group
from apportion.comm.world import World

pytestmark = pytest.mark.processes

SIZE = 3


def by_torch(world: World, over: str) -> dict[str, Any]:
    """What each collective of torch.distributed gives this rank."""
    own = apart(over=over) if over else world
    init_process_group(own.group())
    rank, size = own.rank, own.size
    x = torch.arange(4.0) + 10.0 * rank
    found: dict[str, Any] = {"backend": dist.get_backend()}
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        y = x.clone()
        dist.all_reduce(y, op=getattr(dist.ReduceOp, op))
        found[f"all_reduce {op}"] = y.tolist()
    rows = [torch.empty(4) for _ in range(size)]
    dist.all_gather(rows, x)
    found["all_gather"] = torch.stack(rows).tolist()
    whole = torch.empty(4 * size)
    dist.all_gather_into_tensor(whole, x)
    found["all_gather_into_tensor"] = whole.tolist()
    for op in ("SUM", "AVG"):
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * size) + rank, op=getattr(dist.ReduceOp, op))
        found[f"reduce_scatter_tensor {op}"] = part.tolist()
    part = torch.empty(2)
    dist.reduce_scatter(part, list((torch.arange(2.0 * size) + rank).chunk(size)))
    found["reduce_scatter"] = part.tolist()
    y = x.clone()
    dist.broadcast(y, src=1)
    found["broadcast"] = y.tolist()
    y = torch.empty(4)
    dist.scatter(y, [torch.full((4,), float(n)) for n in range(size)] if rank == 2 else None, src=2)
    found["scatter"] = y.tolist()
    rows = [torch.empty(4) for _ in range(size)]
    dist.gather(x, rows if rank == 1 else None, dst=1)
    found["gather"] = torch.stack(rows).tolist() if rank == 1 else None
    told: list[Any] = [None] * size
    dist.all_gather_object(told, {"rank": rank})
    found["all_gather_object"] = told
    sharded = distribute_tensor(torch.arange(7.0), init_device_mesh("cpu", (size,)), [Shard(0)])
    found["DTensor"] = [sharded.full_tensor().tolist(), sharded.sum().full_tensor().item()]
    dist.barrier()
    refused = []
    for call in (lambda: dist.all_reduce(torch.ones(1).int(), op=dist.ReduceOp.BOR), lambda: dist.new_group([0, 1])):
        try:
            call()
        except ValueError as error:
            refused.append(str(error))
    found["refused"] = len(refused)
    apart(over="NetworkGroup").close()  # a world that is made now is not joined to torch's
    dist.destroy_process_group()
    return found


def by_hand(rank: int) -> dict[str, Any]:
    x = torch.stack([torch.arange(4.0) + 10.0 * r for r in range(SIZE)])
    parts = torch.stack([(torch.arange(2.0 * SIZE) + r).view(SIZE, 2) for r in range(SIZE)])
    return {
        "backend": NAME,
        "all_reduce SUM": x.sum(0).tolist(),
        "all_reduce AVG": x.mean(0).tolist(),
        "all_reduce MAX": x.amax(0).tolist(),
        "all_reduce MIN": x.amin(0).tolist(),
        "all_reduce PRODUCT": x.prod(0).tolist(),
        "all_gather": x.tolist(),
        "all_gather_into_tensor": x.view(-1).tolist(),
        "reduce_scatter_tensor SUM": parts.sum(0)[rank].tolist(),
        "reduce_scatter_tensor AVG": parts.mean(0)[rank].tolist(),
        "reduce_scatter": parts.sum(0)[rank].tolist(),
        "broadcast": x[1].tolist(),
        "scatter": [float(rank)] * 4,
        "gather": x.tolist() if rank == 1 else None,
        "all_gather_object": [{"rank": r} for r in range(SIZE)],
        "DTensor": [torch.arange(7.0).tolist(), 21.0],
        "refused": 2 if rank < 2 else 1,  # rank 2 is not in the group of two that nobody makes
    }


@pytest.mark.parametrize("over", ["", "NetworkGroup"])
def test_the_collectives_of_torch_are_made_over_our_groups(over: str) -> None:
    for rank, found in enumerate(on_ranks(by_torch, SIZE, over)):
        assert found == by_hand(rank)
