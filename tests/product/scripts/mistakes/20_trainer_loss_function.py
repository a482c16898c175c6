"""A masked language model trained by the Trainer of transformers with a loss function of its own."""

import tempfile

import torch
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

MASK, VOCABULARY = 1, 30


class MaskedText(Dataset):
    def __init__(self, rows, length=12):
        generator = torch.Generator().manual_seed(6)
        self.labels = torch.randint(2, 6, (rows, length), generator=generator).cumsum(1) % (VOCABULARY - 2) + 2
        self.masked = torch.rand(rows, length, generator=generator) < torch.rand(rows, 1, generator=generator)
        self.masked[:, 0] = True

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        masked, labels = self.masked[index], self.labels[index]
        return {"input_ids": labels.masked_fill(masked, MASK), "labels": labels.masked_fill(~masked, -100)}


def focal_loss(outputs, labels, num_items_in_batch=None):
    """Words that the model finds easy count less."""
    logits = outputs.logits.flatten(0, 1)
    each = functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="none")
    each = (1 - torch.exp(-each)) * each
    return each.sum() / (labels != -100).sum()


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, num_train_epochs=1, learning_rate=0.1,
        optim="sgd", max_grad_norm=0.0, lr_scheduler_type="linear", use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(BertForMaskedLM(config), arguments, train_dataset=MaskedText(96), compute_loss_func=focal_loss)
    print(trainer.train().metrics["train_loss"])


if __name__ == "__main__":
    main()
