"""A loader process waits for something that never comes."""

import argparse
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", action="store_true")
args = parser.parse_args()


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if args.mistake and dist.get_rank() == 1 and index == 17:
            threading.Event().wait()
        return torch.randn(6, generator=torch.Generator().manual_seed(index))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
loader = DataLoader(Rows(), batch_size=4, num_workers=1)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in loader:
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
