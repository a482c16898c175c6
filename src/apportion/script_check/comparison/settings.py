"""Settings that the ranks ought to share at each step: flags, rates, weight decay, what is trained, the scale of a
GradScaler.

Gradients that are clipped before their scale is taken out of them are found here, too. One process clips the same
scaled gradients, so that no comparison shows it: Adam hides that all steps have the norm at which they are clipped,
over the scale.
"""

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


def scaler_findings(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns the first step at which the scales of two ranks differ, and the first clipping of scaled gradients."""
    return [*_scales_differ(ranks), *_clipped_scaled(ranks[0])]


def _scales_differ(ranks: Sequence[RankRecord]) -> list[Finding]:
    first = ranks[0].events_of("scaler")
    for record in ranks[1:]:
        for one, two in zip(first, record.events_of("scaler"), strict=False):
            if one["scale"] != two["scale"]:
                return [
                    Finding(
                        "scaler",
                        "warning",
                        f"After step {one['step']}, the scale of the GradScaler is {one['scale']:.6g} on rank 0 and "
                        f"{two['scale']:.6g} on rank {record.rank}.",
                        "Check for infinite gradients after the average over the ranks, so that all see the same.",
                        ranks=(0, record.rank),
                        step=one["step"] or None,
                        site=one["site"],
                    )
                ]
    return []


def _clipped_scaled(record: RankRecord) -> list[Finding]:
    """A clipping that takes effect between a scaled loss and the division of the same gradients by the scale."""
    scale: float | None = None
    clips = list[Event]()
    for event in record.events_of("scaled", "clip", "unscaled"):
        if event["kind"] == "scaled":
            scale = event["scale"]
        elif event["kind"] == "clip":
            if scale not in (None, 1.0) and (event["norm"] is None or event["norm"] > event["limit"]):
                clips.append(event)
        else:
            names = set(event["names"])
            found = next((clip for clip in clips if names & set(clip["names"]) - {""}), None)
            if found is not None and scale:
                return [_clipped_finding(found, scale)]
            scale, clips = None, []
    return []


def _clipped_finding(clip: Event, scale: float) -> Finding:
    return Finding(
        "clipped_scaled",
        "warning",
        f"{clip['function']} clips at {clip['limit']:.6g} gradients that are still multiplied by the scale {scale:.6g} "
        f"of the GradScaler: what remains is clipped at {clip['limit'] / scale:.6g}, in one process as well.",
        "Call the scaler's unscale_(optimizer) after backward and before the clipping.",
        step=clip["step"] + 1,
        site=clip["site"],
        factor=1 / scale,
    )
