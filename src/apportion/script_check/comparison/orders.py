"""The order of rows in one epoch against that of the next: shuffled data whose order repeats."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from apportion.script_check.comparison.reading import Iteration
from apportion.script_check.comparison.resumes import RESTORES
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

FEWEST_ROWS = 4
"""The fewest rows whose order counts: fewer may come in the same order by chance."""
_SHOWN = 6


def findings(ranks: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> list[Finding]:
    """Returns for each loader that it yields the same order in two epochs: a warning where the order is shuffled, a
    note where it is a fixed one."""
    repeated = defaultdict[str, list[tuple[int, Iteration, Iteration]]](list)
    for record, iterations in zip(ranks, readings, strict=True):
        for earlier, later in _epochs(record, iterations):
            if _same(earlier, later):
                known = earlier.loader if earlier.loader == later.loader else _line(earlier)
                repeated[known].append((record.rank, earlier, later))
    return [_finding(found) for found in repeated.values()] + _permutations(ranks)


def _epochs(record: RankRecord, iterations: Sequence[Iteration]) -> list[tuple[Iteration, Iteration]]:
    """The pairs of one epoch and the next of the same loader, or of a loader that the same line has made anew; an epoch
    that a resumed run reads again makes no pair."""
    found = list[tuple[Iteration, Iteration]]()
    last = dict[str, Iteration]()
    for iteration in iterations:
        if not iteration.trained:
            continue
        earlier = last.get(iteration.loader)
        if earlier is None:
            others = (other for other in reversed(last.values()) if _made_anew(record, other, iteration))
            earlier = next(others, None)
        if earlier is not None:
            between = record.events[earlier.position : iteration.position]
            resumed = any(event["kind"] in RESTORES for event in between)
            restarted = any(event["kind"] == "restart" for event in between)
            if not restarted and (earlier.exhausted or not resumed):
                found.append((earlier, iteration))
        last[iteration.loader] = iteration
    return found


def _line(iteration: Iteration) -> str:
    """The line that made the loader; its later loaders are numbered."""
    return re.sub(r" \(\d+\)$", "", iteration.loader)


def _made_anew(record: RankRecord, earlier: Iteration, later: Iteration) -> bool:
    """Whether the loader of a later iteration takes the place of an earlier one: the same line has made it once steps
    were made with the other, of the same rows, for the same optimizer."""
    one, two = earlier.begun, later.begun
    if _line(earlier) != _line(later) or two["made"] < earlier.trained[0].step:
        return False
    if any(one[field] != two[field] for field in ("sampler", "batch_size", "rows", "selection")):
        return False
    if one["data_set"] is None or one["data_set"] != two["data_set"]:
        first, second = earlier.batches[0].contents, later.batches[0].contents
        if not first or first != second:
            return False
    position = later.position
    trained = [
        {event["optimizer"] for event in events if event["kind"] == "step"}
        for events in (record.events[earlier.position : position], record.events[position:])
    ]
    return bool(trained[0] & trained[1])


def _same(earlier: Iteration, later: Iteration) -> bool:
    first, second = earlier.rows, later.rows
    length = min(len(first), len(second))
    return length >= FEWEST_ROWS and len(set(first[:length])) > 1 and first[:length] == second[:length]


def _shuffled(iteration: Iteration) -> bool:
    """Whether the order is meant to be another in each epoch: the sampler says that it shuffles, random numbers were
    drawn for the order, or there is a ``set_epoch`` and the order is not that of the rows."""
    begun: Event = iteration.begun
    if begun["shuffles"] or any(batch.random for batch in iteration.batches):
        return True
    order = [row for row in iteration.rows if isinstance(row, int)]
    return begun["shuffles"] is None and bool(begun["epochs"]) and order != sorted(order)


def _finding(found: Sequence[tuple[int, Iteration, Iteration]]) -> Finding:
    _, earlier, later = found[0]
    ranks = tuple(dict.fromkeys(rank for rank, _, _ in found))
    begun, step, line = earlier.begun, later.trained[0].step, _line(earlier)
    anew = earlier.loader != later.loader
    epochs = "Two epochs" if anew else f"Epochs {earlier.number + 1} and {later.number + 1}"
    made = ", which is made anew for each," if anew else ""
    indexed = earlier.batches[0].indexed
    first = f" (rows {', '.join(map(str, earlier.rows[:_SHOWN]))}, ...)" if indexed else ""
    where = f"on rank {ranks[0]}" if len(ranks) == 1 else f"on ranks {', '.join(map(str, ranks))}"
    if not _shuffled(earlier):
        return Finding(
            "fixed_order",
            "note",
            f"{epochs} of the loader at {line}{made} have the same order of rows {where}{first}: no sampler shuffles.",
            "Shuffle the training rows if they are meant to come in another order in each epoch.",
            ranks=ranks,
            step=step,
            site=line,
        )
    kind = begun["sampler"] if indexed else "data set"
    remedy = (
        "Call set_epoch(epoch) of the sampler or data set before each epoch."
        if begun["epochs"]
        else "Do not seed the generator of the order with the same value in each epoch; add the number of the epoch."
    )
    sentence = (
        f"{epochs} have the same order of rows {where}{first}, although the {kind} of the loader at {line}{made} "
        f"shuffles."
    )
    return Finding("same_order", "warning", sentence, remedy, ranks=ranks, step=step, site=line)


def _permutations(ranks: Sequence[RankRecord]) -> list[Finding]:
    """The same for scripts without loaders: a permutation that a line draws again after steps."""
    if any(record.events_of("iteration") for record in ranks):
        return []
    for record in ranks:
        last = dict[str, Event]()
        for event in record.events_of("draw", "permutation", "restart"):
            if event["kind"] == "restart":
                last.clear()
                continue
            if (event["kind"] == "draw" and event["function"] != "randperm") or not event["gradients"]:
                continue
            before = last.get(event["place"])
            last[event["place"]] = event
            if (
                before is not None
                and before["digest"] == event["digest"]
                and event["step"] > before["step"]
                and event["shape"][0] >= FEWEST_ROWS
            ):
                return [
                    Finding(
                        "same_order",
                        "warning",
                        f"The order of {event['shape'][0]} rows that {event['site']} draws before step "
                        f"{event['step'] + 1} is the one that it drew before step {before['step'] + 1}: the order of "
                        "rows repeats.",
                        "Do not seed the generator of the order with the same value in each epoch; add the number of "
                        "the epoch.",
                        ranks=(record.rank,),
                        step=event["step"] + 1,
                        site=event["site"],
                    )
                ]
    return []
