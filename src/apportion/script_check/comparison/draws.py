"""Random numbers of one rank against those of another: the same for different rows, or different for the same rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from apportion.script_check.comparison.reading import Iteration, random_values
from apportion.script_check.comparison.shared_rows import are_replicas, compute_the_same
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord

_REMEDY = (
    "Seed the generator with a value that differs between the ranks after the network is made, such as seed + rank."
)
_SEED_ALIKE = "Seed the generator alike on the ranks that hold parts of one network."
_SAME_MASKS = "draw the same masks for different rows: the generator is in the same state on both"
_UNLIKE_MASKS = "draw different masks for the same activations: the states of their generators differ"
_WHOLE_NUMBERS = ("randint", "randrange", "random_", "choice")


def findings(ranks: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> list[Finding]:
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
            name, sentence, remedy = "same_draws", _SAME_MASKS, _REMEDY
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
                        _REMEDY,
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
                    _REMEDY,
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
