"""torch.distributed.pipelining over gloo on a chain of layers: one rank, parked. python pipelining.py FILE:NAME KIND

Its stages are equal parts of the chain, one on each rank; eight micro-batches; a fused optimizer; its batches lie in
memory already. KIND of schedule: gpipe or 1f1b.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from endless import endless, fused, in_memory
from parked import serve, settle

from apportion import DataShard
from apportion.core.data.source import BatchSource

MICROBATCHES = 8


def main(address, schedule):
    settle()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    workload = endless(address)
    torch.manual_seed(workload.seed)
    layers = list(workload.model().children())
    own = nn.Sequential(*layers[rank * len(layers) // ranks : (rank + 1) * len(layers) // ranks])
    stage = PipelineStage(own, rank, ranks, torch.device("cpu"))
    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, MICROBATCHES, loss_fn=workload.loss)
    optimizer = fused(workload.optimizer(own.named_parameters()))
    (batch,) = in_memory(BatchSource(workload), DataShard(0, 1))

    def run(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            if rank == 0:
                made.step(batch.inputs)
            else:
                made.step(target=batch.targets)
            optimizer.step()

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
