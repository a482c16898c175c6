"""One of several processes that train a workload each by itself, with one thread, parked. python twin.py FILE:NAME

The plain loop; its batches lie in memory already.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from endless import endless, in_memory
from parked import serve, settle

from apportion import DataShard
from apportion.batch import Batches


def main(address):
    settle()
    workload = endless(address)
    torch.manual_seed(workload.seed)
    model = workload.model()
    optimizer = workload.optimizer(model.named_parameters())
    kept = in_memory(Batches(workload), DataShard(0, 1))

    def run(steps):
        for number in range(steps):
            batch = kept[number % len(kept)]
            optimizer.zero_grad()
            workload.loss(model(batch.inputs), batch.targets).backward()
            optimizer.step()

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
