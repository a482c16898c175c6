"""torch's DistributedDataParallel that saves every 20 steps and goes on from there: what torchrun restarts.

    torchrun --nproc_per_node=2 --max-restarts=1000 ddp_saving.py FILE [SECONDS]

SECONDS: gloo's timeout; without it, torch's own.
The same network, data path, optimizer and schedule as ours; DDP as fast as it goes (see ddp.py).
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

from endless import STEPS
from noted import cifar10
from parked import settle

from apportion import DataShard
from apportion.core.data.source import BatchSource

EVERY = 20


def main(path, timeout=None):
    settle()
    dist.init_process_group("gloo", timeout=None if timeout is None else timedelta(seconds=float(timeout)))
    torch.manual_seed(cifar10.seed)
    model = DistributedDataParallel(
        cifar10.model(), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    optimizer = cifar10.optimizer(model.module.named_parameters())
    schedule = cifar10.schedule(optimizer, STEPS)
    parts = {"model": model.module, "optimizer": optimizer, "schedule": schedule}
    done = 0
    if os.path.exists(path):
        saved = torch.load(path, weights_only=False)
        done = saved.pop("done")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    source, shard = BatchSource(cifar10), DataShard(dist.get_rank(), dist.get_world_size())
    while True:
        batch = source.at(done, shard)
        optimizer.zero_grad()
        cifar10.loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        schedule.step()
        done += 1
        if done % EVERY == 0 and dist.get_rank() == 0:
            torch.save({"done": done} | {name: part.state_dict() for name, part in parts.items()}, f"{path}.new")
            os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main(*sys.argv[1:])
