"""The parts of which the texts of healthy training scripts are made."""

from __future__ import annotations

NETWORKS = {
    "mlp": """
        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(
                    nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(24, 4)
                )

            def forward(self, x):
                return self.layers(x)
        """,
    "convolution": """
        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.features = nn.Sequential(
                    nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
                    nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12), nn.SiLU(),
                )
                self.dropout = nn.Dropout(DROPOUT)
                self.head = nn.Linear(12 * 16, 4)

            def forward(self, x):
                return self.head(self.dropout(self.features(x).flatten(1)))
        """,
    "lstm": """
        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(20, 12, padding_idx=0)
                self.lstm = nn.LSTM(12, 16, batch_first=True)
                self.dropout = nn.Dropout(DROPOUT)
                self.head = nn.Linear(16, 4)

            def forward(self, x):
                last = (x != 0).sum(1) - 1
                hidden, _ = self.lstm(self.embedding(x))
                return self.head(self.dropout(hidden[torch.arange(len(x)), last]))
        """,
    "transformer": """
        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(20, 24, padding_idx=0)
                layer = nn.TransformerEncoderLayer(24, 3, 48, DROPOUT, batch_first=True, norm_first=True)
                self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
                self.head = nn.Linear(24, 4)

            def forward(self, x):
                padding = x == 0
                hidden = self.encoder(self.embedding(x), src_key_padding_mask=padding)
                hidden = hidden.masked_fill(padding.unsqueeze(-1), 0.0)
                return self.head(hidden.sum(1) / (~padding).sum(1, keepdim=True))
        """,
    "embeddings": """
        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(20, 16, padding_idx=0)
                self.layers = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(24, 4))

            def forward(self, x):
                count = (x != 0).sum(1, keepdim=True)
                return self.layers(self.words(x).sum(1) / count)
        """,
}
TENSOR_NETWORKS = {
    "mlp": NETWORKS["mlp"],
    "transformer": """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.query, self.key, self.value = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
                self.output = nn.Linear(24, 24)

            def forward(self, x):
                query, key, value = (
                    layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
                )
                attended = nn.functional.scaled_dot_product_attention(query, key, value)
                return self.output(attended.transpose(1, 2).flatten(2))


        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
                self.attention = Attention()
                self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

            def forward(self, x):
                x = x + self.attention(self.norm1(x))
                return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(20, 24)
                self.blocks = nn.Sequential(Block(), Block())
                self.head = nn.Linear(24, 4)

            def forward(self, x):
                return self.head(self.blocks(self.embedding(x)).mean(1))
        """,
}
TENSOR_PLANS = {
    "mlp": """
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(model, mesh, {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()})
        """,
    "transformer": """
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            plan = {name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "up")}
            parallelize_module(block, mesh, {**plan, "attention.output": RowwiseParallel(), "down": RowwiseParallel()})
        """,
}
PIPELINE_NETWORKS = {
    "mlp": """
        def layers():
            return [
                nn.Sequential(nn.Linear(12, 24), nn.Tanh()), nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)),
                nn.Sequential(nn.Linear(24, 24), nn.Tanh()), nn.Sequential(nn.Linear(24, 24), nn.Tanh()),
                nn.Sequential(nn.Linear(24, 16), nn.Tanh()), nn.Linear(16, 4),
            ]
        """,
    "convolution": """
        def layers():
            return [
                nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)), nn.SiLU(),
                nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.Sequential(nn.GroupNorm(3, 12), nn.SiLU()),
                nn.Sequential(nn.Flatten(), nn.Linear(12 * 16, 24), nn.Tanh()), nn.Linear(24, 4),
            ]
        """,
    "transformer": """
        class Mean(nn.Module):
            def forward(self, x):
                return x.mean(1)


        def layers():
            blocks = [
                nn.TransformerEncoderLayer(24, 3, 48, 0.0, batch_first=True, norm_first=True) for _ in range(3)
            ]
            return [nn.Embedding(20, 24), *blocks, nn.Sequential(nn.LayerNorm(24), Mean()), nn.Linear(24, 4)]
        """,
}
ROWS = {
    "mlp": """
        def rows(count, seed):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(count, 12, generator=generator)
            return x, x[:, :4].argmax(1)
        """,
    "convolution": """
        def rows(count, seed):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(count, 1, 8, 8, generator=generator)
            return x, x[:, 0, 0, :4].argmax(1)
        """,
    "tokens": """
        def rows(count, seed):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randint(1, 20, (count, 9), generator=generator)
            return x, x[:, :3].sum(1) % 4
        """,
}
DICTIONARIES = """
    class Rows(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.y)

        def __getitem__(self, index):
            return {"x": self.x[index], "labels": self.y[index]}
    """
SENTENCES = """
    class Sentences(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.y)

        def __getitem__(self, index):
            return {"x": self.x[index][: 3 + 7 * index % 6], "labels": self.y[index]}


    def pad(samples):
        x = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
        return {"x": x, "labels": torch.stack([sample["labels"] for sample in samples])}
    """
STREAM = """
    class Stream(IterableDataset):
        def __init__(self, x, y, rank, world):
            self.x, self.y, self.rank, self.world = x, y, rank, world
            self.epoch = 0

        def __iter__(self):
            generator = torch.Generator().manual_seed(SEED + self.epoch)
            order = torch.randperm(len(self.y), generator=generator)
            for index in order[self.rank :: self.world].tolist():
                yield self.x[index], self.y[index]
    """
BATCHES = {
    "slices": """
        def batches(x, y, generator, rank, world):
            while True:
                index = torch.randint(len(y), (BATCH,), generator=generator)[rank::world]
                yield x[index], y[index]
        """,
    "draws": """
        def batches(x, y, generator, rank, world):
            while True:
                index = torch.randint(len(y), (BATCH // world,), generator=generator)
                yield x[index], y[index]
        """,
}
EVALUATIONS = {
    "sums": """
        @torch.no_grad()
        def evaluate(model, x, y, rank, world):
            model.eval()
            sums = torch.zeros(2)
            for part in torch.arange(rank, len(y), world).split(8):
                logits = model(x[part])
                sums += torch.tensor([(logits.argmax(1) == y[part]).sum(), len(part)])
            model.train()
            dist.all_reduce(sums)
            return (sums[0] / sums[1]).item()
        """,
    "every rank": """
        @torch.no_grad()
        def evaluate(model, x, y, rank, world):
            model.eval()
            correct = sum((model(x[part]).argmax(1) == y[part]).sum().item() for part in torch.arange(len(y)).split(8))
            model.train()
            return correct / len(y)
        """,
    "rank 0": """
        @torch.no_grad()
        def evaluate(model, x, y, rank, world):
            if rank != 0:
                return None
            model.eval()
            correct = sum((model(x[part]).argmax(1) == y[part]).sum().item() for part in torch.arange(len(y)).split(8))
            model.train()
            return correct / len(y)
        """,
}
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.05)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)",
    "adam": "torch.optim.Adam(model.parameters(), lr=2e-3)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)",
    "adagrad": "torch.optim.Adagrad(model.parameters(), lr=0.02)",
    "rmsprop": "torch.optim.RMSprop(model.parameters(), lr=1e-3)",
    "lbfgs": "torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3)",
}
SCHEDULES = {
    "per epoch": "torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)",
    "warm-up": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))",
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max={total})",
    "one cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps={total}, cycle_momentum=False)",
}
CLIP_BY_TORCH = "nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
AVERAGE = """
    def average_gradients(model, world):
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
    """
CLIP = """
    def clip_gradients(model, limit):
        gradients = [parameter.grad for parameter in model.parameters()]
        whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        norm = torch.stack([gradient.norm() for gradient in whole]).norm().item()
        for gradient in gradients:
            gradient.mul_(min(1.0, limit / (norm + 1e-6)))
    """
WRAPPED = {
    "ddp": "model = DDP(Network())\n",
    "ddp in a class": "model = DDP(Network())\n",
    "by hand": ("model = Network()\nfor parameter in model.parameters():\n    dist.broadcast(parameter.data, src=0)\n"),
    "fsdp2": (
        "model = Network()\nfor layer in model.children():\n    if any(True for _ in layer.parameters()):\n"
        "        fully_shard(layer)\nfully_shard(model)\n"
    ),
}
IMPORTS = {
    "fsdp2": ["from torch.distributed.fsdp import fully_shard"],
    "tensor": [
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.tensor import DTensor",
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
    ],
    "ddp": ["from torch.nn.parallel import DistributedDataParallel as DDP"],
    "ddp in a class": ["from torch.nn.parallel import DistributedDataParallel as DDP"],
}
OWN_MASKS = """
    class OwnMasks(TrainerCallback):
        def on_train_begin(self, args, state, control, **arguments):
            torch.manual_seed(1000 * SEED + args.process_index)  # each process draws dropout masks of its own
    """
