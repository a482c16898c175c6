"""accelerate: its loaders, accumulation, clipping, schedule, and evaluation."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--dispatch", action="store_true")
p.add_argument("--split", action="store_true")
p.add_argument("--accum", type=int, default=1)
p.add_argument("--bf16", action="store_true")
a = p.parse_args()


def main():
    acc = Accelerator(
        cpu=True,
        gradient_accumulation_steps=a.accum,
        mixed_precision="bf16" if a.bf16 else "no",
        dataloader_config=DataLoaderConfiguration(dispatch_batches=a.dispatch or None, split_batches=a.split),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(66, 6, generator=g)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    val = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
    model, opt, loader, val, sched = acc.prepare(model, opt, loader, val, sched)
    for _epoch in range(2):
        model.train()
        for x, y in loader:
            with acc.accumulate(model):
                loss = F.mse_loss(model(x), y)
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        model.eval()
        tot = 0
        for x, y in val:
            with torch.no_grad():
                out = model(x)
            o, t = acc.gather_for_metrics((out, y))
            tot += ((o - t) ** 2).sum().item()
        acc.print(tot)


if __name__ == "__main__":
    main()
