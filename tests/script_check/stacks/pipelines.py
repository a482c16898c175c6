"""torch's pipelines: GPipe, 1F1B, and two stages on each rank, interleaved."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
kind = sys.argv[1]
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
chunks = 4
g = torch.Generator().manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=g), torch.randn(64, 8, generator=g))
loader = torch.utils.data.DataLoader(data, batch_size=8)
if kind == "inter":
    n = 4
    per = n // world
    mine = [nn.Sequential(layers[i]) for i in range(rank, 4, world)]
    stages = [PipelineStage(m, i, n, torch.device("cpu")) for m, i in zip(mine, range(rank, 4, world), strict=True)]
    sched = ScheduleInterleaved1F1B(stages, chunks, loss_fn=F.mse_loss)
    params = [p for m in mine for p in m.parameters()]
    first, last = rank == 0, rank == world - 1
else:
    per = 4 // world
    part = nn.Sequential(*layers[rank * per : (rank + 1) * per])
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    sched = (ScheduleGPipe if kind == "gpipe" else Schedule1F1B)(stage, chunks, loss_fn=F.mse_loss)
    params = list(part.parameters())
    first, last = rank == 0, rank == world - 1
opt = torch.optim.Adam(params, lr=1e-2)
for x, y in loader:
    opt.zero_grad()
    args = (x,) if first else ()
    kw = {"target": y, "losses": []} if last else {}
    sched.step(*args, **kw)
    opt.step()
