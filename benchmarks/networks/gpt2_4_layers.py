"""A GPT-2 of 4 layers on tokens that are made, for `proofs.py`: 128 wide, 4 heads, 64 tokens, a batch of 32."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from apportion import Workload

VOCABULARY, TOKENS = 512, 64


class Logits(nn.Module):
    """The logits alone, of tokens (N, TOKENS)."""

    def __init__(self):
        super().__init__()
        config = GPT2Config(n_layer=4, n_head=4, n_embd=128, n_positions=TOKENS, vocab_size=VOCABULARY)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        config.bos_token_id = config.eos_token_id = 0
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, tokens):
        return self.gpt2(tokens).logits


def tokens():
    made = torch.randint(VOCABULARY, (2048, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(made[:, :-1], made[:, 1:])


def loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


workload = Workload(
    model=Logits,
    data=tokens,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
    batch_size=32,
    steps=200,
)
