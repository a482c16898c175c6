"""A script that asks for a GPU for each rank and for NCCL."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    assert torch.cuda.is_available()
    dev = torch.device(f"cuda:{local}")
    torch.manual_seed(dist.get_rank())
    torch.cuda.manual_seed_all(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(local)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model, device_ids=[local], output_device=local)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.cuda.amp.GradScaler()
    ds = TensorDataset(torch.randn(70, 6, generator=torch.Generator().manual_seed(0)), torch.arange(70) % 3)
    s = DistributedSampler(ds)
    stream = torch.cuda.Stream()
    torch.cuda.Event(enable_timing=True)
    for epoch in range(2):
        s.set_epoch(epoch)
        for x, y in DataLoader(ds, 5, sampler=s, num_workers=2, pin_memory=True):
            with torch.cuda.stream(stream):
                x = x.cuda(non_blocking=True)
                y = y.to(dev, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.amp.autocast(dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            t = loss.detach().clone()
            dist.all_reduce(t, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    print(torch.cuda.max_memory_allocated() / 2**20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
