"""torch's tensor parallelism on a workload: one rank, parked. python dtensor.py FILE:NAME [BATCH_SIZE [memory]]

The Linear layers of the network, which has to be a Sequential, are divided by ``parallelize_module`` as Megatron-LM
does: by columns and by rows in turn, so that each pair needs one sum. A last layer without a partner is divided by
rows of its weight where the classes are even, and its loss is computed on the shards (``loss_parallel``); else it is
whole on every rank. The optimizer is fused where it can be: on DTensors torch has the foreach form.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from endless import STEPS, endless, in_memory
from parked import serve, settle

from apportion import DataShard
from apportion.core.data.source import BatchSource


def divided(model):
    """The network on shards, and whether its outputs are shards of the classes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    plan = {name: ColwiseParallel() if k % 2 == 0 else RowwiseParallel() for k, name in enumerate(linear)}
    alone = len(linear) % 2 == 1
    if alone:
        plan[linear[-1]] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, plan), alone


def main(address, batch_size=None, *options):
    settle()
    dist.init_process_group("gloo")
    workload = endless(address, batch_size)
    torch.manual_seed(workload.seed)
    model, alone = divided(workload.model())
    optimizer = workload.optimizer(model.named_parameters())
    schedule = workload.schedule(optimizer, STEPS) if workload.schedule else None
    source = BatchSource(workload)
    kept = in_memory(source, DataShard()) if "memory" in options else None
    done = 0

    def run(steps):
        nonlocal done
        for number in range(done, done + steps):
            batch = source.at(number, DataShard()) if kept is None else kept[number % len(kept)]
            optimizer.zero_grad()
            with loss_parallel() if alone else nullcontext():
                workload.loss(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        done += steps

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
