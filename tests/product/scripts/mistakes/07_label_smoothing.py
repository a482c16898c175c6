"""A transformer that tags the words of sentences of unequal length, with label smoothing."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, TAGS, PAD = 40, 5, 0


class Sentences(Dataset):
    def __init__(self, rows):
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randint(3, 15, (rows,), generator=generator).tolist()
        self.rows = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.rows[index] % TAGS


def collate(rows):
    words, tags = zip(*rows, strict=True)
    return (
        nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PAD),
        nn.utils.rnn.pad_sequence(tags, batch_first=True, padding_value=-100),
    )


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, TAGS)

    def forward(self, words):
        return self.head(self.encoder(self.embedding(words), src_key_padding_mask=words == PAD))


def smoothed_loss(logits, tags):
    return functional.cross_entropy(logits.flatten(0, 1), tags.flatten(), label_smoothing=0.1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = Sentences(96)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16 // world, sampler=sampler, collate_fn=collate)
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for words, tags in loader:
            loss = smoothed_loss(model(words), tags)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
