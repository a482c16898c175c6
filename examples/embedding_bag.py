"""Texts as bags of words, 20 topics: an embedding whose gradient is sparse. `embedding_bag_plain.py` is the same
training in plain torch.

    apportion train examples/embedding_bag.py:workload --strategy hogwild --workers 2

The texts are made: each topic has words of its own among 20,000, and a text of 40 words has two fifths of them from its
topic. A step looks at 2,560 words, and its update touches the rows of those alone. Test accuracy 0.99 after 3 epochs.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload

WORDS, TOPICS, LENGTH, OWN = 20_000, 20, 40, 200


def network():
    return nn.Sequential(nn.EmbeddingBag(WORDS, 32, mode="sum", sparse=True), nn.Linear(32, TOPICS))


def texts(n, seed):
    """x (n, 40) words, y (n,) topics."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.randint(0, TOPICS, (n,), generator=draws)
    own = torch.randint(0, OWN, (n, LENGTH), generator=draws) + OWN * y[:, None]
    any_word = torch.randint(0, WORDS, (n, LENGTH), generator=draws)
    return torch.where(torch.rand(n, LENGTH, generator=draws) < 0.4, own, any_word), y


workload = Workload(
    model=network,
    data=lambda: TensorDataset(*texts(20_000, seed=0)),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=2.0),
    batch_size=64,
    epochs=3,
    evaluation=Evaluation(data=lambda: TensorDataset(*texts(2_000, seed=1)), batch_size=500),
)
