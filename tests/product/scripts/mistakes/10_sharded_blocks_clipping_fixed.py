"""A causal transformer whose blocks are sharded by FSDP2, with clipping of the gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, WIDTH, LENGTH = 32, 32, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions
        mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def clip_gradients(model, limit):
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ids = torch.randint(0, 4, (96, LENGTH + 1)).cumsum(1) % VOCABULARY
    dataset = TensorDataset(ids)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16 // world, sampler=sampler)

    model = Transformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            logits = model(ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            clip_gradients(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
