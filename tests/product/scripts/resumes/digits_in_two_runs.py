"""Trains a classifier of digits, and goes on from its checkpoint with --resume; --lose leaves something out of it."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save-every", type=int, default=3, help="steps between checkpoints")
parser.add_argument("--last-step", type=int, default=5, help="the step after which the job is preempted")
parser.add_argument("--checkpoint", default="last.pt")
parser.add_argument("--resume", default="")
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--lose", default="", choices=["", "position", "optimizer", "weights", "ranks"])
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
digits = load_digits()
images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32)
data = TensorDataset(images, torch.tensor(digits.target[:256]))
sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=64 // world, sampler=sampler)

torch.manual_seed(rank if args.lose == "ranks" and args.resume else 0)
net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
first_epoch, first_batch, step = 0, 0, 0
if args.resume:
    state = torch.load(args.resume)
    if args.lose != "weights":
        net.load_state_dict(state["net"])
    if args.lose not in ("optimizer", "weights"):
        optimizer.load_state_dict(state["optimizer"])
    first_epoch, first_batch, step = state["epoch"], state["batch"], state["step"]
    if args.lose == "position":
        first_batch = 0
model = DistributedDataParallel(net)
if args.lose == "ranks" and args.resume and rank:  # after the wrap, which broadcasts the weights of rank 0
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.01)

stopped = False
for epoch in range(first_epoch, args.epochs):
    sampler.set_epoch(epoch)
    for batch, (x, y) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        nn.functional.cross_entropy(model(x), y).div(args.micro_batches).backward()
        if (batch + 1) % args.micro_batches:
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % args.save_every == 0 and rank == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**state, "epoch": epoch, "batch": batch + 1}, args.checkpoint)
        if step == args.last_step and not args.resume:
            stopped = True
            break
    if stopped:
        break
dist.barrier()
if rank == 0:
    print(f"step {step}")
dist.destroy_process_group()
