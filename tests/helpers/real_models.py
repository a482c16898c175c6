"""Networks of transformers, peft and torchvision as people train them, in small: with random weights and two layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from networks import EPS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from apportion import Workload

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 32, 10, 16, 4, 2
SIZE, CLASSES = 8, 5
ROWS, BATCH = 13, 6
"""Two ranks then have three rows each, and one and none of the last batch; three ranks have two."""
IGNORED = -100


class Text(Dataset[Any]):
    """Sequences for a language model. ``ignored``: how many of the first labels of each do not count, unevenly."""

    def __init__(self, kind: str) -> None:
        draws = torch.Generator().manual_seed(7)
        self.kind = kind
        self.ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=draws)
        self.targets = torch.randint(3, WORDS, (ROWS, LENGTH), generator=draws)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        ids, labels = self.ids[i], self.ids[i].clone()
        padded = torch.arange(LENGTH) >= LENGTH - (i % 4)
        if self.kind == "translated":
            labels = self.targets[i].clone()
        if self.kind == "masked":
            labels[torch.arange(LENGTH) % 3 != i % 3] = IGNORED
        if self.kind in ("padded", "masked", "translated"):
            ids = ids.masked_fill(padded, 0)
            labels[padded] = IGNORED
            return {"input_ids": ids, "attention_mask": (~padded).long(), "labels": labels}, labels
        return {"input_ids": ids, "labels": labels}, labels


class Unlabelled(Text):
    """The loss is outside the model."""

    def __getitem__(self, i: int) -> Any:
        inputs, labels = super().__getitem__(i)
        return {name: tensor for name, tensor in inputs.items() if name != "labels"}, labels


class Pictures(Dataset[Any]):
    """Pictures and their classes: ``labelled``, where the model computes the loss."""

    def __init__(self, kind: str = "labelled") -> None:
        self.kind = kind
        draws = torch.Generator().manual_seed(7)
        self.pictures = torch.randn(ROWS + 1, 3, SIZE, SIZE, generator=draws)
        self.classes = torch.randint(CLASSES, (ROWS + 1,), generator=draws)

    def __len__(self) -> int:
        return ROWS + (self.kind == "even")  # batch normalisation takes no batch of one row

    def __getitem__(self, i: int) -> Any:
        if self.kind == "labelled":
            return {"pixel_values": self.pictures[i], "labels": self.classes[i]}, self.classes[i]
        return self.pictures[i], self.classes[i]


# Losses, and what their mean divides by


def within(outputs: Any, _: Any) -> Tensor:
    loss: Tensor = outputs.loss
    return loss


def next_word(outputs: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def next_words(labels: Tensor) -> float:
    return float((labels[:, 1:] != IGNORED).sum())


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-3, eps=EPS)


def workload(model: Callable[[], nn.Module], data: Callable[[], Dataset[Any]], **options: Any) -> Workload:
    usual: dict[str, Any] = {"loss": within, "optimizer": adamw, "batch_size": BATCH, "epochs": 1}
    return Workload(model=model, data=data, **{**usual, **options})


# The networks. transformers is imported where one is made.


def gpt2(*, checkpointed: bool = False) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    if checkpointed:
        model.activation_checkpointing_enable()
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=LENGTH,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        llama(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )  # type: ignore[no-any-return]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=24, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_kv=4, d_ff=24, num_layers=LAYERS, num_heads=HEADS,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=24,
            image_size=SIZE, patch_size=4, num_labels=CLASSES,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
            output_router_logits=True, router_aux_loss_coef=0.1, max_position_embeddings=LENGTH,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


class Mixed(nn.Module):
    """One half is compiled, and the other computes in bfloat16 whatever the rest does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, WIDTH), nn.GELU())
        self.compiled = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="aot_eager")
        self.narrow, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        hidden = self.compiled(self.first(pixel_values))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = hidden + self.narrow(hidden).to(hidden.dtype)
        return F.cross_entropy(self.last(hidden), labels)


class VGG(nn.Module):
    """As torchvision's: convolutions, pooling, and wide layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(8 * 4, 20), nn.ReLU(True), nn.Dropout(), nn.Linear(20, 20), nn.ReLU(True), nn.Dropout(),
            nn.Linear(20, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


class BasicBlock(nn.Module):
    """As torchvision's, of ResNet-18 and ResNet-34."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class ResNet(nn.Module):
    """As torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4))
        shortcut = nn.Sequential(nn.Conv2d(4, 8, 1, 2, bias=False), nn.BatchNorm2d(8))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2, shortcut))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x


def itself(outputs: Tensor, _: Any) -> Tensor:
    return outputs


MODELS: dict[str, Workload] = {
    "GPT-2": workload(gpt2, lambda: Text("plain")),
    "GPT-2, gradient checkpointing": workload(lambda: gpt2(checkpointed=True), lambda: Text("plain")),
    "Llama": workload(llama, lambda: Unlabelled("padded"), loss=next_word, count=next_words),
    "Llama with LoRA": workload(lora, lambda: Text("plain")),
    "BERT": workload(bert, lambda: Text("masked")),
    "T5": workload(t5, lambda: Text("translated")),
    "ViT": workload(vit, Pictures),
    "VGG": workload(VGG, lambda: Pictures("plain"), loss=F.cross_entropy),
    "ResNet-18": workload(ResNet, lambda: Pictures("even"), loss=F.cross_entropy),
    "Mixtral with its balancing loss": workload(mixtral, lambda: Text("plain")),
    "a part compiled, a part in bfloat16": workload(Mixed, Pictures, loss=itself),
}
