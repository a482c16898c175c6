"""A language model of characters with four LSTM layers, their state carried along: for wavefront_parallel.

    apportion train examples/char_lstm.py:workload --strategy wavefront_parallel --workers 2

Row b of every batch walks through its own stretch of the text, and the states of all four layers follow it. The text is
Shakespeare where ~/.cache/apportion/data/text/tinyshakespeare/input.txt (or the same below $APPORTION_DATA) is there,
and otherwise made: words of a made-up language, drawn from a grammar of 200 words.
"""

import math
import os
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload

CHARACTERS, HIDDEN, LAYERS, LENGTH = 128, 256, 4, 128


class LanguageModel(nn.Module):
    """Characters (n, T), and the state that they begin in -> logits (n, T, CHARACTERS), the state that they end in."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)
        self.head = nn.Linear(HIDDEN, CHARACTERS)

    def forward(self, characters, state):
        x, state = self.lstm(self.embedding(characters), state)
        return self.head(x), state


def no_memory(rows):
    """(h, c), each (LAYERS, rows, HIDDEN)."""
    return torch.zeros(LAYERS, rows, HIDDEN), torch.zeros(LAYERS, rows, HIDDEN)


def text():
    """The 1.1 million characters of Shakespeare, or 0.4 million that are made up."""
    root = os.environ.get("APPORTION_DATA") or Path.home() / ".cache" / "apportion" / "data"
    shakespeare = Path(root) / "text" / "tinyshakespeare" / "input.txt"
    return shakespeare.read_text() if shakespeare.is_file() else made_up()


def made_up():
    """Each word is followed by one of three that are its own."""
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghijklmnoprstuvw", k=draws.randint(2, 8))) for _ in range(200)]
    follow = {word: draws.sample(words, 3) for word in words}
    told = [words[0]]
    for _ in range(65_000):
        told.append(draws.choice(follow[told[-1]]))
    return " ".join(told)


def pieces():
    """(training, test): pieces of LENGTH characters in the order of the text, each with the characters one further
    on; the last tenth is the test."""
    characters = torch.tensor(list(text().encode("ascii", "replace")))
    n = (len(characters) - 1) // LENGTH
    whole = [characters[shift : n * LENGTH + shift].view(n, LENGTH) for shift in (0, 1)]
    cut = n * 9 // 10
    return TensorDataset(*(x[:cut] for x in whole)), TensorDataset(*(x[cut:] for x in whole))


def cross_entropy(logits, characters):
    return nn.functional.cross_entropy(logits.flatten(0, 1), characters.flatten())


def bits_per_character(logits, characters):
    return cross_entropy(logits, characters) / math.log(2)


workload = Workload(
    model=LanguageModel,
    data=lambda: pieces()[0],
    loss=cross_entropy,
    count=torch.numel,  # every character is a term of the loss
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
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
