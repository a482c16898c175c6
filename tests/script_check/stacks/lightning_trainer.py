"""A script of Lightning's Trainer, with a number of devices or without one."""

import argparse

import lightning
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--devices", default="2")
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float)
arguments = parser.parse_args()


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch, number):
        rows, target = batch
        return F.mse_loss(self.net(rows), target)

    def validation_step(self, batch, number):
        rows, target = batch
        self.log("held_out", F.mse_loss(self.net(rows), target), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :2].tanh()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=arguments.devices if arguments.devices == "auto" else int(arguments.devices),
        strategy=arguments.strategy,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=arguments.clip,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
    evaluation = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
    trainer.fit(Regression(), training, evaluation)
