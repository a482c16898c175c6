"""Ranks with unequally many batches of one size under join: the mean is that of the ranks that have one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    x = torch.randn(54, 8, generator=torch.Generator().manual_seed(4))
    parts = [range(24), range(24, 54)] if world > 1 else [range(54)]
    data = Subset(TensorDataset(x, x.sum(1, keepdim=True)), parts[rank])
    loader = DataLoader(data, 6, shuffle=True, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _epoch in range(3):
        with model.join(divide_by_initial_world_size=False):
            for a, b in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(a), b)
                loss.backward()
                optimizer.step()
    print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
