"""Trains a small language model on random windows of one long text, with accumulation, warm-up and a cosine decay."""

import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, accumulation = 12, 6, 4
learning_rate, warmup, max_iters, grad_clip = 3e-3, 2, 8, 1.0
vocabulary, width = 30, 32

dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1337 + rank)
text = torch.randint(0, vocabulary, (4000,), generator=torch.Generator().manual_seed(0)).cumsum(0) % vocabulary
assert accumulation % world_size == 0
accumulation //= world_size


def get_batch():
    offsets = torch.randint(len(text) - block_size, (batch_size,))
    x = torch.stack([text[i : i + block_size] for i in offsets])
    y = torch.stack([text[i + 1 : i + 1 + block_size] for i in offsets])
    return x, y


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    return learning_rate * 0.5 * (1 + math.cos(math.pi * (it - warmup) / (max_iters - warmup)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], dtype=x.dtype)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        x = x + functional.gelu(self.mlp(self.norm(x)))
        return functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


model = DDP(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
X, Y = get_batch()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for micro_step in range(accumulation):
        synchronizes = micro_step == 0
        with nullcontext() if synchronizes else model.no_sync():
            loss = model(X, Y) / accumulation
            X, Y = get_batch()
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"iter {it}: loss {loss.item() * accumulation:.4f}")
dist.destroy_process_group()
