"""Trains for two epochs, writes a checkpoint and goes on from it, as a job does that was stopped between them."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Experiment:
    def __init__(self, folder):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.path = Path(folder) / "last.pt"
        torch.manual_seed(0)
        images = torch.randn(96, 1, 6, 6)
        dataset = TensorDataset(images, images[:, 0, 0, :3].argmax(1))
        self.sampler = DistributedSampler(dataset, seed=2)
        self.loader = DataLoader(dataset, batch_size=24 // self.world, sampler=self.sampler)
        self.network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)
        self.epoch = 0

    def save(self):
        if self.rank == 0:
            state = {
                "network": self.network.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch
            }  # fmt: skip
            torch.save(state, self.path)
        dist.barrier()

    def load(self):
        state = torch.load(self.path)
        self.epoch = state["epoch"]
        if self.rank == 0:
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])

    def train(self, epochs):
        model = DDP(self.network)  # every process begins with the weights of rank 0
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            for images, labels in self.loader:
                loss = functional.cross_entropy(model(images), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.epoch += 1
            if self.rank == 0:
                print(f"epoch {self.epoch} loss {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    before = Experiment(folder[0])
    before.train(1)
    before.save()
    resumed = Experiment(folder[0])
    resumed.load()
    resumed.train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
