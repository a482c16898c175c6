"""The number of loss terms in some targets, derived from the loss where it is one of torch's that can be inspected.

The mean of a classification loss divides by the labels that are not ignored, each with the weight of its class, and not
by the rows. A share of the batch has the weight of its terms, so that a wrong number trains another network.

Networks of transformers compute their loss themselves: ``loss=lambda outputs, labels: outputs.loss``. What its mean
divides by follows from the class of the model, so that it is known once a model has been made; the targets have to be
its labels.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from apportion.core import tree
from apportion.core.torch_private import hooked

Count = Callable[[Any], float]
Derived = Literal["derived"]

_NLL: Mapping[str, Any] = {"weight": None, "ignore_index": -100, "reduction": "mean"}
_CROSS_ENTROPY: Mapping[str, Any] = {**_NLL, "label_smoothing": 0.0}
_FUNCTIONS: Mapping[Any, Mapping[str, Any]] = {functional.cross_entropy: _CROSS_ENTROPY, functional.nll_loss: _NLL}
_MODULES: Mapping[type, Any] = {nn.CrossEntropyLoss: functional.cross_entropy, nn.NLLLoss: functional.nll_loss}


def examples(targets: Any) -> float:
    """Counts one loss term an example (the size of dimension 0)."""
    return float(tree.length(targets))


@dataclass(frozen=True, eq=False)
class LabelTerms:
    """Counts the labels that a classification loss of torch's divides its mean by: those that are not ignored, each
    with the weight of its class. Targets that are probabilities count one a row, or one a row and place."""

    ignore_index: int = -100
    weight: Tensor | None = None

    def __call__(self, targets: Tensor) -> float:
        if targets.is_floating_point():
            return float(targets.numel() // targets.shape[min(1, targets.dim() - 1)])
        kept = targets != self.ignore_index
        if self.weight is None:
            return float(kept.sum())
        # In float64: the weights of many rows are added up.
        return float(self.weight.detach().double()[targets.masked_fill(~kept, 0)].masked_fill(~kept, 0.0).sum())

    def __str__(self) -> str:
        labels = f"labels other than {self.ignore_index}"
        return labels if self.weight is None else f"class weights of the {labels}"

    def one_each(self, targets: Tensor) -> bool:
        """Tells whether every row of these targets has as many terms as every other, so that rows can be counted."""
        return self.weight is None and (targets.is_floating_point() or not bool((targets == self.ignore_index).any()))


@dataclass(frozen=True)
class Classification:
    """One of torch's classification losses, and its options by name."""

    function: Callable[..., Tensor]
    """``F.cross_entropy`` or ``F.nll_loss``."""
    options: Mapping[str, Any]


def classification_of(loss: Any) -> Classification | None:
    """Returns the function and the options of a loss that is ``F.cross_entropy``, ``F.nll_loss``, a partial of one of
    them, ``nn.CrossEntropyLoss`` or ``nn.NLLLoss``; None where it is something else, or where its options cannot be
    seen (a lambda)."""
    if isinstance(loss, functools.partial):
        inner = classification_of(loss.func)
        if inner is None or loss.args or not loss.keywords.keys() <= inner.options.keys():
            return None
        return Classification(inner.function, {**inner.options, **loss.keywords})
    if type(loss) in _MODULES and not hooked(loss, forward_only=True):
        function = _MODULES[type(loss)]
        return Classification(function, {name: getattr(loss, name) for name in _FUNCTIONS[function]})
    try:
        options = _FUNCTIONS.get(loss)
    except TypeError:  # it has no hash
        return None
    return None if options is None else Classification(loss, options)


def terms_of(count: Count, targets: Any) -> float:
    """Returns the number of loss terms that a workload's ``count`` gives for some targets. ValueError, by the name of
    the function, where that is not one finite number of at least 0: a share of a batch would have no weight."""
    given = count(targets)
    try:
        terms = float(given)
    except (TypeError, ValueError, RuntimeError):
        terms = math.nan
    if not 0.0 <= terms < math.inf:
        name = getattr(count, "__name__", type(count).__name__)
        raise ValueError(
            f"count={name} returned {given!r}, which must be one finite number of at least 0, the number of loss terms "
            "in the targets that it is given: count=lambda targets: float((targets != -100).sum())"
        )
    return terms


def derived_count(loss: Any) -> Count:
    """Returns what the mean of this loss divides by, where that can be seen; else one term an example."""
    found = classification_of(loss)
    if found is None or found.options["reduction"] != "mean":
        return examples
    return LabelTerms(found.options["ignore_index"], found.options["weight"])


def description_of(given: Any, count: Count | None) -> str:
    """Returns in words what a workload's loss terms are. ``given``: its ``count`` as it is written; ``count``: what a
    step takes for it."""
    if given is None:
        return "the loss couples the rows (count=None)"
    if given != "derived":
        return "as count= says"
    return f"derived from the loss: {count}" if isinstance(count, LabelTerms) else "one a row"


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
    # A list of what is allowed and not of what is refused: an instruction of a later Python counts as one that may do
    # something, and the loss as one that has to be stated.
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
