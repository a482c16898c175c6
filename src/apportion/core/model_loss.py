"""The number of loss terms where the model computes its loss by itself, as the networks of transformers do.

The loss of such a workload takes the model's: ``loss=lambda outputs, labels: outputs.loss``. What its mean divides by
follows from the class of the model, so that it is known once a model has been made; the targets have to be its labels.
"""

from __future__ import annotations

import dis
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from apportion.core.loss_terms import Count, LabelTerms, examples

_HARMLESS = frozenset((
    "RESUME", "NOP", "CACHE", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_CONST", "LOAD_SMALL_INT",
    "STORE_FAST", "STORE_FAST_LOAD_FAST", "POP_TOP", "LOAD_ATTR", "BINARY_SUBSCR", "RETURN_VALUE",
))  # fmt: skip
"""The instructions of a function that reads attributes and entries of its arguments, and does nothing else."""
_CALLS = frozenset(("PUSH_NULL", "LOAD_METHOD", "PRECALL", "CALL"))
_KEEPS = frozenset(("mean", "float", "double", "squeeze", "reshape", "view", "contiguous"))
"""The methods of a loss of one element that leave it what it is."""


class _RecordedLoss:
    """Stands for the loss among the outputs of a model."""

    def __getattr__(self, name: str) -> Callable[..., _RecordedLoss]:
        if name not in _KEEPS:
            raise AttributeError(name)
        return lambda *_: self


class _Outputs:
    """Stands for the outputs of a model, which may be its loss, or have it as an attribute or an entry."""

    def __init__(self) -> None:
        self.loss = _RecordedLoss()

    def __getitem__(self, key: object) -> object:
        if key == "loss" or key == 0:
            return self.loss
        raise KeyError(key)

    def get(self, key: object, _: object = None) -> object:
        """Returns the entry of this name."""
        return self[key]


@dataclass(frozen=True)
class ModelTerms:
    """Stands for the terms of a loss that the model computes, of which a model that has been made tells what they are.
    Called, it counts one a row."""

    def __call__(self, targets: Any) -> float:
        return examples(targets)


@dataclass(frozen=True, eq=False)
class ModelLabelTerms(LabelTerms):
    """Counts the labels that the loss of a model divides its mean by, in targets that are its labels, or have them
    under ``"labels"``."""

    shifted: bool = False
    """True where the model holds each place against the next label, so that the first one has no term."""
    model: str = ""

    def __call__(self, targets: Any) -> float:
        labels = targets["labels"] if isinstance(targets, Mapping) and "labels" in targets else targets
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
            return examples(targets)
        return super().__call__(labels[..., 1:] if self.shifted else labels)

    def __str__(self) -> str:
        shifted = ", from the second place on" if self.shifted else ""
        return f"{super().__str__()}{shifted}, as {self.model} computes it"


def takes_loss_of_model(loss: Any) -> bool:
    """Tells whether a workload's loss returns the loss that its model has computed, and does nothing else. It is called
    with stand-ins, if its code only reads its arguments."""
    if isinstance(loss, operator.attrgetter | operator.itemgetter):
        return False  # of two arguments they take one
    function = _function_of(loss)
    if function is None or not _only_reads(function.__code__, calls=function is loss):
        return False
    outputs = _Outputs()
    try:
        found = loss.forward(outputs, None) if isinstance(loss, nn.Module) else loss(outputs, None)
    except Exception:  # it asks its outputs for something else
        return False
    return found is outputs or found is outputs.loss


def resolved(terms: Count | None, model: nn.Module) -> Count | None:
    """Returns what counts the loss terms, now that the model is there that computes its loss; others stay what they
    are."""
    if not isinstance(terms, ModelTerms):
        return terms
    found = _of_model(model)
    return examples if found is None else found


def _function_of(loss: Any) -> types.FunctionType | None:
    if isinstance(loss, types.FunctionType):
        return loss
    found: Any
    if isinstance(loss, types.MethodType):
        found = loss.__func__
    else:
        found = getattr(type(loss), "forward" if isinstance(loss, nn.Module) else "__call__", None)
    return found if isinstance(found, types.FunctionType) else None


def _only_reads(code: types.CodeType, *, calls: bool) -> bool:
    """Tells whether some code reads its arguments and returns what it has read. ``calls``: whether it may call methods
    of them, too."""
    allowed = _HARMLESS | _CALLS if calls else _HARMLESS
    return all(
        i.opname in allowed or (i.opname == "BINARY_OP" and i.argrepr == "[]") for i in dis.get_instructions(code)
    )


# The networks of transformers


def _of_model(model: nn.Module) -> ModelLabelTerms | None:
    """Returns the terms of the loss of the first network of transformers in a model; None where there is none, and
    where its loss has one term a row, or is none that is known here."""
    for module in model.modules():
        kinds = type(module).__mro__
        if any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds):
            found = _of_pretrained(module)
            if found is not None:
                return replace(found, model=_plain_name(module))
    return None


def _plain_name(module: nn.Module) -> str:
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


def _of_pretrained(model: Any) -> ModelLabelTerms | None:
    for kind, code in _forwards(type(model)):
        if "loss_function" in code.co_names:
            return _of_function(getattr(model.loss_function, "__name__", ""), model)
        found = _of_class(kind.__name__, code, model)
        if found is not None:
            return found
    return None


def _forwards(kind: type) -> Iterator[tuple[type, types.CodeType]]:
    """Yields the classes that have a forward of their own with labels, and its code, without what decorates it."""
    for parent in kind.__mro__:
        function = parent.__dict__.get("forward")
        function = None if function is None else inspect.unwrap(function)
        if isinstance(function, types.FunctionType) and "labels" in function.__code__.co_varnames:
            yield parent, function.__code__


def _of_function(name: str, model: Any) -> ModelLabelTerms | None:
    """Returns the terms of one of transformers' loss functions."""
    if name == "ForCausalLMLoss":
        return ModelLabelTerms(shifted=True)
    if name in ("ForMaskedLMLoss", "ForTokenClassification"):
        return ModelLabelTerms()
    if name == "ForSemanticSegmentationLoss":
        return ModelLabelTerms(ignore_index=255)
    return _of_classes(model) if name == "ForSequenceClassificationLoss" else None


def _of_class(name: str, code: types.CodeType, model: Any) -> ModelLabelTerms | None:
    """Returns the terms of a loss that is written in the forward of a class of this name."""
    if name.endswith("ForSequenceClassification"):
        return _of_classes(model)
    if name.endswith(("ForMaskedLM", "ForTokenClassification", "ForMultipleChoice", "ForNextSentencePrediction")):
        return ModelLabelTerms()
    if name.endswith(("LMHeadModel", "ForCausalLM", "ForConditionalGeneration")):
        return ModelLabelTerms(shifted=bool({"shift_labels", "shift_logits"} & {*code.co_varnames}))
    return None


def _of_classes(model: Any) -> ModelLabelTerms | None:
    """Returns the terms of a loss over one label a row; None where it is a regression, or over several yes or no."""
    if model.config.problem_type in (None, "single_label_classification") and model.config.num_labels > 1:
        return ModelLabelTerms()
    return None
