"""One process on a workload by itself, parked. python threads.py FILE:NAME BATCH_SIZE [THREADS]

With all threads where THREADS is not given. The same network, optimizer (fused) and schedule as ours; its batches lie
in memory already.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from endless import STEPS, endless, fused, in_memory
from parked import serve, settle

from apportion import DataShard
from apportion.core.data.source import BatchSource
from apportion.process import usable_cores


def main(address, batch_size, threads=None):
    settle()
    torch.set_num_threads(usable_cores() if threads is None else int(threads))
    workload = endless(address, batch_size)
    torch.manual_seed(workload.seed)
    model = workload.model()
    optimizer = fused(workload.optimizer(model.named_parameters()))
    schedule = workload.schedule(optimizer, STEPS) if workload.schedule else None
    kept = in_memory(BatchSource(workload), DataShard(0, 1))

    def run(steps):
        for number in range(steps):
            batch = kept[number % len(kept)]
            optimizer.zero_grad()
            workload.loss(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
