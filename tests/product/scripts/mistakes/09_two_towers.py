"""Two towers, images and texts, trained with a contrastive loss over the features of all processes."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_tower = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))
        self.word_embedding = nn.EmbeddingBag(50, 32)
        self.text_projection = nn.Linear(32, 16)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, words):
        image_features = functional.normalize(self.image_tower(images), dim=-1)
        text_features = functional.normalize(self.text_projection(self.word_embedding(words)), dim=-1)
        return image_features, text_features, self.log_scale.exp()


def gather_features(features):
    gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, features)
    gathered[dist.get_rank()] = features  # this process's own features have a gradient
    return torch.cat(gathered)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    words = torch.randint(0, 50, (120, 5))
    images = torch.randn(50, 24)[words].mean(1) + 0.1 * torch.randn(120, 24)
    dataset = TensorDataset(images, words)
    sampler = DistributedSampler(dataset, seed=5)
    loader = DataLoader(dataset, batch_size=24 // world, sampler=sampler)
    model = DDP(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, words in loader:
            image_features, text_features, scale = model(images, words)
            image_features, text_features = gather_features(image_features), gather_features(text_features)
            logits = scale * image_features @ text_features.T
            targets = torch.arange(len(logits))
            loss = (functional.cross_entropy(logits, targets) + functional.cross_entropy(logits.T, targets)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
