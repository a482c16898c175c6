"""Settings that the ranks ought to share at each step: flags, rates, weight decay, what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from apportion.script_check.comparison.tensors import places, shown, step_of
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

_SHOWN = 4


def findings(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns the first step at which each kind of setting differs between the ranks."""
    found = list[Finding]()
    common = set.intersection(
        *({name for e in record.events_of("network") for name in e["modules"]} for record in ranks)
    )
    for compare in (partial(_flags, common), _rates, _decays, _trainable):
        finding = _first(ranks, compare)
        if finding is not None:
            found.append(finding)
    return found


def _first(ranks: Sequence[RankRecord], compare: Callable[[int, int, Event, Event], Finding | None]) -> Finding | None:
    for optimizer, number in places(ranks[0]):
        steps = [step_of(record, optimizer, number) for record in ranks]
        for rank, step in enumerate(steps[1:], 1):
            if steps[0] is not None and step is not None:
                finding = compare(rank, number, steps[0], step)
                if finding is not None:
                    return finding
    return None


def _flags(modules: set[str], rank: int, number: int, first: Event, other: Event) -> Finding | None:
    for label in sorted(set(first["evaluating"]) & set(other["evaluating"])):
        one, two = modules & set(first["evaluating"][label]), modules & set(other["evaluating"][label])
        if one == two:
            continue
        evaluating = 0 if len(one) > len(two) else rank
        names = [name for name in (*first["evaluating"][label], *other["evaluating"][label]) if name in one ^ two]
        listed = [shown(name, names) for name in names if name.count(".") or len(names) == 1][:_SHOWN]
        return Finding(
            "flags",
            "warning",
            f"At step {number}, {len(names)} modules of {label} ({', '.join(listed)}"
            f"{', ...' if len(names) > _SHOWN else ''}) are in evaluation mode on rank {evaluating} and in training "
            f"mode on rank {0 if evaluating else rank}.",
            "Call train() after each evaluation, on every rank that called eval().",
            tensors=tuple(listed),
            ranks=(evaluating,),
            step=number,
            site=first["site"],
        )
    return None


def _rates(rank: int, number: int, first: Event, other: Event) -> Finding | None:
    return _numbers(("learning_rates", "learning rate", "rates"), rank, number, first, other)


def _decays(rank: int, number: int, first: Event, other: Event) -> Finding | None:
    return _numbers(("weight_decay", "weight decay", "decays"), rank, number, first, other)


def _numbers(setting: tuple[str, str, str], rank: int, number: int, first: Event, other: Event) -> Finding | None:
    name, what, field = setting
    if len(first["gradients"]) != len(other["gradients"]):
        return None  # stages of a pipeline have optimizers of their own
    for group, (one, two) in enumerate(zip(first.get(field, ()), other.get(field, ()), strict=False)):
        if one != two:
            return Finding(
                name,
                "warning",
                f"At step {number}, the {what} of parameter group {group} is {one:.6g} on rank 0 and {two:.6g} on rank "
                f"{rank}.",
                f"Set the {what} on all ranks from values that all ranks share, such as an averaged metric.",
                ranks=(0, rank),
                step=number,
                site=first["site"],
            )
    return None


def _trainable(rank: int, number: int, first: Event, other: Event) -> Finding | None:
    one: dict[str, Any] = first.get("trainable", {})
    two: dict[str, Any] = other.get("trainable", {})
    names = [name for name in one if name in two and one[name] != two[name]]
    if not names:
        return None
    listed = tuple(shown(name, list(one)) for name in names)
    return Finding(
        "trained_parameters",
        "warning",
        f"At step {number}, {', '.join(listed[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''} "
        f"{'require' if len(names) > 1 else 'requires'} a gradient on rank {0 if one[names[0]] else rank} and not on "
        f"rank {rank if one[names[0]] else 0}.",
        "Set requires_grad alike on all ranks.",
        tensors=listed,
        ranks=(0, rank),
        step=number,
        site=first["site"],
    )
