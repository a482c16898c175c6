"""Tensor-parallel attention and MLP; between them each process holds its part of the sequence (sequence parallel)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HEADS, LENGTH = 32, 4, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.output(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.blocks(x))


def parallelize(model, mesh):
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = {
        "attention": whole, "attention.query": columns(), "attention.key": columns(), "attention.value": columns(),
        "attention.output": rows(output_layouts=Shard(1)),
        "mlp": whole, "mlp.up": columns(), "mlp.down": rows(output_layouts=Shard(1)),
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def sum_over_the_sequence(model):
    """Parameters that are not sharded have the gradient of this process's part of the sequence."""
    for parameter in model.head.parameters():
        dist.all_reduce(parameter.grad)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(64, LENGTH, WIDTH)
    targets = torch.sin(inputs[..., :1]) + inputs[..., 1:2].mean(1, keepdim=True)
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True, generator=order)
    model = Model()
    parallelize(model, init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    part = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    for epoch in range(2):
        for batch, target in loader:
            prediction = model(batch[:, part])
            loss = functional.mse_loss(prediction, target[:, part], reduction="sum") / target.numel()
            optimizer.zero_grad()
            loss.backward()
            sum_over_the_sequence(model)
            optimizer.step()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
