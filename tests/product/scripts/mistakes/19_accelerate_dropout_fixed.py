"""An LSTM with dropout trained with accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Series(Dataset):
    def __init__(self, rows):
        generator = torch.Generator().manual_seed(4)
        self.values = torch.randn(rows, 10, 2, generator=generator).cumsum(1)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {"history": self.values[index, :-1], "next": self.values[index, -1]}


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 24, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(24, 2)

    def forward(self, history):
        return self.head(self.dropout(self.lstm(history)[0][:, -1]))


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0, device_specific=True)
    loader = DataLoader(Series(96), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = functional.mse_loss(model(batch["history"]), batch["next"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
