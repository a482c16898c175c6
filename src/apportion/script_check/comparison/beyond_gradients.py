"""Findings that no comparison of gradients shows: orders and rows, evaluations, random numbers, settings,
resumes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from apportion.script_check.comparison import evaluations, resumes, settings, shared_rows
from apportion.script_check.comparison.reading import Iteration, identified, random_values, reading
from apportion.script_check.comparison.resumes import RESTORES
from apportion.script_check.comparison.shared_rows import are_replicas, compute_the_same
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

_OF_STEPS = ("learning_rates", "weight_decay", "trained_parameters")


def findings(ranks: Sequence[RankRecord], union: RankRecord | None, *, same_weights: bool) -> list[Finding]:
    """Returns what is wrong apart from the gradients and weights of steps. ``union``: the script as one process, None
    where it does not run so; ``same_weights``: whether its weights are those of the ranks at each step."""
    readings = identified([reading(record) for record in ranks])
    differing = settings.findings(ranks)
    if not same_weights:  # ranks that set their optimizers differently train another network
        differing = [replace(each, severity="difference") if each.name in _OF_STEPS else each for each in differing]
    found = [
        *differing,
        *settings.scaler_findings(ranks),
        *order_findings(ranks, readings),
        *shared_rows.findings(ranks, readings),
        *resumes.findings(ranks, readings),
        *resumes.lost_in_second_run(ranks),
        *draw_findings(ranks, readings),
        *evaluations.findings(ranks, readings, union if same_weights else None),
    ]
    if union is not None:
        found += settings.schedule_findings(ranks, union)
    return found


def shortened(ranks: Sequence[RankRecord]) -> list[str]:
    """Returns a sentence for each loader whose epochs were shortened."""
    lengths = {
        event["loader"]: (event["full"], event["length"])
        for record in ranks
        for event in record.events_of("iteration")
        if event["full"] != event["length"]
    }
    return [
        f"The epochs of the loader at {loader} were shortened from {full} batches to {length}: the first "
        f"{length - 1} and the last."
        for loader, (full, length) in lengths.items()
    ]


# Random numbers of one rank against those of another: the same for different rows, or different for the same rows.


_DRAW_REMEDY = (
    "Seed the generator with a value that differs between the ranks after the network is made, such as seed + rank."
)
_SEED_ALIKE = "Seed the generator alike on the ranks that hold parts of one network."
_SAME_MASKS = "draw the same masks for different rows: the generator is in the same state on both"
_UNLIKE_MASKS = "draw different masks for the same activations: the states of their generators differ"
_WHOLE_NUMBERS = ("randint", "randrange", "random_", "choice")


def draw_findings(ranks: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> list[Finding]:
    """Returns that data-parallel ranks draw the same masks or numbers for different rows, and that ranks draw different
    masks for the same rows."""
    if len(ranks) < 2:
        return []
    distributed = are_replicas(ranks) and not _same_rows(readings)
    found = list[Finding]()
    if distributed:
        found += _masks(ranks, True) or _same_draws(ranks, readings) or _same_worker_seeds(readings)
    elif not are_replicas(ranks):
        found += _masks(ranks, False)
    return found


def _same_rows(readings: Sequence[Sequence[Iteration]]) -> bool:
    """Whether all ranks train on the same rows in the same order."""
    rows = [[row for each in iterations for row in each.trained_rows] for iterations in readings]
    return bool(rows[0]) and all(each == rows[0] for each in rows[1:])


def _masks(ranks: Sequence[RankRecord], alike: bool) -> list[Finding]:
    """Masks of dropout that rank 0 and another rank draw ``alike`` for different rows, or differently for the same."""
    field = "shape" if alike else "site"
    for record in ranks[1:]:
        for one, two in zip(ranks[0].events_of("mask"), record.events_of("mask"), strict=False):
            same_call = one["function"] == two["function"] and one[field] == two[field]
            wrong = (one["state"] == two["state"]) == alike and (one["rows"] == two["rows"]) != alike
            if not same_call or not wrong or one["sharded"]:
                continue
            where = f"{one['function']} at {one['site']} draws for step {one['step'] + 1}"
            name, sentence, remedy = "same_draws", _SAME_MASKS, _DRAW_REMEDY
            if not alike:
                name, sentence, remedy = "unlike_draws", _UNLIKE_MASKS, _SEED_ALIKE
            sentence = f"Ranks 0 and {record.rank} {sentence} when {where}."
            ranks_of = (0, record.rank)
            return [Finding(name, "warning", sentence, remedy, (), ranks_of, one["step"] + 1, one["site"])]
    return []


def _same_draws(ranks: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> list[Finding]:
    """Numbers that a line draws for each row of a batch, in training, alike on ranks whose rows differ."""
    first = _per_row(ranks[0], readings[0])
    for record, iterations in zip(ranks[1:], readings[1:], strict=True):
        if compute_the_same(ranks[0], record):
            continue  # no different rows for which they could differ
        other = _per_row(record, iterations)
        for place, calls in first.items():
            pairs = list(zip(calls, other.get(place, []), strict=False))
            if pairs and all(one["digest"] == two["digest"] and one["digest"] for one, two in pairs):
                event = pairs[0][0]
                return [
                    Finding(
                        "same_draws",
                        "warning",
                        f"Ranks 0 and {record.rank} draw the same random numbers for different rows: each of the "
                        f"{len(pairs)} results of {event['function']} at {event['site']} is the same on both.",
                        _DRAW_REMEDY,
                        ranks=(0, record.rank),
                        step=event["step"] + 1,
                        site=event["site"],
                    )
                ]
    return []


def _same_worker_seeds(readings: Sequence[Sequence[Iteration]]) -> list[Finding]:
    """Loader processes that are seeded alike on two ranks, of data whose rows have other values in each epoch."""
    places = [{(each.loader, each.number): each for each in iterations if each.trained} for iterations in readings]
    for place, first in places[0].items():
        seed = first.begun["worker_seed"]
        alike = [rank for rank, each in enumerate(places) if place in each and each[place].begun["worker_seed"] == seed]
        if seed is None or len(alike) < 2:
            continue
        if random_values([each for each in readings[0] if each.loader == first.loader]):
            return [
                Finding(
                    "same_draws",
                    "warning",
                    f"The processes of the loader at {first.loader} have the same seeds on ranks "
                    f"{', '.join(map(str, alike))}, and the values of its rows are drawn at random: the same numbers "
                    "are drawn for different rows.",
                    _DRAW_REMEDY,
                    ranks=tuple(alike),
                    step=first.trained[0].step,
                    site=first.site,
                )
            ]
    return []


def _per_row(record: RankRecord, iterations: Sequence[Iteration]) -> dict[str, list[Event]]:
    """The draws of each place that are made for single rows, or have an entry for each row of the network's batch, at
    places where the script draws again after its first step."""
    sizes = {event["rows"] for event in record.events_of("computed")}
    found = defaultdict[str, list[Event]](list)
    for event in record.events_of("draw"):
        entries = event["shape"][0] if event["shape"] else None
        if event["function"] == "randperm" or not event["gradients"]:
            continue
        if event["fetching"] or (entries in sizes and entries is not None and entries > 1):
            found[event["place"]].append(event)
    return {
        place: events
        for place, events in found.items()
        if events[-1]["step"] > 0 and not _chooses_rows(events, iterations)
    }


def _chooses_rows(events: Sequence[Event], iterations: Sequence[Iteration]) -> bool:
    """Whether draws of iterable data choose or make the rows of all ranks, of which each rank yields its own: whole
    numbers, as of places in a buffer, more draws than the rank has read rows, or fewer with more entries than that, as
    where all rows of an epoch are drawn at once."""
    streamed = [len(batch.rows) for each in iterations for batch in each.batches if not batch.indexed]
    if not streamed or not events[0]["fetching"]:
        return False
    rows, entries = sum(streamed), sum(event["shape"][0] if event["shape"] else 1 for event in events)
    if len(events) < rows < entries:
        return True
    return events[0]["function"].rpartition(".")[2] in _WHOLE_NUMBERS or len(events) > rows


# The order of rows in one epoch against that of the next: shuffled data whose order repeats.


FEWEST_ROWS = 4
"""The fewest rows whose order counts: fewer may come in the same order by chance."""
_SHOWN = 6


def order_findings(ranks: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> list[Finding]:
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
