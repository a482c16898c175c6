"""A language model of characters: an LSTM, truncated back-propagation through time, the state carried along.

    apportion train examples/char_rnn.py:workload

Row b of every batch walks through its own stretch of the text, and its recurrent state follows it. The text is
Shakespeare where ~/.cache/apportion/data/text/tinyshakespeare/input.txt (or the same below $APPORTION_DATA) is there,
and otherwise the reference of the Python language that every Python carries along. After 3 epochs the test takes 2.35
bits a character of Shakespeare, or 1.95 of the Python reference.
"""

import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload

CHARACTERS, HIDDEN, LAYERS, LENGTH = 128, 256, 1, 64


class LanguageModel(nn.Module):
    """Characters (n, T), and the state that they begin in -> logits (n, CHARACTERS, T), the state that they end in."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)
        self.head = nn.Linear(HIDDEN, CHARACTERS)

    def forward(self, characters, state):
        x, state = self.lstm(self.embedding(characters), state)
        return self.head(x).transpose(1, 2), state


def no_memory(rows):
    """(h, c), each (LAYERS, rows, HIDDEN)."""
    return torch.zeros(LAYERS, rows, HIDDEN), torch.zeros(LAYERS, rows, HIDDEN)


def text():
    """About 0.4 million characters, or the 1.1 million of Shakespeare."""
    root = os.environ.get("APPORTION_DATA") or Path.home() / ".cache" / "apportion" / "data"
    shakespeare = Path(root) / "text" / "tinyshakespeare" / "input.txt"
    if shakespeare.is_file():
        return shakespeare.read_text()
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def pieces():
    """(training, test): pieces of LENGTH characters in the order of the text, each with the characters one further
    on; the last tenth is the test."""
    characters = torch.tensor(list(text().encode("ascii", "replace")))
    n = (len(characters) - 1) // LENGTH
    whole = [characters[shift : n * LENGTH + shift].view(n, LENGTH) for shift in (0, 1)]
    cut = n * 9 // 10
    return TensorDataset(*(x[:cut] for x in whole)), TensorDataset(*(x[cut:] for x in whole))


def bits_per_character(logits, characters):
    return nn.functional.cross_entropy(logits, characters) / math.log(2)


workload = Workload(
    model=LanguageModel,
    data=lambda: pieces()[0],
    loss=nn.functional.cross_entropy,
    count=torch.numel,  # every character is a term of the loss
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    clip_grad_norm=1.0,
    order="sequential",
    carry=no_memory,
    batch_size=32,
    epochs=3,
    evaluation=Evaluation(
        data=lambda: pieces()[1],
        metrics={"bits_per_character": bits_per_character},
        best="min bits_per_character",
    ),
)
