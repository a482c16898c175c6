"""A convolutional network trained with accelerate, with a linear warm-up and decay of the learning rate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU()
        )
        self.classifier = nn.Linear(32, 3)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def linear_schedule(optimizer, warmup_steps, training_steps):
    def factor(step):
        if step < warmup_steps:
            return step / warmup_steps
        return max(0.0, (training_steps - step) / (training_steps - warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    images = torch.randn(96, 3, 8, 8)
    labels = images.mean((2, 3)).argmax(1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16 // accelerator.num_processes, shuffle=True)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = EPOCHS * len(loader)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = accelerator.prepare(linear_schedule(optimizer, steps // 6, steps))
    for epoch in range(EPOCHS):
        for batch, target in loader:
            loss = functional.cross_entropy(model(batch), target)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f} rate {schedule.get_last_lr()[0]:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
