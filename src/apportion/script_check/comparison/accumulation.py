"""How the micro-batches of a step are weighted, which the script as one process does the same way, right or wrong.

What each backward adds to a gradient is known, and so is the gradient that the optimizer is given: as a sum of the
former it has one factor for each micro-batch. A single step
that is skipped, or a single gradient that is dropped, is not a mistake; so the pattern has to show in most steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apportion.script_check.comparison import clipped
from apportion.script_check.comparison.combination import combination
from apportion.script_check.comparison.tensors import Array, contributions_of, shown, step_of
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord
from apportion.script_check.rows import count

REGULAR = 0.6
"""The share of steps that have to have as many micro-batches, with the same fault: steps that a script skips where a
loss or a gradient is too large also leave out what was accumulated, now and then."""


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one step that one line calls backward on. ``factors``: the factor of each in the gradient,
    before the gradient is clipped by its norm; ``names``: the tensors. ``site``: the line; ``share``: the value of what
    backward is called on over that of the loss function before it, where it is the same for all. ``carried``: whether
    this gradient holds micro-batches that were left out of the step before."""

    step: int
    optimizer: int
    factors: tuple[float, ...]
    names: tuple[str, ...]
    site: str
    share: float | None
    carried: bool = False


def findings(record: RankRecord, whole: bool = False) -> list[Finding]:
    """Returns what is wrong with the weights of micro-batches, from the record of one process. ``whole``: whether its
    epochs end where those of the script do, and not where a loader was shortened."""
    windows = [window for event in record.events_of("contributions") for window in _windows(record, event, 2)]
    found = list[Finding]()
    for optimizer in sorted({window.optimizer for window in windows}):
        own = [window for window in windows if window.optimizer == optimizer]
        carried = any(window.carried for window in own)
        own = [replace(window, carried=carried) for window in own]  # the first step has none before it
        steps = len({event["number"] for event in record.events_of("contributions") if event["optimizer"] == optimizer})
        size = Counter(len(window.factors) for window in own).most_common(1)[0][0]
        for judge in (_dropped, _unequal, _undivided):
            judged = [f for window in own if len(window.factors) == size and (f := judge(window)) is not None]
            # In most windows, as a script may skip a step, or leave out a loss that is too large, now and then.
            if len({finding.step for finding in judged}) > max(1, REGULAR * steps):
                found.append(judged[0])
                break
        else:
            found += _short(record, own, size) if whole else []
    return found


def _windows(record: RankRecord, event: Event, least: int) -> list[MicroBatches]:
    """Returns the windows that end with a step, those of at least some number of micro-batches."""
    step = step_of(record, event["optimizer"], event["number"])
    if step is None:
        return []
    before = step_of(record, event["optimizer"], event["number"] - 1)
    first = 0 if before is None else before["step"]
    batches = Counter(e["loader"] for e in record.events_of("batch") if first <= e["step"] < step["step"])
    if max(batches.values(), default=0) < least and not _splits_rows(record, first, step["step"]):
        return []  # neither several batches of one loader nor parts of one
    # The factors are those before the gradient was clipped, which scales all micro-batches alike.
    clip = clipped.factor(record, event["optimizer"], event["number"]) or 1.0
    by_sites = dict[tuple[str, ...], list[str]]()
    for name, sites in event["sites"].items():
        if len(sites) >= least and step["gradients"].get(name) is not None:
            by_sites.setdefault(tuple(sites), []).append(name)
    found = list[MicroBatches]()
    for sites, names in by_sites.items():
        own = [{name: event["own"][name][at] for name in names} for at in range(len(sites))]
        given: Mapping[str, Array] = {name: step["gradients"][name] for name in names}
        made = combination({n: a for n, a in given.items() if a.shape == own[0][n].shape}, own)
        carried = None if made.exact else _carried(record, event, given, own)
        if not made.exact and carried is None:
            continue
        for site in dict.fromkeys(sites):
            all_factors = made.factors if carried is None else carried
            factors = tuple(factor / clip for factor, each in zip(all_factors, sites, strict=True) if each == site)
            if len(factors) >= least:
                line = site.partition(" ")[0]
                shares = _shares(record, first, step["step"], line)
                share = shares[0] if len(shares) == len(factors) and np.allclose(shares, shares[0], rtol=1e-9) else None
                shown_names = tuple(shown(name, list(step["gradients"])) for name in names)
                found.append(
                    MicroBatches(
                        event["number"], event["optimizer"], factors, shown_names, line, share, carried is not None
                    )
                )
    return found


def _carried(
    record: RankRecord, event: Event, given: Mapping[str, Array], own: Sequence[Mapping[str, Array]]
) -> tuple[float, ...] | None:
    """Returns the factors of a step's micro-batches where its gradient is the sum of some of them, and of those of the
    step before that are left out there in the same way; None where it is not."""
    before = contributions_of(record, event["optimizer"], event["number"] - 1)
    if before is None or any(before["sites"].get(name) != event["sites"][name] for name in given):
        return None
    earlier = [{name: before["own"][name][at] for name in given} for at in range(len(own))]
    if sum(array.size for array in given.values()) <= 2 * (len(own) + len(earlier)):
        return None  # any gradient would be some sum of as many parts
    made = combination(given, [*own, *earlier])
    factors, late = made.factors[: len(own)], made.factors[len(own) :]
    least = 1e-9 * max(map(abs, made.factors))
    swapped = all((abs(a) < least) != (abs(b) < least) for a, b in zip(factors, late, strict=True))
    return factors if made.exact and swapped else None


def _splits_rows(record: RankRecord, first: int, until: int) -> bool:
    """Whether the rows of the loss functions called between two steps are those of the one batch that was read, each
    once and in several parts, as the micro-batches of a pipeline are."""
    batches = [event for event in record.events_of("batch") if first <= event["step"] < until]
    read = count(batches[0]["rows"]) if len(batches) == 1 else None
    parts = [event["rows"] or 0 for event in record.events_of("criterion") if first <= event["step"] < until]
    return len(parts) > 1 and sum(parts) == read


def _shares(record: RankRecord, first: int, until: int, site: str) -> list[float]:
    """For each backward at a line, its value over that of its loss function, where there is one for each. They are
    paired in order, as the schedule of a pipeline may call all loss functions before the first backward."""
    events = [event for event in record.events_of("criterion", "backward") if first <= event["step"] < until]
    losses = [event for event in events if event["kind"] == "criterion"]
    backwards = [event for event in events if event["kind"] == "backward" and event["value"] is not None]
    if len(losses) != len(backwards) or any(event["site"] != site for event in backwards):
        return []
    if any(not event["value"] or event["reduction"] != "mean" for event in losses):
        return []
    return [backward["value"] / loss["value"] for loss, backward in zip(losses, backwards, strict=True)]


def _dropped(window: MicroBatches) -> Finding | None:
    largest = max(map(abs, window.factors))
    none = [at for at, factor in enumerate(window.factors) if abs(factor) < 1e-9 * largest]
    if not none or not largest:
        return None
    left = [at for at in range(len(window.factors)) if at not in none]
    which = "the last" if left == [len(window.factors) - 1] else f"number {', '.join(str(at + 1) for at in left)}"
    lost = "is wiped before the step"
    remedy = "Call zero_grad once for each step, after it, and not between its micro-batches."
    if window.carried:
        lost = "comes into that of the next step"
        remedy = (
            "Synchronise the gradients at the last micro-batch of each step: set_requires_gradient_sync(True) belongs "
            "before its forward."
        )
    sentence = (
        f"Only {which} of the {len(window.factors)} micro-batches of a step is in the gradient: what the others added "
        f"{lost}."
    )
    return Finding("dropped_micro_batches", "difference", sentence, remedy, window.names, (), window.step, window.site)


def _unequal(window: MicroBatches) -> Finding | None:
    if np.allclose(window.factors, window.factors[-1], rtol=1e-6):
        return None
    last = window.factors[-1]
    shares = ", ".join(f"{factor / last:.6g}" for factor in window.factors)
    sentence = (
        f"The {len(window.factors)} micro-batches that a step accumulates are weighted differently, relative to the "
        f"last one by {shares}: what is already accumulated is scaled again with each of them."
    )
    return Finding(
        "micro_batches_unequal",
        "difference",
        sentence,
        "Scale each micro-batch's loss, or the accumulated gradient once before the step (a pipeline's schedule with "
        "scale_grads=False, and the loss divided by its micro-batches).",
        window.names,
        (),
        window.step,
        window.site,
        window.factors[0] / last,
    )


def _undivided(window: MicroBatches) -> Finding | None:
    count = len(window.factors)
    if window.share is None:
        return None
    total = window.share * sum(window.factors)
    if np.isclose(total, count, rtol=1e-6):
        sentence = (
            f"The gradients of {count} micro-batches are added and not averaged: a step's gradient is {count} times "
            "that of the mean over its rows."
        )
        remedy = f"Divide each micro-batch's loss by {count}, or the accumulated gradient once before the step."
        return Finding(
            "accumulation_undivided", "difference", sentence, remedy, window.names, (), window.step, window.site,
            float(count),
        )  # fmt: skip
    if np.isclose(total, 1 / count, rtol=1e-6):
        sentence = (
            f"The gradients of {count} micro-batches are divided by their number twice: a step's gradient is 1/{count} "
            "of that of the mean over its rows."
        )
        return Finding(
            "accumulation_divided_twice", "difference", sentence, "Divide by the number of micro-batches once.",
            window.names, (), window.step, window.site, 1 / count,
        )  # fmt: skip
    return None


def _short(record: RankRecord, windows: Sequence[MicroBatches], size: int) -> list[Finding]:
    """A note where a step at the end of an epoch has fewer micro-batches than others, and is divided as they are."""
    if not all(w.share is not None and np.isclose(w.share * size, 1.0) for w in windows if len(w.factors) == size):
        return []
    for event in record.events_of("contributions"):
        for window in _windows(record, event, 1) if event["optimizer"] == windows[0].optimizer else []:
            count = len(window.factors)
            total = None if window.share is None else window.share * sum(window.factors)
            if count < size and total is not None and np.isclose(total, count / size, rtol=1e-6):
                sentence = (
                    f"Step {window.step} accumulates {count} micro-batches, where others have {size}, and is divided "
                    f"by {size} as they are: its gradient is {total:.6g} times that of the mean over its rows."
                )
                remedy = (
                    "Where that is not meant, divide by the number of micro-batches that the step has, or leave the "
                    "last ones of an epoch out."
                )
                return [
                    Finding("short_window", "note", sentence, remedy, window.names, (), window.step, window.site, total)
                ]
    return []
