"""torch's DistributedDataParallel on a workload: one rank, parked. python ddp.py FILE:NAME [BATCH_SIZE [OPTION ...]]

The same network, data path, optimizer and schedule as ours; DDP as fast as it goes: gradients that are views of the
buckets, a static graph, no broadcast of buffers (none of them changes), a fused optimizer. With `memory`:
its batches lie in memory already. With `hook`: its gradients take our all-reduce. With `fp16`: they are halved by its
own hook.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from endless import STEPS, endless, fused, in_memory
from parked import serve, settle

import apportion
from apportion import DataShard
from apportion.core.data.source import BatchSource


def main(address, batch_size=None, *options):
    settle()
    dist.init_process_group("gloo")
    workload = endless(address, batch_size)
    torch.manual_seed(workload.seed)
    model = DistributedDataParallel(
        workload.model(), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    if "hook" in options:
        model.register_comm_hook(None, apportion.comm.shared_memory_hook)
    if "fp16" in options:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = fused(workload.optimizer(model.module.named_parameters()))
    schedule = workload.schedule(optimizer, STEPS) if workload.schedule else None
    source, shard = BatchSource(workload), DataShard(dist.get_rank(), dist.get_world_size())
    kept = in_memory(source, shard) if "memory" in options else None
    done = 0

    def run(steps):
        nonlocal done
        for number in range(done, done + steps):
            batch = source.at(number, shard) if kept is None else kept[number % len(kept)]
            optimizer.zero_grad()
            loss = workload.loss(model(batch.inputs), batch.targets)
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        done += steps

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
