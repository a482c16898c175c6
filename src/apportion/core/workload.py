"""The description of what to train. Every setting that changes the numbers is here; settings that change only where and
how are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from apportion.core.average import AVERAGES, WeightAverage
from apportion.core.loss_terms import Count, Derived, ModelTerms, derived_count, takes_loss_of_model
from apportion.core.named_arguments import refuse_fields
from apportion.core.order import ORDERS, Order
from apportion.core.parts import PartedDataset
from apportion.core.sampler import Draws, GivenOrder, batches_of
from apportion.core.schedules import EpochSchedule, MetricSchedule
from apportion.core.value import parse, value_of
from apportion.core.workload_rules import (
    check_arguments,
    check_choices,
    check_evaluation,
    check_evaluation_fields,
    check_functions,
    check_loss,
    check_names,
    check_numbers,
    check_parts,
    check_schedule,
    check_together,
    made_model,
    made_optimizer,
    made_plateau,
    made_schedule,
    refuse_batch_norm,
)

if TYPE_CHECKING:
    from apportion.core.data.batch import Batch
    from apportion.core.strategy import Step

Precision = Literal["float32", "bfloat16", "float16", "float64"]
Parameters = Iterable[tuple[str, nn.Parameter]]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of rows whose largest output is the target class. outputs (N, classes, ...), targets (N, ...)."""
    return (outputs.argmax(1) == targets).double().mean()


class Metric(Protocol):
    """A metric that is not a mean over examples: it is fed every batch in order, and asked once."""

    def update(self, outputs: Any, targets: Any) -> object:
        """Take one batch in."""

    def compute(self) -> Any:
        """The value over all batches so far: a number, or a tensor of one element."""


MeanMetric = Callable[[Any, Any], Tensor]
"""A function (outputs, targets) -> the mean over the examples of the batch."""
MetricFactory = Callable[[], Metric]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation of the network on data that it is not trained on.

    Each metric is a function ``(outputs, targets) -> mean over the batch``, averaged over the examples; or a class (any
    callable without arguments) whose instances have ``update(outputs, targets)`` and ``compute()``. Their ``update`` is
    called once for each batch, in order, or several times where the ranks' outputs have shapes of their own.
    """

    data: Callable[[], Dataset[Any]]
    """A factory of the map-style data set, which is opened in each process."""
    metrics: Mapping[str, MeanMetric | MetricFactory] = field(default_factory=lambda: {"accuracy": accuracy})
    """The metrics by name, as the class describes them."""
    every: float | None = 1.0
    """The epochs between evaluations; None: only at the end. The end is always evaluated."""
    best: str | None = None
    """The checkpoint that the link ``best`` keeps: "max accuracy", "min loss"; None: the latest evaluated."""
    batch_size: int | None = None
    """The global batch size in examples; None: the workload's."""

    if not TYPE_CHECKING:  # which knows the fields by itself

        def __new__(cls, *args: Any, **given: Any) -> Self:
            """Refuses fields that it does not have, or lacks; ``__init__`` takes those that it has."""
            refuse_fields(cls.__name__, len(args), given, _fields_of(cls), "EVALUATION")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        check_evaluation_fields(vars(self))
        if self.best is not None:
            sense, _, name = self.best.partition(" ")
            if sense not in ("max", "min") or name not in self.metrics:
                known = ", ".join(f'"max {n}"' for n in self.metrics)
                raise ValueError(f"best={self.best!r} must be max or min and a metric, one of {known}, or min of them")


Update = Callable[["Step", "Batch"], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training job, from ordinary torch parts. Every field may change the numbers; nothing else does.

    A tensor input calls ``model(x)``, a tuple ``model(*x)``, a dict ``model(**x)``; targets and outputs are any
    pytree; dimension 0 is the example.
    """

    model: Callable[[], nn.Module]
    """A factory of the plain model, the same on every rank; called after seeding."""
    data: Callable[..., Dataset[Any]]
    """A factory of the map-style data set, whose items are (inputs, targets); opened in each process, after seeding.
    With ``parts``, ``data(part)`` makes one part, and is called where that part is dealt to, once it is needed."""
    optimizer: Callable[[Parameters], Optimizer | Mapping[str, Optimizer]]
    """A factory of the optimizer, given the named parameters (torch's optimizers take them as they are): ``lambda p:
    torch.optim.SGD(p, lr=0.1)``. With ``update`` it may return several by name."""
    batch_size: int
    """The GLOBAL batch size in examples, whatever the number of workers."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """A function (outputs, targets) -> mean over the batch."""
    update: Update | None = None
    """A function (step, batch) -> named values, instead of ``loss``. For several optimizers or losses: see
    ``Step.minimize``."""
    count: Count | Derived | None = "derived"
    """A function of targets that gives the number of their loss terms (examples, tokens, sum of class weights): what
    the mean divides by. Left out: derived from ``nn.CrossEntropyLoss``, ``nn.NLLLoss``, their functions and partials of
    these, with their ``weight`` and ``ignore_index``, and from the class of a network of transformers that computes the
    loss, of which the targets are the labels; one an example for every other loss. None: the loss couples the examples
    (contrastive), so the outputs of all shards are gathered before it."""
    epochs: float | None = 1.0
    """The number of passes over the training set, which may be a fraction; None: ``steps`` says how long."""
    steps: int | None = None
    """The number of global steps in all; wins over ``epochs``."""
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    """A function (optimizer, total steps) -> a scheduler that is stepped once an update; see ``schedule_every`` and
    ``schedule_on``."""
    schedule_every: Literal["update", "epoch"] = "update"
    """What the scheduler is stepped after. "epoch": after the last update of each, and the function is given the number
    of epochs instead."""
    schedule_on: str | None = None
    """The metric of the evaluation that a ReduceLROnPlateau is stepped with, after each evaluation and on every rank
    alike; None: the schedule needs none."""
    clip_grad_norm: float | None = None
    """The largest 2-norm of the whole gradient."""
    collate: Callable[[list[Any]], Any] = default_collate
    """A function from samples to (inputs, targets). It may leave samples out or pack them: what it returns counts."""
    parts: int | None = None
    """The number of parts that the data set is in, so that each host opens its own alone: ``data(0)`` to
    ``data(parts - 1)``. Each batch has rows of all parts, in proportion to their lengths, in an order that is a
    function of the seed and the parts: the same for any number of hosts. None: it is one, and every process opens
    it."""
    order: GivenOrder = "shuffled"
    """The order in which examples are taken. "shuffled": a permutation drawn from the seed and the epoch; "sequential":
    as the data set has them; or ``apportion.weighted(weights)``, ``with_replacement()``, ``grouped(lengths)``,
    ``custom(function)``, of which the second and ``grouped()`` may be written as text. It is a function of the seed and
    the step, whatever the number of workers."""
    drop_last: bool = False
    """Is the last batch of an epoch left out where it is short? Other examples are left out in each epoch, where the
    order draws them."""
    accumulate: int = 1
    """The batches of one update: its gradient is that of ``accumulate`` times ``batch_size`` examples, computed batch
    by batch, with the activations of one. An update is one step, of schedules, ``steps``, checkpoints and events as
    well; the last update of an epoch has the batches that are left. A batch normalisation, which would look at one
    batch at a time, is refused."""
    carry: Callable[[int], Any] | None = None
    """A factory of the recurrent state for n rows: the model is called ``model(inputs, state) -> (outputs, state)``.
    Needs ``order="sequential"``: row b of every batch then walks through its own stretch of the data."""
    augment: Callable[[Batch, Draws], Batch] | None = None
    """A function that augments a training batch, with draws keyed by (seed, epoch, example)."""
    evaluation: Evaluation | None = None
    """The evaluation on held-out data; None: the network is not evaluated."""
    average: WeightAverage | str | None = None
    """The average of the weights over the updates that is kept beside them: "ema(0.999)", "swa(start=1000)", or one of
    these as a value. It is what is evaluated, loaded and served; the training goes on from the weights themselves. In
    the weights' own dtype."""
    precision: Precision = "float32"
    """The precision of the training. bfloat16 and float16: autocast, the weights stay float32. float64: everything is
    float64."""
    compile: bool = False
    """Is the model given to torch.compile, after splitting?"""
    seed: int = 0
    """The seed of everything that is drawn: the first weights, the order of the examples, dropout, augmentation."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The arguments that a function has made this workload of, by name: plain values, which are recorded with the run
    and must be the same where it is resumed. For ``mine.py:make(lr=0.2)`` they are filled in."""
    per_rank_draws: tuple[str, ...] = ()
    """The names of module classes, or of functions of this workload, of which each rank may draw random numbers of its
    own as it computes, where one device would draw others. Dropout, and draws with one number or more for each row of
    their inputs, need no such permission."""
    caches: tuple[str, ...] = ()
    """Attributes on whose value training does not depend (caches, what is kept to be looked at), as
    ``"Class.attribute"`` or by the path that a message gives. They are not carried to a replaced worker or into a
    checkpoint."""

    if not TYPE_CHECKING:  # which knows the fields by itself

        def __new__(cls, *args: Any, **given: Any) -> Self:
            """Refuses fields that it does not have, or lacks; ``__init__`` takes those that it has."""
            refuse_fields(cls.__name__, len(args), given, _fields_of(cls), "WORKLOAD")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.order, str) and self.order not in ("shuffled", "sequential"):
            object.__setattr__(self, "order", parse(self.order, ORDERS))
        if self.average is not None:
            object.__setattr__(self, "average", value_of(self.average, AVERAGES, WeightAverage))
        check_functions(vars(self))
        check_numbers(vars(self))
        check_choices(vars(self))
        check_arguments(self.arguments)
        check_evaluation(self.evaluation, Evaluation)
        check_schedule(vars(self))
        if self.parts is not None:
            check_parts(self.parts, self.data, carries=self.carry is not None)
        check_loss(vars(self))
        check_names(vars(self))
        check_together(vars(self))

    def must_know(self, draws: Iterable[type]) -> None:
        """Raise ValueError where a name in ``per_rank_draws`` is neither one of these module classes nor a function of
        the workload."""
        if not self.per_rank_draws:
            return
        functions = {name: getattr(self, name) for name in ("loss", "update")}
        known = {kind.__name__ for kind in draws} | {name for name, given in functions.items() if given is not None}
        known |= {getattr(f, "__name__", type(f).__name__) for f in functions.values() if f is not None}
        for name in self.per_rank_draws:
            if name not in known:
                raise ValueError(
                    f"per_rank_draws={self.per_rank_draws!r}: {name!r} is neither a class of the model's modules nor a "
                    f"function of the workload, which are {', '.join(sorted(known))}"
                )

    def make_model(self) -> nn.Module:
        """Make the network. Raises ValueError where ``model`` returns something else, or a batch normalisation with
        ``accumulate``."""
        model = made_model(self.model)
        if self.accumulate > 1:
            refuse_batch_norm(model, self.accumulate, self.update_size)
        return model

    def make_optimizer(self, parameters: Parameters) -> Optimizer | Mapping[str, Optimizer]:
        """Make the optimizer of the named parameters, or several by name. Raises ValueError where ``optimizer`` is
        written for something else, or returns something else."""
        made: Optimizer | Mapping[str, Optimizer] = made_optimizer(self.optimizer, list(parameters))
        return made

    def make_schedule(
        self, optimizer: Optimizer, total: int, steps_per_epoch: int
    ) -> LRScheduler | EpochSchedule | MetricSchedule | None:
        """Make the schedule of an optimizer over ``total`` updates; None where there is none. Raises ValueError where
        ``schedule`` returns something else than a schedule of what ``schedule_every`` and ``schedule_on`` say."""
        if self.schedule is None:
            return None
        if self.schedule_on is not None:
            return MetricSchedule(made_plateau(self.schedule, optimizer, total), self.schedule_on)
        if self.schedule_every == "epoch":
            epochs = -(-total // steps_per_epoch)
            return EpochSchedule(made_schedule(self.schedule, optimizer, epochs), steps_per_epoch)
        return made_schedule(self.schedule, optimizer, total)

    @property
    def update_size(self) -> int:
        """The number of examples of an update: those of ``accumulate`` batches."""
        return self.batch_size * self.accumulate

    def updates_per_epoch(self, examples: int) -> int:
        """The number of updates in an epoch of a data set of this many examples."""
        draws = self.order.length(examples) if isinstance(self.order, Order) else examples
        return batches_of(draws, self.update_size, drop_last=self.drop_last)

    def total_steps(self, steps_per_epoch: int) -> int:
        """The number of updates in the whole training, given how many global batches make an epoch."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * steps_per_epoch))

    def must_feed(self, workers: int) -> None:
        """Raise ValueError where a batch is too small to give each of this many workers an example."""
        if self.update_size < workers:
            raise ValueError(
                f"batch_size={self.batch_size} cannot feed {workers} workers: each needs at least one example; "
                f"use workers<={self.batch_size} or batch_size>={workers}"
            )

    def open_data(self) -> Dataset[Any]:
        """Open the training set, all parts of it where it has parts; it is refused where it cannot be dealt."""
        return checked(self.data(), "data()") if self.parts is None else self.parted_data().open_all()

    def open_part(self, part: int) -> Dataset[Any]:
        """Open one part of the training set; it is refused where it cannot be dealt."""
        return checked(self.data(part), f"data({part})")

    def parted_data(self) -> PartedDataset:
        """The training set in its parts, none of which is opened yet."""
        assert self.parts is not None, "the data set has no parts"
        return PartedDataset(self.data, checked, self.parts, self.seed)

    def with_data(self, change: Callable[[Dataset[Any]], Dataset[Any]]) -> Workload:
        """The workload with its training set changed, each part by itself where it has parts."""
        if self.parts is None:
            return replace(self, data=lambda: change(self.open_data()))
        return replace(self, data=lambda part: change(self.open_part(part)))

    @cached_property
    def terms(self) -> Count | None:
        """The number of loss terms in some targets: ``count`` as it is given, or as it is derived from the loss. Where
        the model computes the loss, this stands for what ``model_loss.resolved`` makes of it and the model."""
        if not isinstance(self.count, str):
            return self.count
        return ModelTerms() if takes_loss_of_model(self.loss) else derived_count(self.loss)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.float64 if self.precision == "float64" else torch.float32


def _fields_of(cls: type) -> dict[str, bool]:
    """Returns the names of the fields of a dataclass, and whether each has to be given."""
    return {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}


def checked(dataset: Dataset[Any], name: str) -> Dataset[Any]:
    """Return a map-style dataset that is not empty, or raise a ValueError that says what to do. ``name``: the call that
    made it."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{name} gave {type(dataset).__name__}, an IterableDataset: examples are dealt by index, so that every "
            "one is seen exactly once and a run can resume; make it map-style (__len__ and __getitem__), "
            "for example list(dataset)"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        loader = isinstance(dataset, DataLoader)
        raise ValueError(
            f"{name} gave {type(dataset).__name__}, which needs __len__ and __getitem__: "
            + (
                "return its data set, with batch_size= and collate= beside it"
                if loader
                else "return a map-style data set"
            )
        )
    if len(dataset) == 0:
        raise ValueError(
            f"{name} gave an empty dataset, and training needs at least one example: check the path or the split"
        )
    return dataset
