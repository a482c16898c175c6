"""A pipeline whose stages have three layers each, with clipping of the gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def layers():
    return [
        nn.Sequential(nn.Linear(10, 32), nn.Tanh()),
        nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
        nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)),
        nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
        nn.Sequential(nn.Linear(32, 16), nn.Tanh()),
        nn.Linear(16, 1),
    ]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(96, 10)
    targets = 2 * torch.sin(inputs[:, :2]).sum(1, keepdim=True)
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True, generator=order)

    every_layer = layers()
    share = len(every_layer) // world
    module = nn.Sequential(*every_layer[rank * share : (rank + 1) * share])
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    first, last = rank == 0, rank == world - 1

    for epoch in range(2):
        for batch, target in loader:
            losses = []
            optimizer.zero_grad()
            schedule.step(*([batch] if first else []), target=target if last else None, losses=losses)
            square = sum(parameter.grad.square().sum() for parameter in module.parameters())
            dist.all_reduce(square)
            nn.utils.clip_grads_with_norm_(module.parameters(), 0.5, square.sqrt())
            optimizer.step()
        if last:
            print(f"epoch {epoch} loss {torch.stack(losses).mean().item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
