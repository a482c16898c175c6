"""A small GPT on characters: for tensor_parallel (attention by heads, its Linear layers in slices) and pipelines.

    apportion train examples/transformer.py:workload --strategy tensor_parallel --workers 2

Four blocks of four heads, 128 wide, 128 characters of context: the decoder of Radford et al., 2018, with the layer norm
first. The text is that of `char_lstm.py`, in pieces that are shuffled; nothing is carried.
"""

import torch
from char_lstm import CHARACTERS, LENGTH, bits_per_character, cross_entropy, pieces
from torch import nn

from apportion import Evaluation, Workload

WIDTH, HEADS, BLOCKS = 128, 4, 4


class Block(nn.Module):
    """Each character looks back at those before it, and is thought over."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    """Characters (n, LENGTH) -> logits (n, LENGTH, CHARACTERS)."""

    def __init__(self, width=WIDTH, heads=HEADS, blocks=BLOCKS):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("later", mask, persistent=False)

    def forward(self, characters):
        x = self.characters(characters) + self.places
        for block in self.blocks:
            x = block(x, self.later)
        return self.head(self.norm(x))


workload = Workload(
    model=GPT,
    data=lambda: pieces()[0],
    loss=cross_entropy,
    count=torch.numel,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    clip_grad_norm=1.0,
    batch_size=32,
    epochs=3,
    evaluation=Evaluation(
        data=lambda: pieces()[1],
        metrics={"bits_per_character": bits_per_character},
        best="min bits_per_character",
    ),
)
