"""Random batches of each rank's own, accumulated over fewer of them the more ranks there are."""

import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps = 4
batch_size = 3
block_size = 8
max_iters = 6
grad_clip = 1.0
device = "cpu"
vocab = 17
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    seed_offset = 0
    ddp_world_size = 1
torch.manual_seed(1337 + seed_offset)
data = np.arange(500).astype(np.uint16) % vocab


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(s):
        super().__init__()
        s.wte = nn.Embedding(vocab, 16)
        s.wpe = nn.Embedding(block_size, 16)
        s.attn = nn.Linear(16, 48)
        s.head = nn.Linear(16, vocab, bias=False)
        s.drop = nn.Dropout(0.1)
        s.wte.weight = s.head.weight

    def forward(s, idx, targets=None):
        _b, t = idx.size()
        x = s.drop(s.wte(idx) + s.wpe(torch.arange(t)))
        q, k, v = s.attn(x).split(16, -1)
        x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True, dropout_p=0.1)[:, 0]
        logits = s.head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1), ignore_index=-1)


model = GPT()
model = torch.compile(model)
if ddp:
    model = DDP(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", enabled=False)
X, Y = get_batch()
for it in range(max_iters):
    for g in opt.param_groups:
        g["lr"] = 1e-3 * (it + 1) / 6
    for micro in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
