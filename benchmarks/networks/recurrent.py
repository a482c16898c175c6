"""Character language models of LSTM layers: 65 characters, batches in memory, SGD with momentum (fused)."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Workload

CHARACTERS = 65
BATCHES = 4


class LanguageModel(nn.Module):
    """Characters (n, T) -> logits (n, T, CHARACTERS)."""

    def __init__(self, layers, hidden):
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, CHARACTERS)

    def forward(self, characters):
        x, _ = self.lstm(self.embedding(characters))
        return self.head(x)


def language_model(layers, hidden, length, rows):
    """Of made-up text: no time depends on what it says."""

    def text():
        generator = torch.Generator().manual_seed(0)
        characters = torch.randint(0, CHARACTERS, (BATCHES * rows, length + 1), generator=generator)
        return TensorDataset(characters[:, :-1].contiguous(), characters[:, 1:].contiguous())

    return Workload(
        model=lambda: LanguageModel(layers, hidden),
        data=text,
        loss=lambda logits, characters: nn.functional.cross_entropy(logits.flatten(0, 1), characters.flatten()),
        count=torch.numel,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        batch_size=rows,
    )


lstm_2x256 = language_model(2, 256, 128, 32)
lstm_4x512 = language_model(4, 512, 128, 32)
lstm_8x256 = language_model(8, 256, 128, 16)
lstm_4x1024 = language_model(4, 1024, 64, 64)
