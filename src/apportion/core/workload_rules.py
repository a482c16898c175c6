"""The rules that the fields of a workload and of an evaluation keep by themselves, and those of what their functions
return. Each error gives the value, the rule and the remedy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from apportion.core.order import Order

OPTIMIZER = "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
SCHEDULE = "schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)"
EVALUATION = "evaluation=apportion.Evaluation(data=lambda: test_set())"
_REMEDIES: Mapping[str, tuple[int, str, str]] = {
    "optimizer": (1, "a function of the named parameters, not of the network", OPTIMIZER),
    "loss": (2, "a function (outputs, targets) -> the mean over the batch", "loss=torch.nn.functional.cross_entropy"),
    "update": (2, "a function (step, batch) -> named values", "update=lambda step, batch: {...}"),
    "schedule": (2, "a function (optimizer, total steps) -> a scheduler", SCHEDULE),
    "collate": (1, "a function from a list of samples to (inputs, targets)", "collate=lambda samples: ..."),
    "augment": (2, "a function (batch, draws) -> a batch", "augment=lambda batch, draws: ..."),
    "carry": (1, "a function of the number of rows that makes the recurrent state", "carry=lambda rows: ..."),
}
"""For each field that is a function: the number of its arguments, what it is, and an example."""


def check_functions(fields: Mapping[str, Any]) -> None:
    """Raise ValueError where a field that must be a function is none, or cannot be called as it will be."""
    check_model(fields["model"])
    _check_data(fields["data"], parts=fields["parts"] is not None)
    for name, (arguments, rule, example) in _REMEDIES.items():
        given = fields[name]
        if given is None and name not in ("optimizer", "collate"):
            continue
        if isinstance(given, type) and issubclass(given, nn.Module) and name in ("loss", "update"):
            raise ValueError(f"{name}={given.__name__} is a class of modules: write {name}={given.__name__}()")
        if not callable(given):
            raise ValueError(f"{name}={described(given)} must be {rule}: {example}")
        wanted = misfit(given, arguments)
        if wanted is not None:
            raise ValueError(f"{name}={name_of(given)} {wanted}, and it must be {rule}: {example}")


def check_model(given: Any) -> None:
    """Raise ValueError where ``model`` is not a function without arguments."""
    if isinstance(given, nn.Module):
        kind = type(given).__name__
        raise ValueError(
            f"model={kind}(...) is a network that is made already, and every rank makes its own from the seed: it must "
            f"be a function: model=lambda: {kind}(...)"
        )
    if not callable(given):
        raise ValueError(f"model={described(given)} must be a function that makes the network: model=lambda: Net()")
    wanted = misfit(given, 0)
    if wanted is not None:
        name = name_of(given)
        raise ValueError(
            f"model={name} {wanted}, and it must be a function without arguments that makes the network: "
            f"model=lambda: {name if name.isidentifier() else 'Net'}(...)"
        )


def _check_data(given: Any, *, parts: bool = False) -> None:
    """Raise ValueError where ``data`` is not a function that makes a data set. ``parts``: it makes one part, of which
    the rules are those of ``parts``."""
    example = "data=lambda part: training_part(part)" if parts else "data=lambda: training_set()"
    if isinstance(given, DataLoader):
        raise ValueError(
            "data=DataLoader(...) is a loader, and rows are chosen by index here: give a function that makes its data "
            f"set, {example}, and batch_size=, collate= and order= beside it"
        )
    if not callable(given):
        raise ValueError(
            f"data={described(given)} must be a function that makes the data set, which each process calls: {example}"
        )
    wanted = None if parts else misfit(given, 0)
    if wanted is not None:
        raise ValueError(
            f"data={name_of(given)} {wanted}, and it must be a function without arguments that makes the data set: "
            f"{example}"
        )


def check_numbers(fields: Mapping[str, Any]) -> None:
    """Raise ValueError where a field that is a number, a precision or an order has no value that it may have."""
    size, steps, epochs = fields["batch_size"], fields["steps"], fields["epochs"]
    clip, seed = fields["clip_grad_norm"], fields["seed"]
    if not whole(size) or size < 1:
        raise ValueError(
            f"batch_size={described(size)} must be a whole number of at least 1 example, "
            f"as {_plain('batch_size', size, 64)}"
        )
    if steps is None and epochs is None:
        raise ValueError("steps=None and epochs=None never end: give one of them")
    if steps is not None and (not whole(steps) or steps < 1):
        raise ValueError(
            f"steps={described(steps)} must be a whole number of at least 1 update, as {_plain('steps', steps, 1000)}"
        )
    if epochs is not None and not (_number(epochs) and epochs > 0 and math.isfinite(epochs)):
        raise ValueError(
            f"epochs={described(epochs)} must be a number above 0 and finite, as {_plain('epochs', epochs, 10)}"
        )
    if clip is not None and not (_number(clip) and clip > 0):
        example = _plain("clip_grad_norm", clip, 1.0)
        raise ValueError(
            f"clip_grad_norm={described(clip)} must be a number above 0, as {example}, or None not to clip"
        )
    if not whole(seed):
        raise ValueError(f"seed={described(seed)} must be a whole number, as {_plain('seed', seed, 0)}")
    if not whole(fields["accumulate"]) or fields["accumulate"] < 1:
        raise ValueError(
            f"accumulate={described(fields['accumulate'])} must be a whole number of at least 1 batch, as "
            f"{_plain('accumulate', fields['accumulate'], 8)}"
        )


def check_choices(fields: Mapping[str, Any]) -> None:
    """Raise ValueError where a field that has some few values has another one."""
    for name in ("compile", "drop_last"):
        if not isinstance(fields[name], bool):
            raise ValueError(f"{name}={described(fields[name])} must be True or False")
    if fields["precision"] not in ("float32", "bfloat16", "float16", "float64"):
        _refuse_precision(fields["precision"])
    if fields["order"] not in ("shuffled", "sequential") and not isinstance(fields["order"], Order):
        raise ValueError(
            f'order={described(fields["order"])} must be "shuffled", "sequential", apportion.weighted(weights), '
            "with_replacement(), grouped(lengths) or custom(function)"
        )
    if fields["schedule_every"] not in ("update", "epoch"):
        raise ValueError(f'schedule_every={described(fields["schedule_every"])} must be "update" or "epoch"')


def check_schedule(fields: Mapping[str, Any]) -> None:
    """Raise ValueError where what a schedule is stepped after, or with, does not fit the other fields."""
    every, on, evaluation = fields["schedule_every"], fields["schedule_on"], fields["evaluation"]
    for name, given in (("schedule_every", every != "update"), ("schedule_on", on is not None)):
        if given and fields["schedule"] is None:
            raise ValueError(f"{name}={fields[name]!r} needs a schedule: {SCHEDULE}")
    if on is None:
        return
    if every != "update":
        raise ValueError(f"schedule_every={every!r} and schedule_on={on!r} contradict each other: leave either out")
    known = [] if evaluation is None else [*evaluation.metrics]
    if on not in known:
        raise ValueError(
            f"schedule_on={on!r} must be a metric of the evaluation, "
            f"{'which has ' + ', '.join(known) if known else 'and there is none: ' + EVALUATION}"
        )


def check_loss(fields: Mapping[str, Any]) -> None:
    """Raise ValueError where there is neither a loss nor an update, or both, or a count that does not fit them."""
    loss, update, count = fields["loss"], fields["update"], fields["count"]
    if (loss is None) == (update is None):
        raise ValueError(
            "a workload needs either loss=(outputs, targets) -> mean, or update=(step, batch) -> values: "
            f"{'give one of them' if loss is None else 'leave either out'}"
        )
    if not (count is None or count == "derived" or callable(count)):
        raise ValueError(
            f"count={count!r} must be a function of the targets, as count=lambda targets: "
            "float((targets != -100).sum()), or None where the loss couples the examples; or leave it out"
        )
    if callable(count) and misfit(count, 1) is not None:
        name = getattr(count, "__name__", type(count).__name__)
        raise ValueError(
            f"count={name} must be a function of the targets alone, as count=lambda targets: "
            "float((targets != -100).sum())"
        )
    if count is None and update is not None:
        raise ValueError("count=None goes with loss; an update sees the rows of its own rank alone")


def check_names(fields: Mapping[str, Any]) -> None:
    """Raise ValueError where a field that holds names holds something else."""
    per_rank_draws, caches = fields["per_rank_draws"], fields["caches"]
    if not _are_names(per_rank_draws):
        raise ValueError(
            f"per_rank_draws={per_rank_draws!r} must be the names of module classes or of the workload's "
            'functions: per_rank_draws=("Reparametrise",)'
        )
    if not _are_names(caches):
        raise ValueError(f'caches={caches!r} must be a tuple of names, as ("Model.attention",)')


def _are_names(given: object) -> bool:
    """Return whether a field holds names: a tuple of them, or another collection."""
    return isinstance(given, Collection) and not isinstance(given, str) and all(isinstance(name, str) for name in given)


def check_together(fields: Mapping[str, Any]) -> None:
    """Raise ValueError where fields contradict each other."""
    carry, order, parts, accumulate = (fields[name] for name in ("carry", "order", "parts", "accumulate"))
    if carry is not None and order != "sequential":
        raise ValueError('carry needs order="sequential": a recurrent state follows its row through the data')
    if carry is not None and fields["update"] is not None:
        raise ValueError("carry goes with loss; with update, keep the state in your own function")
    if carry is not None and fields["average"] is not None:
        raise ValueError(
            f"average={fields['average']} and carry contradict each other: the recurrent state is that of the weights "
            "themselves; leave average out"
        )
    if parts is not None and isinstance(order, Order):
        raise ValueError(
            f"order={order} and parts={parts} contradict each other: each host draws from the parts that it has; use "
            'order="shuffled" or "sequential", or leave parts out'
        )
    for name, given in (
        ("update=", fields["update"] is not None),
        ("count=None", fields["count"] is None),
        ("carry=", carry is not None),
    ):
        if accumulate > 1 and given:
            raise ValueError(
                f"accumulate={accumulate} computes the loss of an update batch by batch, and {name} needs all of its "
                f"examples at once: use batch_size={accumulate * fields['batch_size']} and leave accumulate out"
            )


def _refuse_precision(given: object) -> None:
    from apportion.core.argument_names import PRECISIONS  # only a mistake needs it

    close = PRECISIONS.get(str(given).lower())
    hint = f': did you mean "{close}"?' if close is not None else ', as precision="bfloat16"'
    raise ValueError(f"precision={described(given)} must be float32, bfloat16, float16 or float64{hint}")


def check_arguments(given: Any) -> None:
    """Raise ValueError where ``arguments`` is not a dict of plain values by name."""
    example = 'arguments={"lr": 0.2, "width": 64}'
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"arguments={described(given)} must be a dict of values by name: {example}")
    for name, value in given.items():
        if not is_plain(value):
            raise ValueError(
                f"arguments={{{name!r}: {described(value)}}} must be a number, a text, True, False, None, or a list, "
                f"tuple or dict of these, since it is recorded with the run: {example}"
            )


def is_plain(value: object) -> bool:
    """Return whether a value can be recorded as JSON: a number, a text, True, False, None, and lists, tuples and dicts
    of these."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def check_evaluation(given: Any, kind: type) -> None:
    """Raise ValueError where ``evaluation`` is not an Evaluation."""
    if given is None or isinstance(given, kind):
        return
    example = EVALUATION
    if isinstance(given, Mapping) and given and all(isinstance(name, str) for name in given):
        example = f"evaluation=apportion.Evaluation({', '.join(f'{name}=...' for name in given)})"
    raise ValueError(f"evaluation={described(given)} must be an Evaluation: {example}")


def check_evaluation_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError where a field of an evaluation is not what it must be."""
    _check_data(fields["data"])
    metrics, every, size = fields["metrics"], fields["every"], fields["batch_size"]
    example = 'metrics={"accuracy": apportion.accuracy}'
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics={described(metrics)} must be a dict of functions by name: {example}")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not callable(metric):
            raise ValueError(
                f"metrics={{{name!r}: {described(metric)}}} must be functions (outputs, targets) -> mean over the "
                f"batch, or classes with update() and compute(), by name: {example}"
            )
        wanted = misfit(metric, 2)
        if wanted is not None and misfit(metric, 0) is not None:
            raise ValueError(
                f"metrics={{{name!r}: {name_of(metric)}}} {wanted}, and it must be a function (outputs, targets) -> "
                f"mean over the batch, or a class with update() and compute(): {example}"
            )
    if every is not None and not (_number(every) and every > 0):
        raise ValueError(f"every={described(every)} must be above 0 epochs, or None to evaluate only at the end")
    if size is not None and (not whole(size) or size < 1):
        raise ValueError(f"batch_size={described(size)} must be a whole number of at least 1 example")


def made_model(make: Callable[[], Any]) -> nn.Module:
    """Return what ``model`` makes. Raises ValueError where that is not a network."""
    made = make()
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"model= returned {described(made)}, and it must return a torch.nn.Module: model=lambda: Net() (a function "
            "that is written with def needs its return)"
        )
    return made


def refuse_batch_norm(model: nn.Module, accumulate: int, update_size: int) -> None:
    """Raise ValueError where a layer takes the statistics of a batch, and an update has several."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"accumulate={accumulate} would give {name or 'the model'} ({type(layer).__name__}) the statistics of "
                f"one batch at a time: use batch_size={update_size} and leave accumulate out, or a normalisation that "
                "looks at one example (GroupNorm, LayerNorm)"
            )


def made_optimizer(make: Callable[[Any], Any], parameters: Sequence[tuple[str, nn.Parameter]]) -> Any:
    """Return the optimizer that ``optimizer`` makes, or several by name. Raises ValueError where it is written for
    something else than the named parameters, or makes something else."""
    try:
        made = make(parameters)
    except AttributeError as error:
        if error.obj is parameters or any(error.obj is pair for pair in parameters):
            raise ValueError(
                f"optimizer= is given the named parameters, a list of (name, parameter), and not the network, and "
                f"they have no .{error.name}: {OPTIMIZER}"
            ) from error
        raise
    several = isinstance(made, Mapping) and made and all(isinstance(one, Optimizer) for one in made.values())
    if not isinstance(made, Optimizer) and not several:
        raise ValueError(
            f"optimizer= returned {described(made)}, and it must return a torch.optim.Optimizer, or a dict of them by "
            f"name with update=: {OPTIMIZER}"
        )
    return made


def made_schedule(make: Callable[[Optimizer, int], Any], optimizer: Optimizer, total: int) -> LRScheduler:
    """Return the schedule of an optimizer over ``total`` updates. Raises ValueError where it is not a schedule of the
    step alone."""
    made: Any = make(optimizer, total)
    if isinstance(made, ReduceLROnPlateau):
        raise ValueError(
            'ReduceLROnPlateau needs a metric of the evaluation: give schedule_on="loss", or use a schedule of the '
            "step alone (StepLR, CosineAnnealingLR, OneCycleLR, LambdaLR)"
        )
    if not callable(getattr(made, "step", None)):
        raise ValueError(
            f"schedule= returned {described(made)}, and it must return a scheduler of torch.optim.lr_scheduler, which "
            f"is stepped once an update: {SCHEDULE}"
        )
    return made  # type: ignore[no-any-return]  # it has what is called of it


def made_plateau(make: Callable[[Optimizer, int], Any], optimizer: Optimizer, total: int) -> ReduceLROnPlateau:
    """Return the ReduceLROnPlateau of an optimizer. Raises ValueError where it is something else."""
    made: Any = make(optimizer, total)
    if not isinstance(made, ReduceLROnPlateau):
        raise ValueError(
            f"schedule= returned {described(made)}, and schedule_on= steps a ReduceLROnPlateau with a metric: return "
            "one, or leave schedule_on out"
        )
    return made


def checked_loss(loss: Any) -> Tensor:
    """Return what ``loss`` has given. Raises ValueError where that is not one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if isinstance(loss, Tensor):
        raise ValueError(
            f"the loss gave a tensor of shape {tuple(loss.shape)}, which must be one number: the mean over the batch; "
            'use reduction="mean", or .mean() of it'
        )
    remedy = "leave .item() or float() out" if isinstance(loss, int | float) else "return the tensor that is minimised"
    raise ValueError(
        f"the loss gave {type(loss).__name__}, which must be one number, a tensor, the mean over the batch; {remedy}"
    )


def refuse_without_gradient(model: nn.Module) -> NoReturn:
    """Raise ValueError for a loss that has no gradient."""
    if any(p.requires_grad for p in model.parameters()):
        remedy = "leave detach(), argmax() and torch.no_grad() out of the model and the loss"
    else:
        remedy = (
            f"no parameter of {type(model).__name__} has requires_grad=True; set it on those that are to be trained"
        )
    raise ValueError(f"the loss has no gradient, and training needs one: {remedy}")


def misfit(function: Callable[..., Any], arguments: int) -> str | None:
    """Return in words how a function cannot be called with ``arguments`` positional ones; None where it can, or where
    its signature cannot be seen, as of functions that are written in C."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        return f"cannot be called with {arguments or 'no'} argument{'' if arguments == 1 else 's'} ({error})"
    return None


def name_of(function: Any) -> str:
    """Return the name of a function as a user would know it."""
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda ...: ..." if name == "<lambda>" else str(name)


def described(value: object) -> str:
    """Return a value as it may be printed in a message: a long one, or one that spans lines, by its type."""
    if isinstance(value, nn.Module | Optimizer | Dataset | DataLoader):
        return f"{type(value).__name__}(...)"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"{type(value).__name__}(...)"


def whole(value: object) -> bool:
    """Return whether a value is a whole number, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(name: str, value: Any, example: float) -> str:
    """Return how a number is given: a number of numpy or torch as one of Python's own, and else an example."""
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        return f"{name}={value.item()!r}, a number of Python"
    return f"{name}={example}"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_parts(parts: object, data: Callable[..., Any], *, carries: bool) -> None:
    """Raise ValueError where this is not a number of parts, ``data`` takes no part, or a state is carried."""
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise ValueError(
            f"parts={parts!r} must be a whole number of at least 1, the parts that the data set is in; leave it out "
            "where every process opens all of it"
        )
    if carries:
        raise ValueError(
            f"parts={parts} and carry contradict each other: a recurrent state follows its row through the whole data "
            "set; leave parts out"
        )
    try:
        inspect.signature(data).bind(0)
    except TypeError:
        raise ValueError(
            f"parts={parts} needs data to be a function of the number of a part: data=lambda part: ...; leave parts "
            "out where it makes the whole data set"
        ) from None
    except ValueError:  # a function of C, which does not say
        pass
