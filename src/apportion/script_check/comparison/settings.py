"""Settings that the ranks ought to share at each step: flags, rates, weight decay, what is trained, the scale of a
GradScaler; and the learning rates, step by step, against those of the script as one process on the same rows.

Gradients that are clipped before their scale is taken out of them are found here, too. One process clips the same
scaled gradients, so that no comparison shows it: Adam hides that all steps have the norm at which they are clipped,
over the scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from apportion.script_check.comparison.reading import reading
from apportion.script_check.comparison.tensors import places, shown, step_of
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

_SHOWN = 4
_RATES = ("learning_rates", "learning rate", "rates")
_DECAYS = ("weight_decay", "weight decay", "decays")
"""The name of a finding, its setting in words, and the field of a step that has it."""


def findings(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns the first step at which each kind of setting differs between the ranks."""
    found = list[Finding]()
    common = set.intersection(
        *({name for e in record.events_of("network") for name in e["modules"]} for record in ranks)
    )
    for compare in (partial(_flags, common), partial(_numbers, _RATES), partial(_numbers, _DECAYS), _trainable):
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


def _numbers(setting: tuple[str, str, str], rank: int, number: int, first: Event, other: Event) -> Finding | None:
    name, what, field = setting
    if len(first["gradients"]) != len(other["gradients"]):
        return None  # stages of a pipeline have optimizers of their own
    for group, (one, two) in enumerate(zip(first.get(field, ()), other.get(field, ()), strict=False)):
        if one != two:
            sentence = (
                f"At step {number}, the {what} of parameter group {group} is {one:.6g} on rank 0 and {two:.6g} on rank "
                f"{rank}."
            )
            remedy = f"Set the {what} on all ranks from values that all ranks share, such as an averaged metric."
            return Finding(name, "warning", sentence, remedy, ranks=(0, rank), step=number, site=first["site"])
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
    sentence = (
        f"{clip['function']} clips at {clip['limit']:.6g} gradients that are still multiplied by the scale {scale:.6g} "
        f"of the GradScaler: what remains is clipped at {clip['limit'] / scale:.6g}, in one process as well."
    )
    remedy = "Call the scaler's unscale_(optimizer) after backward and before the clipping."
    return Finding(
        "clipped_scaled", "warning", sentence, remedy, step=clip["step"] + 1, site=clip["site"], factor=1 / scale
    )


TOLERANCE = 1e-9
"""What rounding may change of a rate, relative to the largest rate."""
_FASTEST = 16


def schedule_findings(ranks: Sequence[RankRecord], union: RankRecord) -> list[Finding]:
    """Returns for the first parameter group whose rates differ: a warning where the schedule runs at another rate, a
    note where all rates are one multiple of those of one process."""
    found = list[Finding]()
    unchanged = _batches_per_rank(len(ranks), union)
    longest = max(ranks, key=lambda record: len(record.steps))
    for (optimizer, group), rates in _rates_by_group(longest).items():
        own = _rates_by_group(union).get((optimizer, group), [])
        length = min(len(rates), len(own))
        speed = _speed(longest, union, optimizer)
        strides = (1, len(ranks) if unchanged else 1) if speed == 1 else (len(ranks),) if unchanged else ()
        factor = _compared(rates[:length], own[:length], strides)
        if factor is None:
            found.append(_differs(longest, optimizer, group, rates[:length], own[:length], speed))
        elif abs(factor - 1) > TOLERANCE:
            at = next(step for step, rate in enumerate(own) if rate)
            found.append(_scaled(optimizer, group, at + 1, rates[at], own[at], factor))
    return found[:1]


def in_batches_of_one_process(ranks: Sequence[RankRecord], union: RankRecord) -> bool:
    """Whether a scheduler makes as many steps for each optimizer step as there are ranks, so that its rates are right
    only where its length was counted in batches of one process, as accelerate's are meant to be."""
    return any(
        _speed(ranks[0], union, optimizer) == len(ranks)
        and not _fits(rates, _rates_by_group(union).get(key, []), 1, 1.0)
        for key, rates in _rates_by_group(ranks[0]).items()
        for optimizer in key[:1]
    )


def _rates_by_group(record: RankRecord) -> dict[tuple[int, int], list[float]]:
    found = dict[tuple[int, int], list[float]]()
    for step in record.steps:
        for group, rate in enumerate(step["rates"]):
            found.setdefault((step["optimizer"], group), []).append(rate)
    return found


def _batches_per_rank(ranks: int, union: RankRecord) -> bool:
    """Whether the script itself would read batches of one rank's size as one process: of a step of the ranks' it then
    makes as many as there are ranks."""
    for iteration in reading(union):
        if iteration.trained and iteration.begun["batch_size"]:
            return len(iteration.trained[0].rows) == ranks * int(iteration.begun["batch_size"])
    return False


def _speed(record: RankRecord, union: RankRecord, optimizer: int) -> int:
    """How many steps a scheduler of the ranks makes in most steps where one of one process makes one; 1 where that is
    not known, as of one that is not of torch."""
    made = list[int]()
    for each in (record, union):
        counts = [step.get("schedule_steps", 0) for step in each.steps if step["optimizer"] == optimizer]
        added = Counter(after - before for before, after in pairwise(counts))
        made.append(added.most_common(1)[0][0] if added else 0)
    return made[0] // made[1] if all(made) and made[0] % made[1] == 0 else 1


def _compared(rates: Sequence[float], own: Sequence[float], strides: Sequence[int]) -> float | None:
    """The factor by which the rates are those of one process, taken at each step or at every ``stride``-th; None where
    they are others."""
    if _fits(rates, own, 1, 1.0):
        return 1.0
    for every in dict.fromkeys(strides):
        factor = _ratio(rates, own[::every])
        if _fits(rates, own, every, factor):
            return factor
    return None


def _ratio(rates: Sequence[float], own: Sequence[float]) -> float:
    return next((rate / alone for rate, alone in zip(rates, own, strict=False) if alone), 1.0)


def _fits(rates: Sequence[float], own: Sequence[float], every: int, factor: float) -> bool:
    limit = TOLERANCE * max(max(map(abs, rates), default=0.0), 1e-300)
    return all(abs(rate - factor * alone) <= limit for rate, alone in zip(rates, own[::every], strict=False))


def _scaled(optimizer: int, group: int, step: int, rate: float, alone: float, factor: float) -> Finding:
    return Finding(
        "scaled_rate",
        "note",
        f"The learning rates of optimizer {optimizer}, group {group}, are {factor:.6g} times those of one process in "
        f"each step ({rate:.6g} and {alone:.6g} in step {step}); the comparison used those of the ranks on both sides.",
        factor=factor,
    )


def _differs(
    record: RankRecord, optimizer: int, group: int, rates: Sequence[float], own: Sequence[float], speed: int
) -> Finding:
    factor = _ratio(rates, own) if speed == 1 else 1.0
    limit = TOLERANCE * max(map(abs, rates))
    step = next(
        (k for k, (rate, alone) in enumerate(zip(rates, own, strict=True), 1) if abs(rate - factor * alone) > limit), 1
    )
    fastest = min(_FASTEST, (len(own) + 1) // 2)  # three rates at least, as any two fit some speed
    times = next((n for n in range(2, fastest) if _moves(rates, own, n) and _fits(rates, own, n, factor)), None)
    slower = next((n for n in range(2, fastest) if _moves(own, rates, n) and _fits(own, rates, n, 1 / factor)), None)
    times = speed if speed > 1 else times
    how = (
        f"the schedule makes {times} of its steps at each optimizer step"
        if times
        else f"the schedule makes one of its steps in {slower} optimizer steps"
        if slower
        else "the schedule runs at another rate"
    )
    return Finding(
        "schedule",
        "warning",
        f"The learning rate of step {step} is {rates[step - 1]:.6g}, and {own[step - 1] * factor:.6g} for one process "
        f"on the same rows: {how}.",
        "Step the scheduler once for each optimizer step, and count its lengths in steps of all ranks together; "
        "accelerate's prepare() makes a scheduler step once for each rank.",
        step=step,
        site=next((s["site"] for s in record.steps if s["optimizer"] == optimizer and s["number"] == step), ""),
    )


def _moves(rates: Sequence[float], own: Sequence[float], every: int) -> bool:
    """Whether enough steps can be compared at a distance to determine the rate."""
    sampled = own[::every][: len(rates)]
    return len(sampled) > 1 and len(set(sampled)) > 1
