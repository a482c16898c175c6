"""The number of loss terms: a default that is wrong is found before the first step, or is right."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import apportion


def digits_like(label: int, rows: int = 1500, rare: int = 10) -> TensorDataset:
    """Rows of ten inputs and three classes, of which a few have another label."""
    inputs = torch.randn(rows, 10, generator=torch.Generator().manual_seed(1))
    labels = inputs[:, :3].argmax(1)
    labels[torch.randperm(rows, generator=torch.Generator().manual_seed(4))[:rare]] = label
    return TensorDataset(inputs, labels)


def classifier(label: int, loss: Callable[..., Any], **changes: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)),
        "data": lambda: digits_like(label),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "batch_size": 50,
        "epochs": 3,
        "precision": "float64",
    }
    return apportion.Workload(**{**given, **changes})


HEAVY = torch.tensor([1, 1, 1, 40], dtype=torch.float64)
VISIBLE: dict[str, tuple[int, Any]] = {
    "ignored labels": (-100, nn.functional.cross_entropy),
    "a heavy class": (3, nn.CrossEntropyLoss(weight=HEAVY)),
    "a heavy class, smoothed": (3, nn.CrossEntropyLoss(weight=HEAVY, label_smoothing=0.1)),
    "another label ignored": (3, functools.partial(nn.functional.cross_entropy, ignore_index=3)),
    "logarithms": (3, nn.NLLLoss(weight=HEAVY)),
}
"""The value of ten labels, and a loss whose mean does not divide by the rows."""


def described(run_dir: Path) -> str:
    return str(json.loads((run_dir / "run.json").read_text())["count"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", VISIBLE)
def test_what_the_mean_divides_by_is_derived_from_a_loss_of_torch(
    name: str, trained: Any, furthest: Any, tmp_path: Path
) -> None:
    label, loss = VISIBLE[name]
    layers = [nn.LogSoftmax(1)] if name == "logarithms" else []
    workload = classifier(
        label, loss, model=lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4), *layers)
    )
    for strategy in ("data_parallel", "map_reduce"):
        assert furthest(trained(workload), trained(workload, strategy, 2)) < 1e-9
    assert described(tmp_path / "run1").startswith("derived from the loss: ")


def test_a_row_in_150_that_is_ignored_does_not_weigh(trained: Any, furthest: Any, tmp_path: Path) -> None:
    workload = classifier(-100, nn.functional.cross_entropy, epochs=1)
    assert furthest(trained(workload), trained(workload, "data_parallel", 2)) < 1e-9
    assert described(tmp_path / "run1") == "derived from the loss: labels other than -100"


@pytest.mark.thorough
def test_a_count_that_is_given_is_obeyed(trained: Any, furthest: Any, tmp_path: Path) -> None:
    workload = classifier(
        -100,
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
        count=lambda targets: float((targets != -100).sum()),
    )
    assert furthest(trained(workload), trained(workload, "data_parallel", 2)) < 1e-9
    assert described(tmp_path / "run1") == "as count= says"


@pytest.mark.thorough
def test_an_explicit_mean_over_examples_trains_as_one_device(trained: Any, furthest: Any) -> None:
    workload = classifier(3, lambda outputs, targets: nn.functional.cross_entropy(outputs, targets))
    assert furthest(trained(workload), trained(workload, "data_parallel", 2)) < 1e-9


class Speaker(nn.Module):
    """A network that computes its loss by itself, over the next words, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.back = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.back(self.words(input_ids).cumsum(1))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def gpt2(kind: str = "GPT2LMHeadModel") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    tokens: dict[str, Any] = {"vocab_size": 12, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout"), 0.0)
    config = transformers.GPT2Config(
        n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=12, **tokens, **no_dropout
    )
    return getattr(transformers, kind)(config)  # type: ignore[no-any-return]


def tagger() -> nn.Module:
    return gpt2("GPT2ForTokenClassification")


def translator() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 0}
    config = transformers.T5Config(
        vocab_size=12, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, **tokens
    )
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


class Sentence(nn.Module):
    """A network of one's own around one of transformers, which gives the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.speaker = gpt2()

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.speaker(**inputs).loss  # type: ignore[no-any-return]


def in_place() -> nn.Module:
    """A network of transformers that holds each place against its own label, and not against the next."""
    transformers = pytest.importorskip("transformers")

    class InPlace(transformers.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = super().forward(input_ids).logits
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    return InPlace(gpt2().config)


class Texts(Dataset[Any]):
    """Sentences of six words, of which in one of 500 three are left out of the loss."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(1, 12, (6,), generator=torch.Generator().manual_seed(index))
        labels = words.clone()
        if index == 333:
            labels[2:5] = -100
        return {"input_ids": words, "labels": labels}, labels


def texts(model: Callable[[], nn.Module], **changes: Any) -> apportion.Workload:
    given = {"loss": lambda outputs, labels: outputs["loss"], **changes}
    return classifier(0, model=model, data=Texts, batch_size=20, epochs=1, **given)


@pytest.mark.thorough
def test_a_wrong_count_of_a_loss_that_the_model_computes_is_refused_with_the_line_which_is_right(
    trained: Any, furthest: Any
) -> None:
    line = "count=lambda targets: float((targets[:, 1:] != -100).sum())"
    with pytest.raises(apportion.Disproved, match=re.escape(line)):
        trained(texts(Speaker), "data_parallel", 2)
    mended = texts(Speaker, count=lambda labels: float((labels[:, 1:] != -100).sum()))
    assert furthest(trained(mended), trained(mended, "data_parallel", 2)) < 1e-9


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "the next word": (
        gpt2,
        lambda outputs, labels: outputs.loss,
        "labels other than -100, from the second place on, as GPT2LMHeadModel computes it",
    ),
    "tags": (
        tagger,
        lambda outputs, labels: outputs["loss"],
        "labels other than -100, as GPT2ForTokenClassification computes it",
    ),
    "a translation": (
        translator,
        lambda outputs, labels: outputs[0],
        "labels other than -100, as T5ForConditionalGeneration computes it",
    ),
    "within a network of one's own": (
        Sentence,
        lambda outputs, labels: outputs,
        "labels other than -100, from the second place on, as GPT2LMHeadModel computes it",
    ),
}
"""A network of transformers that computes its loss, the loss that takes it, and how the derived count is described."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_the_loss_of_a_network_of_transformers_divides_by_is_derived(
    name: str, trained: Any, furthest: Any, tmp_path: Path
) -> None:
    model, loss, said = MODELS[name]
    workload = texts(model, loss=loss)
    # These networks compute their loss in float32, whatever the precision.
    assert furthest(trained(workload), trained(workload, "data_parallel", 2)) < 1e-6
    assert described(tmp_path / "run1") == f"derived from the loss: {said}"


@pytest.mark.slow
def test_a_network_of_transformers_whose_loss_is_another_is_refused_with_the_line(trained: Any) -> None:
    line = "count=lambda targets: float((targets != -100).sum())"
    with pytest.raises(apportion.Disproved, match=re.escape(line)):
        trained(texts(in_place), "data_parallel", 2)


WRONG_COUNTS: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda targets: None, "count=<lambda> returned None"),
    "a text": (lambda targets: "all", "count=<lambda> returned 'all'"),
    "one a row": (lambda targets: (targets != -100).float(), "count=<lambda> returned tensor"),
    "not a number": (lambda targets: 0.0 * float("inf"), "count=<lambda> returned nan"),
    "below 0": (lambda targets: -float(len(targets)), "count=<lambda> returned -"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_what_a_count_returns_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    count, says = WRONG_COUNTS[name]
    workload = classifier(1, nn.functional.cross_entropy, count=count)
    two, seen = apportion.local(workers=2), list[apportion.Event]()
    events = apportion.run(workload, "data_parallel", launcher=two, run_dir=tmp_path / "run", check=False)
    with pytest.raises(ValueError, match=re.escape(says)):
        seen.extend(events)
    assert "step" not in {event.kind for event in seen}


@pytest.mark.parametrize("count", [nn.functional.cross_entropy, lambda outputs, targets: 1.0, lambda: 1.0])
def test_a_count_that_does_not_take_the_targets_alone_is_refused(count: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="must be a function of the targets alone"):
        classifier(1, nn.functional.cross_entropy, count=count)


@pytest.mark.parametrize("given", [5, None, "Linear", (5,)])
@pytest.mark.parametrize("field", ["per_rank_draws", "caches"])
def test_what_is_no_collection_of_names_is_refused(field: str, given: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}={re.escape(repr(given))} must be"):
        classifier(1, nn.functional.cross_entropy, **{field: given})
