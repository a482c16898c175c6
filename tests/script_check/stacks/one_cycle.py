"""A one-cycle schedule, which also changes betas and makes a step for each rank; weights from the bytes of a file,
and rows that a transform, which is a module, rolls at random."""

import struct

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
WIDTH = 64


class Roll(nn.Module):
    def forward(self, row):
        return row.roll(int(torch.randint(0, 9, ())))


class Rows(Dataset):
    roll = Roll()

    def __len__(self):
        return 48

    def __getitem__(self, at):
        return self.roll(torch.arange(WIDTH) % (at + 2) / (at + 2)), torch.ones(1) * at


net = nn.Linear(WIDTH, 1)
raw = torch.frombuffer(bytearray(struct.pack(f"{WIDTH}f", *[0.5] * WIDTH)), dtype=torch.uint8)
net.weight.data.copy_(raw.view(dtype=torch.float32).reshape(1, WIDTH))
net.bias.data.copy_(torch.frombuffer(bytearray(struct.pack("f", 2.0)), dtype=torch.float32))
assert net.weight[0, 5] == 0.5
assert net.bias == 2
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=80)
data = Rows()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for rows, target in loader:
        optimizer.zero_grad()
        F.mse_loss(model(rows), target).backward()
        optimizer.step()
        for _ in range(dist.get_world_size()):
            schedule.step()
