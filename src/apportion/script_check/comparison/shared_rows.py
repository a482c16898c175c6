"""Which rows each rank reads in an epoch: rows that several ranks read, rows that no rank reads, ranks that end early.
Ranks that hold whole replicas of the network ought to read different rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from apportion.script_check.comparison.reading import Iteration, listed_rows, unlike_selections
from apportion.script_check.comparison.resumes import RESTORES
from apportion.script_check.comparison.tensors import initial
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord

_SHOWN = 4
_WHOLE_EPOCH = 3
"""The fewest batches of an epoch whose last batch may be filled with rows of the first."""


def findings(ranks: Sequence[RankRecord], readings: Sequence[Sequence[Iteration]]) -> list[Finding]:
    """Returns the first epoch of each loader in which ranks share rows, leave rows out, or read unlike numbers of
    batches."""
    found = list[Finding]()
    replicas = are_replicas(ranks)
    seen = set[tuple[str, str]]()
    joining = all(
        record.events_of("join") for record in ranks
    )  # a rank that has ended takes part in the steps of the others
    for epoch in _epochs(readings):
        each = [None if joining else _uneven(epoch)]
        if replicas:
            each += [_shared(ranks, epoch), _unread(ranks, epoch)]
        for finding in each:
            if finding is not None and (finding.name, finding.site) not in seen:
                seen.add((finding.name, finding.site))
                found.append(finding)
    if replicas and not any(record.events_of("iteration") for record in ranks):
        found += _without_loader(ranks)
    return found


def _epochs(readings: Sequence[Sequence[Iteration]]) -> Iterator[dict[int, Iteration]]:
    """The iterations of the same number over the same loader, by rank, where at least two ranks trained on it."""
    places = dict.fromkeys((each.loader, each.number) for iterations in readings for each in iterations if each.trained)
    for loader, number in places:
        epoch = {
            rank: each
            for rank, iterations in enumerate(readings)
            for each in iterations
            if (each.loader, each.number) == (loader, number) and each.trained
        }
        if len(epoch) > 1:
            yield epoch


def _shared(ranks: Sequence[RankRecord], epoch: dict[int, Iteration]) -> Finding | None:
    first = next(iter(epoch.values()))
    rows = {rank: iteration.trained_rows for rank, iteration in epoch.items()}
    readers = Counter(row for each in rows.values() for row in set(each))
    twice = [row for row in readers if readers[row] > 1]
    if unlike_selections(epoch.values()) and (twice or not first.local):
        return _split_finding(first, twice, len(readers), list(rows))
    if not twice or len(readers) < len(epoch):
        return None
    sharing = [rank for rank, each in rows.items() if set(each) & set(twice)]
    identical = all(rows[rank] == rows[sharing[0]] for rank in sharing)
    if identical:
        if not all(compute_the_same(ranks[sharing[0]], ranks[rank]) for rank in sharing[1:]):
            return None  # ranks that compute different parts of the same rows
    elif (
        _drawn_with_replacement(epoch)
        or _padding(epoch, rows, set(twice))
        or (not first.batches[0].indexed and _may_be_equal(rows, len(twice), len(readers)))
    ):
        return None
    alone = not any(record.events_of("collective", "recorder_collective", "ddp") for record in ranks)
    return _shared_finding(first, sharing, twice, len(readers), alone)


def _drawn_with_replacement(epoch: dict[int, Iteration]) -> bool:
    """Whether rows are meant to come several times in an epoch: the sampler says so, or one rank reads a row again
    before its last batch, which may be filled, as it does with a sampler of the script that draws by weights."""
    for iteration in epoch.values():
        rows = [row for batch in iteration.batches[:-1] for row in batch.rows if batch.indexed]
        if iteration.begun["replacement"] or len(set(rows)) < len(rows):
            return True
    return False


def _may_be_equal(rows: dict[int, list[Hashable]], twice: int, every: int) -> bool:
    """Whether values that several ranks read may be those of different rows: few are, or one rank reads equal rows."""
    return 2 * twice < every or any(len(set(each)) < len(each) for each in rows.values())


def _padding(epoch: dict[int, Iteration], rows: dict[int, list[Hashable]], twice: set[Hashable]) -> bool:
    """Whether the rows that come twice are those by which a sampler fills the last batches of an epoch."""
    first = next(iter(epoch.values()))
    at_end = set[Hashable]()
    for iteration in epoch.values():
        if iteration.exhausted and iteration.trained[-1] is iteration.batches[-1]:
            at_end |= set(iteration.batches[-1].rows)
    if not twice <= at_end:
        return False
    most = len(epoch) * max(len(batch.rows) for iteration in epoch.values() for batch in iteration.batches) - 1
    if not first.begun["pads"] and min(len(each.batches) for each in epoch.values()) < _WHOLE_EPOCH:
        most = len(epoch) - 1
    return len(twice) <= most


SPLIT_ALIKE = (
    "Seed all ranks alike before the data set is split, or give random_split a generator with the same seed on all "
    "ranks: rows that one rank leaves out for its evaluation are otherwise trained on by another."
)


def _split_finding(first: Iteration, twice: list[Hashable], every: int, ranks: list[int]) -> Finding:
    """One row number stands for different rows on different ranks, whether or not the same rows were read so far."""
    read = (
        f": in epoch {first.number + 1}, {len(twice)} of {every} rows{listed_rows(twice, _SHOWN)} are read by several"
    )
    sentence = (
        f"The data set of the loader at {first.loader} has different rows on each rank, as each rank splits or draws "
        f"it by itself, and the sampler {first.begun['sampler']} divides only their numbers{read if twice else ''}."
    )
    return Finding(
        "shared_rows", "warning", sentence, SPLIT_ALIKE, ranks=tuple(ranks), step=first.trained[0].step, site=first.site
    )


def _shared_finding(first: Iteration, sharing: list[int], twice: list[Hashable], every: int, alone: bool) -> Finding:
    """``alone``: whether the ranks call no collective."""
    partitions = first.begun["replicas"]
    cause = (
        f"although its sampler {first.begun['sampler']} divides the rows into {partitions} parts"
        if partitions
        else "which has no sampler that distributes rows over the ranks"
    )
    remedy = (
        "Give each rank's sampler its own rank, and the same seed and epoch as the others."
        if partitions
        else "Give the loader a DistributedSampler, or have each rank read its own part of the rows."
    )
    if alone and not partitions:
        cause += "; the ranks call no collective, and each trains a network of its own"
        remedy = (
            "Call torch.distributed.init_process_group, wrap the network in DistributedDataParallel, and give the "
            "loader a DistributedSampler, if the ranks are to train one network."
        )
    sentence = (
        f"In epoch {first.number + 1}, {len(twice)} of {every} rows{listed_rows(twice, _SHOWN)} are read by more "
        f"than one of the ranks {', '.join(map(str, sharing))} through the loader at {first.loader}, {cause}."
    )
    return Finding(
        "shared_rows", "warning", sentence, remedy, ranks=tuple(sharing), step=first.trained[0].step, site=first.site
    )


def _unread(ranks: Sequence[RankRecord], epoch: dict[int, Iteration]) -> Finding | None:
    rank, first = next(iter(epoch.items()))
    if any(event["kind"] in RESTORES for event in ranks[rank].events[: first.position]):
        return None  # rows that were read before a resume
    every = first.begun["rows"]
    whole = all(each.whole and each.batches and all(batch.indexed for batch in each.batches) for each in epoch.values())
    if not whole or every is None or first.begun["subset"] or _drawn_with_replacement(epoch):
        return None
    read = {row for iteration in epoch.values() for batch in iteration.batches for row in batch.rows}
    left = [row for row in range(every) if row not in read]
    if not left or any(not isinstance(row, int) for row in read):
        return None
    sentence = (
        f"In epoch {first.number + 1}, {len(left)} of {every} rows of the loader at {first.loader} are read by no rank "
        f"({', '.join(map(str, left[:_SHOWN]))}{', ...' if len(left) > _SHOWN else ''})."
    )
    remedy = "Leave drop_last out if all rows are to be read in each epoch."
    return Finding("unread_rows", "note", sentence, remedy, site=first.site)


def _uneven(epoch: dict[int, Iteration]) -> Finding | None:
    if not all(iteration.exhausted for iteration in epoch.values()):
        return None
    counts = {
        rank: len(each.batches) if each.begun["full"] is None or each.whole else each.begun["full"]
        for rank, each in epoch.items()
    }
    fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[fewest] == counts[most]:
        return None
    first = epoch[fewest]
    return Finding(
        "uneven_batches",
        "warning",
        f"In epoch {first.number + 1}, rank {fewest} reads {counts[fewest]} batches from the loader at {first.loader} "
        f"and rank {most} reads {counts[most]}: after the end on rank {fewest}, the steps of the ranks no longer "
        "belong together.",
        "Give all ranks the same number of batches, by a sampler that pads or drops the last rows.",
        ranks=(fewest, most),
        step=first.trained[-1].step + 1,
        site=first.site,
    )


def _without_loader(ranks: Sequence[RankRecord]) -> list[Finding]:
    if not average_gradients(ranks) or not all(compute_the_same(ranks[0], record) for record in ranks[1:]):
        return []
    site = next((event["site"] for event in ranks[0].events_of("forward")), "")
    sentence = (
        f"For step 1, all ranks compute the same values from the same rows at {site}, and average "
        f"{len(ranks)} equal gradients."
    )
    remedy = "Have each rank read or draw rows of its own."
    return [
        Finding(
            "shared_rows", "warning", sentence, remedy, ranks=tuple(record.rank for record in ranks), step=1, site=site
        )
    ]


def are_replicas(ranks: Sequence[RankRecord]) -> bool:
    """Returns whether all ranks begin with the same whole network: not so where tensors are placed by tensor
    parallelism, by hand or as DTensors, and for the stages of a pipeline."""
    if len(ranks) < 2:
        return False
    for record in ranks:
        for network in record.events_of("network"):
            if network["placements"] and not network["sharded"]:
                return False
    first, *others = (initial(record) for record in ranks)
    return bool(first) and all(
        set(other) == set(first)
        and all(
            other[name].shape == array.shape and np.array_equal(other[name], array, equal_nan=array.dtype.kind in "fc")
            for name, array in first.items()
        )
        for other in others
    )


def average_gradients(ranks: Sequence[RankRecord]) -> bool:
    """Returns whether a wrapper averages the gradients of all ranks: DistributedDataParallel or fully_shard."""
    return all(any(event["averaged"] or event["sharded"] for event in record.events_of("network")) for record in ranks)


def compute_the_same(one: RankRecord, other: RankRecord) -> bool:
    """Returns whether two ranks compute the same values in all modules for their first step. Later ones may differ by
    accident, as where one rank draws more random numbers than the other."""
    first, second = (
        [(event["inputs"], event["outputs"]) for event in record.events_of("computed") if not event["step"]]
        for record in (one, other)
    )
    return bool(first) and first == second
