"""The digits under torch's DistributedDataParallel, one step of them, with a note of when it was finished.

    torchrun --nproc_per_node=2 ddp_first_step.py

The twin of `digits_first_step.py`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import digits_plain as plain

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from first_step import noting


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x, _, y, _ = plain.digits()
    model, optimizer, _ = plain.training(1)
    schedule = noting(optimizer, 1)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    index = torch.randperm(len(x))[: plain.BATCH_SIZE].chunk(dist.get_world_size())[dist.get_rank()]
    loss = nn.functional.cross_entropy(model(x[index]), y[index], label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    schedule.step()
    dist.barrier()  # the first to leave may close the store under the other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
