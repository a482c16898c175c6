"""The learning rates of the ranks, step by step, against those of the script as one process on the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from apportion.script_check.comparison.reading import reading
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord

TOLERANCE = 1e-9
"""What rounding may change of a rate, relative to the largest rate."""
_FASTEST = 16


def findings(ranks: Sequence[RankRecord], union: RankRecord) -> list[Finding]:
    """Returns for the first parameter group whose rates differ: a warning where the schedule runs at another rate, a
    note where all rates are one multiple of those of one process."""
    found = list[Finding]()
    unchanged = _batches_per_rank(len(ranks), union)
    longest = max(ranks, key=lambda record: len(record.steps))
    for (optimizer, group), rates in _rates(longest).items():
        own = _rates(union).get((optimizer, group), [])
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
        _speed(ranks[0], union, optimizer) == len(ranks) and not _fits(rates, _rates(union).get(key, []), 1, 1.0)
        for key, rates in _rates(ranks[0]).items()
        for optimizer in key[:1]
    )


def _rates(record: RankRecord) -> dict[tuple[int, int], list[float]]:
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
