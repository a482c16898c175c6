"""An autoencoder whose learning rate is lowered where the loss does not fall any more."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.ELU(), nn.Linear(24, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ELU(), nn.Linear(24, 16))

    def forward(self, rows):
        return self.decoder(self.encoder(rows))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(96, 4) @ torch.randn(4, 16) + 0.5 * torch.randn(96, 16)
    dataset = TensorDataset(rows)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8 // world, sampler=sampler)
    model = DDP(Autoencoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            loss = functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss = loss.detach()
            plateau.step(loss)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} rate {optimizer.param_groups[0]['lr']:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
