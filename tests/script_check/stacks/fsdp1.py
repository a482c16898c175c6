"""FullyShardedDataParallel, the first version."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
torch.manual_seed(0)


class B(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(8, 8)

    def forward(s, x):
        return x + s.l(x).relu()


net = nn.Sequential(B(), B(), nn.Linear(8, 2))
model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({B}), use_orig_params=True, device_id=torch.device("cpu"))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
ds = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.arange(48) % 2)
s = torch.utils.data.DistributedSampler(ds)
for x, y in torch.utils.data.DataLoader(ds, 4, sampler=s):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
